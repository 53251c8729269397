"""What one stream says of itself, prompts of exact length, scenarios, the parts of several clients. No sockets."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import pytest
from tokenizers import Tokenizer

from loadtest.compare import command_line
from loadtest.crowd import Stream
from loadtest.crowds import share
from loadtest.experiment import REGIMES_DIR, SCENARIOS_DIR, Client, Experiment, ScenarioError, faster, load_experiment
from loadtest.fleet.text import TINY_MODEL
from loadtest.pods import difference, parse_counters
from loadtest.prompts import COMMON_WORDS, Prompts, plain_words
from loadtest.samples import Gaps
from loadtest.workload import Segment, Turn

RECORDED = Path(__file__).parent.parent.parent / "data" / "recorded"


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 30, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
CHAT = (
    event(delta={"role": "assistant", "content": ""})
    + event(delta={"content": "Hel"})
    + event(delta={"content": 'lo "you'})
    + event(delta={"content": " two\nlines"}, finish_reason="length")
    + b"data: "
    + json.dumps({"choices": [], "usage": USAGE}).encode()
    + b"\n\ndata: [DONE]\n\n"
)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("crlf", [False, True])
def test_a_stream_cut_anywhere_is_measured_alike(seed: int, crlf: bool) -> None:
    raw = CHAT.replace(b"\n\n", b"\r\n\r\n") if crlf else CHAT
    rng = Random(seed)
    cuts = sorted(rng.sample(range(1, len(raw)), rng.randrange(0, 12)))
    stream = Stream(0.0, Gaps(), keep_events=True)
    for n, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(raw)], strict=True)):
        stream.feed(raw[a:b], 1.0 + n)
    assert stream.verdict() is None
    assert stream.text() == 'Hello "you two\nlines'
    s = stream.sample(0.0, 0.0, 99.0, None, "g")
    assert (s.prompt_tokens, s.output_tokens, s.cached_tokens, s.events) == (30, 3, 16, 3)
    whole = raw.index(b"Hel") + raw[raw.index(b"Hel") :].index(b"\r\n\r\n" if crlf else b"\n\n") + (4 if crlf else 2)
    assert s.ttft_s == 1.0 + sum(c < whole for c in cuts), "the first event with text, when it was complete"


def test_a_gateways_way_of_writing_events_is_understood() -> None:
    raw = CHAT.replace(b"data: ", b": hi\nevent: message\nid: 7\ndata:") + b": bye\n\n"
    stream = Stream(0.0, Gaps(), keep_events=True)
    stream.feed(raw + b'{"choices": "text"}\n\n', 1.0)
    assert (stream.verdict(), stream.text()) == (None, 'Hello "you two\nlines')
    assert stream.sample(0.0, 0.0, 1.0, None, "g").cached_tokens == 16


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        pytest.param(CHAT.replace(b"data: [DONE]\n\n", b""), "cut", id="no end"),
        pytest.param(b"data: [DONE]\n\n", "empty", id="nothing in it"),
        pytest.param(event(delta={"content": "a"}) + b'data: {"error":{"message":"x"}}\n\n', "error_event", id="error"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(body: bytes, verdict: str) -> None:
    stream = Stream(0.0, Gaps())
    stream.feed(body, 1.0)
    assert stream.verdict() == verdict


def test_many_events_in_one_read_show() -> None:
    stream = Stream(0.0, Gaps())
    stream.feed(CHAT, 1.0)
    s = stream.sample(0.0, 0.0, 1.0, None, "")
    assert (s.events, s.reads) == (3, 1)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 700])
def test_a_prompt_has_exactly_the_asked_number_of_tokens(tokens: int) -> None:
    """Counted by the tokenizer itself, whatever the slice and the neighbours."""
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    prompts = Prompts(plain_words(TINY_MODEL))
    turn = Turn((Segment(5, tokens, 37), Segment(6, 11)), 4, Segment(7, 4))
    body = json.loads(prompts.body(turn, {}, api="completions", model="m", extra={}))
    assert len(tokenizer.encode(body["prompt"]).ids) == tokens + 11
    assert body["stream_options"] == {"include_usage": True}


def test_equal_slices_are_equal_texts_and_a_namespace_changes_all() -> None:
    prompts = Prompts(COMMON_WORDS)
    whole = prompts.text(Segment(5, 300)).split()
    assert prompts.text(Segment(5, 100, 130)).split() == whole[130:230]
    assert prompts.text(Segment(6, 300)).split() != whole
    other = Prompts(COMMON_WORDS, namespace="x").text(Segment(5, 300)).split()
    assert len(other) == 300
    assert other != whole


def test_a_chat_turn_holds_the_real_answers() -> None:
    prompts = Prompts(COMMON_WORDS)
    turn = Turn((Segment(1, 5), Segment(2, 3), Segment(9, 4), Segment(3, 2)), 4, Segment(10, 4))
    body = json.loads(prompts.body(turn, {9: "said"}, api="chat", model="m", extra={"ignore_eos": None}))
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == "said"
    assert "ignore_eos" not in body, "a field set to null is left out, not sent"


def test_no_field_is_ever_null() -> None:
    """A null field makes some gateways refuse the request (H74)."""
    turn = Turn((Segment(1, 5),), 4, Segment(10, 4))
    for api in ("chat", "completions"):
        body = Prompts(COMMON_WORDS).body(turn, {}, api=api, model="m", extra={"stop": None})
        assert b"null" not in body


def test_a_turn_of_an_adapter_names_it_as_its_model() -> None:
    turn = Turn((Segment(1, 20),), 5, Segment(9, 5), adapter="ad")
    assert json.loads(Prompts(COMMON_WORDS).body(turn, {}, api="chat", model="m", extra={}))["model"] == "ad"


FILES = sorted([*SCENARIOS_DIR.glob("*.toml"), *REGIMES_DIR.glob("*.toml")])
# a thousand pods' worth of sessions takes seconds to build and shows nothing more
WITHOUT_TRACE = [p.stem for p in FILES if p.stem != "thousand-pods" and "\nfile" not in p.read_text()]


@pytest.mark.parametrize("name", WITHOUT_TRACE)
def test_every_scenario_can_be_sent(name: str) -> None:
    experiment = load_experiment(name)
    stages = experiment.build(1).stages
    assert any(s.measured and s.sessions for s in stages)


def test_a_warm_up_is_cut_off_the_front() -> None:
    plain = load_experiment("quick", {"warmup_s": 0.0}).build(3)
    cut = load_experiment("quick", {"warmup_s": 10.0}).build(3)
    assert [s.measured for s in cut.stages] == [False, True]
    assert [len(s.sessions) for s in cut.stages] == [
        sum(x.start_s < 10 for x in plain.stages[0].sessions),
        sum(x.start_s >= 10 for x in plain.stages[0].sessions),
    ]
    assert cut.stages[0].seconds + cut.stages[1].seconds == plain.stages[0].seconds


def test_constant_arrivals_are_evenly_spaced() -> None:
    stage = load_experiment("quick", {"warmup_s": 0.0, "arrivals": "constant"}).build(3).stages[0]
    times = [s.start_s for s in stage.sessions]
    gaps = {round(b - a, 9) for a, b in pairwise(times)}
    assert len(gaps) == 1
    assert 0 < times[0] < times[-1] < stage.seconds


def test_stages_share_their_prefixes_and_repeat_no_question() -> None:
    stages = load_experiment("quick", {"stages": [[3.0, 10.0], [20.0, 15.0]]}).build(3).stages
    assert [(s.name, s.rate_per_s, s.seconds, len(s.sessions)) for s in stages] == [
        ("3/s", 3.0, 10.0, 30),
        ("20/s", 20.0, 15.0, 300),
    ]
    prompts = [s.turns[0].prompt for stage in stages for s in stage.sessions]
    assert len({p[-1].content for p in prompts}) == 330, "every question is new"
    assert len({p[0].content for p in prompts}) == 24, "the prefixes are the same in all stages"
    for stage in stages:
        assert all(0 <= s.start_s <= stage.seconds for s in stage.sessions)


def test_a_slower_clock_stretches_every_time() -> None:
    experiment = Experiment(name="x", workload=[{"kind": "chat", "rate": 2.0, "seconds": 20.0}], client=Client())
    plain, slow = experiment.build(3), faster(experiment.build(3), 0.25)
    for a, b in zip(plain.stages[0].sessions, slow.stages[0].sessions, strict=True):
        assert b.start_s == a.start_s * 4
        assert [t.think_s * 4 for t in a.turns] == [t.think_s for t in b.turns]
    assert slow.stages[0].rate_per_s == plain.stages[0].rate_per_s / 4


def test_client_processes_share_every_session_once() -> None:
    sessions = load_experiment("quick").build(3).stages[1].sessions
    parts = [share(sessions, n, 3) for n in range(3)]
    assert sorted(s.start_s for p in parts for s in p) == sorted(s.start_s for s in sessions)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        pytest.param("nonsense", {}, "known: ", id="unknown name"),
        pytest.param("quick", {"kind": "magic"}, "no kind 'magic'", id="unknown kind"),
        pytest.param(
            "quick", {"colour": 3}, "it has no 'colour'; it has rate, seconds, .*warmup_s", id="no such setting"
        ),
        pytest.param("quick", {"seconds": "abc"}, "'seconds' must be a number, got 'abc'", id="no number"),
        pytest.param("quick", {"kind": "rag"}, "does not fit kind 'rag'", id="another kind's settings"),
        pytest.param("quick", {"seconds": 5}, r"all of its 5 s are warm-up \(warmup_s is 10\)", id="only warm-up"),
        pytest.param("quick", {"api": "smoke"}, "scenario quick.toml", id="bad value"),
    ],
)
def test_a_bad_scenario_is_refused_with_the_cure(name: str, changes: dict, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        load_experiment(name, changes).build(1)


def test_counters_of_a_real_engine_are_read() -> None:
    c = parse_counters((RECORDED / "default" / "metrics.txt").read_text())
    assert msgspec.structs.astuple(c) == (21989, 6112, 21989, c.generated_tokens, 0, 33)
    assert c.generated_tokens > 0


def test_a_pod_that_restarted_meanwhile_counts_from_its_new_beginning() -> None:
    before = parse_counters("vllm:prompt_tokens_total 500.0\nvllm:generation_tokens_total 70.0\n")
    after = parse_counters("vllm:prompt_tokens_total 30.0\nvllm:generation_tokens_total 90.0\n")
    assert difference({"a": before}, {"a": after})["a"].prompt_tokens == 30
    assert difference({"a": before}, {"a": after, "b": after})["b"].generated_tokens == 90
    assert difference({"a": after}, {"a": before})["a"].prompt_tokens == 500, "one counter went back: a new life"


def test_keys_do_not_get_into_the_report() -> None:
    argv = ["x", "loadtest", "run", "--api-key", "sk-1", "--header", "Authorization: Bearer sk-2", "--api-key=sk-3"]
    assert "sk-" not in command_line(argv)
    assert command_line(["x/__main__.py", "run", "--seed", "3"]) == "warmroute loadtest run --seed 3"
    assert command_line(["warmroute", "loadtest", "run"]) == "warmroute loadtest run"
