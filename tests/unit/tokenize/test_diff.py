"""Pairs of requests with one known cause each, through the tiny model's own template and without any tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.core.hashing import pack_tokens
from router.diff import run, sketch
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.parting import Parting, Prompt, diff
from router.tokenize.rendering import renderer
from tests.unit.tokenize.exported import TINY, tiny_exported, with_template

RULES = "Follow the rules of the house and answer in one sentence. " * 20


def chat(system: str = RULES, user: str = "How do I open a file?", **more: Any) -> dict[str, Any]:
    said = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "m", "messages": said, **more}


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def reordered_keys(made: dict[str, Any]) -> dict[str, Any]:
    function = made["function"]
    parameters = dict(reversed(function["parameters"].items()))
    return {"type": "function", "function": {**function, "parameters": parameters}}


FIRST, SECOND = tool("search", q="string"), tool("open", path="string", mode="string")
TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]

PAIRS = [
    ("timestamp", chat(f"It is 2026-11-29T13:05:26Z. {RULES}"), chat(f"It is 2026-11-29T13:07:01Z. {RULES}")),
    ("timestamp", chat(f"Today is Sunday, 29 Nov 2026. {RULES}"), chat(f"Today is Monday, 30 Nov 2026. {RULES}")),
    ("timestamp", chat(f"now=1764421526 {RULES}"), chat(f"now=1764421999 {RULES}")),
    (
        "request_id",
        chat(f"Request 7f9c24e8-3b12-4fef-91e0-5a2b1c9d7e01. {RULES}"),
        chat(f"Request 91aa03b4-77de-4c02-b8a1-0f4d2e6c5b13. {RULES}"),
    ),
    ("request_id", chat(f"trace req_8fK2mQ9xLp {RULES}"), chat(f"trace req_1cV7nB4zTd {RULES}")),
    ("tools_reordered", chat(tools=[FIRST, SECOND]), chat(tools=[SECOND, FIRST])),
    ("tools_key_order", chat(tools=[SECOND]), chat(tools=[reordered_keys(SECOND)])),
    ("tools_changed", chat(tools=[FIRST]), chat(tools=[tool("find", q="string")])),
    ("default_system", chat(), {"model": "m", "messages": chat()["messages"][1:]}),
    ("white_space", chat(RULES), chat(RULES.rstrip())),
    ("white_space", chat(user="open a  file please"), chat(user="open a file please")),
    ("salt", chat(cache_salt="a"), chat(cache_salt="b")),
    ("model", chat(), {**chat(), "model": "adapter"}),
    ("message_changed", {"messages": TURN}, {"messages": [{**TURN[0], "content": "x"}, *TURN[1:]]}),
    ("prompt_changed", {"model": "m", "prompt": RULES + "this"}, {"model": "m", "prompt": RULES + "that"}),
    ("none", chat(), chat(temperature=0.5)),
]  # fmt: skip


@pytest.fixture(scope="module")
def exact() -> Any:
    return renderer(ModelRenderer(tiny_exported(), ModelOptions()))


@pytest.mark.parametrize(("cause", "a", "b"), [pytest.param(*p, id=f"{n}-{p[0]}") for n, p in enumerate(PAIRS)])
def test_each_pair_has_its_cause(exact: Any, cause: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    assert diff(a, b, exact).cause == cause


@pytest.mark.parametrize(("cause", "a", "b"), [pytest.param(*p, id=f"{n}-{p[0]}") for n, p in enumerate(PAIRS)])
def test_and_also_without_a_tokenizer(cause: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    assert diff(a, b, sketch).cause == cause


def test_a_template_variable_at_the_front_is_named() -> None:
    model = ModelRenderer(with_template("{{ mode }}{% for m in messages %}{{ m.content }}{% endfor %}"), ModelOptions())
    a, b = chat(chat_template_kwargs={"mode": "quick"}), chat(chat_template_kwargs={"mode": "slow"})
    assert diff(a, b, renderer(model)).cause == "template_kwargs"


def test_the_next_turn_is_a_continuation(exact: Any) -> None:
    first = {"model": "m", "messages": TURN}
    answered = {
        "model": "m",
        "messages": [*TURN, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}],
    }
    found = diff(first, answered, exact)
    assert (found.cause, found.lost_blocks) == ("continuation", 0)
    assert found.shared_tokens == found.a_tokens


def test_the_unicode_form_is_named() -> None:
    a, b = chat(f"Bewahre die Schlüssel. {RULES}"), chat(f"Bewahre die Schlu\u0308ssel. {RULES}")
    assert diff(a, b, sketch).cause == "unicode_form"


def test_a_doubled_bos_is_named() -> None:
    def with_bos(body: dict[str, Any]) -> Any:
        ids = [1] * body["bos"] + list(range(10, 40))
        return Prompt(text="<s>" * body["bos"] + "text", ids=pack_tokens(ids))

    assert diff({"bos": 1}, {"bos": 2}, with_bos).cause == "bos"
    assert diff({"bos": 0}, {"bos": 1}, with_bos).cause == "bos"


def test_dropped_reasoning_is_named() -> None:
    thought = {"role": "assistant", "content": "b", "reasoning": "because"}
    a = {"model": "m", "messages": [TURN[0], thought, TURN[2]]}
    b = {"model": "m", "messages": TURN}
    assert diff(a, b, sketch).cause == "reasoning_dropped"


def test_what_it_costs(exact: Any) -> None:
    a, b = chat(f"It is 13:05. {RULES}"), chat(f"It is 14:17. {RULES}")
    found = diff(a, b, exact, block_size_tokens=16)
    assert isinstance(found, Parting)
    assert found.exact
    assert found.shared_blocks == 0
    assert found.lost_blocks == found.b_tokens // 16
    assert "⟪3:05. Follow" in found.around_a
    assert "⟪4:17. Follow" in found.around_b


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(chat(tools=[FIRST, SECOND])))
    b.write_text(json.dumps(chat(tools=[SECOND, FIRST])))
    assert run([str(a), str(b), "--tokenizer", str(TINY)]) == 1
    assert "tools_reordered" in capsys.readouterr().out
    assert run([str(a), str(a), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "none"
    assert run([str(a), str(tmp_path / "none.json")]) == 2
    b.write_text("[1]")
    assert run([str(a), str(b)]) == 2
    assert "not a JSON object" in capsys.readouterr().err
