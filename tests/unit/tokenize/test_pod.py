"""Asking a pod: what is asked, what is not, and the budget; and the canary's bookkeeping."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.hashing import pack_tokens
from router.ops import Metrics
from router.tokenize.canary import ALWAYS_FIRST_REQUESTS, Difference, Parity, first_difference
from router.tokenize.chat import Unrenderable
from router.tokenize.pod import PodBudget, tokenize_body
from router.tokenize.port import NoTokens, PromptTokens
from router.tokenize.service import TokenLimits, TokenService
from tests.unit.tokenize.exported import tiny_exported, with_template
from tests.unit.tokenize.test_service import CHAT, returns_tiny, settled

CHATS = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"messages": HELLO, "temperature": 1, "stream": True}, {"messages": HELLO}),
        (
            {"messages": HELLO, "tools": [{"a": 1}], "add_generation_prompt": False},
            {"messages": HELLO, "tools": [{"a": 1}], "add_generation_prompt": False},
        ),
        (
            {"messages": HELLO, "reasoning_effort": "none", "chat_template_kwargs": {"x": 1}},
            {
                "messages": HELLO,
                "chat_template_kwargs": {"x": 1, "enable_thinking": False, "reasoning_effort": "none"},
            },
        ),
        (
            {"messages": [{"role": "assistant", "reasoning_content": "r", "content": "c"}]},
            {"messages": [{"role": "assistant", "content": "c", "reasoning": "r"}]},
        ),
    ],
)
def test_a_chat_becomes_a_question(body: dict[str, Any], asked: dict[str, Any]) -> None:
    assert json.loads(tokenize_body(CHATS, msgspec.json.encode(body))) == asked


def test_a_batch_of_prompts_asks_for_its_first() -> None:
    asked = tokenize_body("/v1/completions", b'{"prompt": ["a b", "c"], "max_tokens": 3}')
    assert json.loads(asked) == {"prompt": "a b", "add_special_tokens": True}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHATS, b"{"),
        (CHATS, b"[]"),
        (CHATS, b'{"messages": 3}'),
        (CHATS, b'{"messages": [], "truncate_prompt_tokens": 3}'),
        ("/v1/completions", b'{"prompt": [1, 2]}'),
        ("/v1/messages", b'{"messages": []}'),
    ],
)
def test_what_cannot_be_asked(endpoint: str, body: bytes) -> None:
    with pytest.raises(Unrenderable):
        tokenize_body(endpoint, body)


async def test_the_budget_bounds_questions_and_rests_after_a_failure() -> None:
    now, answers, asked = [0.0], [b'{"tokens": [1, 2]}'], 0
    gate = asyncio.Event()

    async def ask(model: str, question: bytes) -> bytes | None:
        nonlocal asked
        asked += 1
        await gate.wait()
        if not answers:
            raise OSError
        return answers[0]

    budget = PodBudget(ask, clock=lambda: now[0], in_flight_max=1, deadline_s=30, rest_s=5)
    body = msgspec.json.encode({"messages": HELLO})
    first = asyncio.ensure_future(budget.tokens("m", CHATS, body))
    await asyncio.sleep(0)
    assert await budget.tokens("m", CHATS, body) is None  # one is in flight
    gate.set()
    assert await first == pack_tokens([1, 2])
    answers.clear()
    assert await budget.tokens("m", CHATS, body) is None
    assert asked == 2
    assert await budget.tokens("m", CHATS, body) is None  # rests
    assert asked == 2
    now[0], answers[:] = 6.0, [b"no JSON"]
    assert await budget.tokens("m", CHATS, body) is None
    assert asked == 3


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
def test_the_first_difference_is_where_a_walk_finds_it(ours: list[int], theirs: list[int]) -> None:
    found = first_difference(pack_tokens(ours), pack_tokens(theirs))
    walk = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if ours == theirs:
        assert found is None
    else:
        assert found is not None
        assert (found.index, found.our_tokens, found.their_tokens) == (walk, len(ours), len(theirs))


def test_the_first_requests_are_compared_and_then_a_share() -> None:
    parity = Parity(one_in=10)
    taken = [parity.take() for _ in range(ALWAYS_FIRST_REQUESTS + 100)]
    assert all(taken[:ALWAYS_FIRST_REQUESTS])
    assert sum(taken[ALWAYS_FIRST_REQUESTS:]) == 10
    assert not any(Parity(one_in=0).take() for _ in range(30))


def test_a_model_is_suspect_after_several_differences_and_says_so_once() -> None:
    parity = Parity(one_in=1)
    difference = Difference(index=3, ours=1, theirs=2, our_tokens=9, their_tokens=9)
    assert [parity.record(d) for d in (None, difference, None, difference, difference)] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert parity.details()["last_difference"]["index"] == 3
    assert [parity.record(None) for _ in range(20)] == [False] * 20
    assert not parity.is_suspect


async def test_a_wrong_template_is_reported_within_20_requests_and_the_pods_are_asked_instead() -> None:
    right = TokenService({"m": "x"}, loader=returns_tiny)
    await right.start()
    await settled(right)

    async def ask(model: str, question: bytes) -> bytes:
        answer = await right.prompt(model="m", endpoint=CHATS, body=question)
        assert isinstance(answer, PromptTokens)
        return msgspec.json.encode({"tokens": list(memoryview(answer.packed).cast("I"))})

    metrics = Metrics()
    wrong = TokenService(
        {"m": "x"},
        loader=lambda source, **_: with_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"),
        ask_pod=ask,
        metrics=metrics,
        limits=TokenLimits(pod_when_suspect=True, compare_one_in=1000),
    )
    await wrong.start()
    try:
        await settled(wrong)
        true_ids = await right.prompt(model="m", endpoint=CHATS, body=CHAT)
        for _ in range(20):
            found = await wrong.prompt(model="m", endpoint=CHATS, body=CHAT)
            await asyncio.gather(*wrong._comparing)
            if found == true_ids:
                break
        assert found == true_ids
        details = wrong.status()["models"]["m"]["parity"]
        assert details["suspect"]
        assert metrics.value("warmroute_token_parity_total", result="different") == details["differed"] > 0
    finally:
        await right.close()
        await wrong.close()


@pytest.mark.parametrize(("coded", "asks"), [("deepseek_v32", 1), ("harmony", 0), (None, 0)])
async def test_pods_are_asked_for_models_that_the_engine_encodes_in_code(coded: str | None, asks: int) -> None:
    questions: list[str] = []

    async def ask(model: str, question: bytes) -> bytes:
        questions.append(model)
        return b'{"tokens": [7, 8]}'

    exported = msgspec.structs.replace(tiny_exported(), unrenderable=coded)
    limits = TokenLimits(compare_one_in=0)
    service = TokenService({"m": "x"}, loader=lambda *_, **__: exported, ask_pod=ask, limits=limits)
    await service.start()
    try:
        await settled(service)
        found = await service.prompt(model="m", endpoint=CHATS, body=CHAT)
        assert len(questions) == asks
        if asks:
            assert found == PromptTokens(packed=pack_tokens([7, 8]))
        else:
            assert isinstance(found, PromptTokens if coded is None else NoTokens)
        refused = await service.prompt(model="m", endpoint=CHATS, body=b"{")
        assert isinstance(refused, NoTokens)
    finally:
        await service.close()


async def test_without_any_tokenizer_no_pod_is_asked() -> None:
    async def ask(model: str, question: bytes) -> bytes:
        raise AssertionError(model)

    service = TokenService(ask_pod=ask)
    await service.start()
    try:
        assert isinstance(await service.prompt(model="m", endpoint=CHATS, body=CHAT), NoTokens)
    finally:
        await service.close()
