"""Prompts that part early from one much like them, found among live ones."""

import asyncio
from typing import Any

import msgspec

from router.diff import sketch
from router.ops import Metrics
from router.tokenize.partings import PartingWatch
from router.tokenize.service import TokenLimits, TokenService
from tests.unit.tokenize.test_service import returns_tiny, settled

RULES = " ".join(f"Rule {n}: answer question {n} with file {n}.md and be brief." for n in range(30))


def chat(system: str, user: str = "How do I open a file?", **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        **more,
    }


def examine(watch: PartingWatch, body: dict[str, Any]) -> Any:
    return watch.examine(msgspec.json.encode(body), sketch(body).text, sketch)


def test_a_date_at_the_front_is_noticed() -> None:
    watch = PartingWatch(one_in=1)
    assert examine(watch, chat(f"It is 2026-11-29 13:05. {RULES}")) is None
    assert examine(watch, chat(f"It is 2026-11-29 14:59. {RULES}")) == "timestamp"
    details = watch.details()
    assert details["causes"] == {"timestamp": 1}
    assert details["lost_tokens"] > 200
    assert "Rule" not in msgspec.json.encode(details).decode()


def test_what_is_no_early_parting() -> None:
    watch = PartingWatch(one_in=1)
    first = chat(RULES)
    assert examine(watch, first) is None
    assert examine(watch, chat(RULES, user="How do I close it again?")) is None  # parts late
    turn = {**first, "messages": [*first["messages"], {"role": "assistant", "content": "So."}]}
    assert examine(watch, turn) is None  # goes on
    other = " ".join(f"Law {n}: nobody may pass gate {n} after hours." for n in range(30))
    assert examine(watch, chat(other)) is None  # something else altogether
    assert examine(watch, chat(f"It is 13:05. {RULES}", cache_salt="another tenant")) is None
    assert watch.details()["causes"] == {}


def test_the_sampling_and_its_bound() -> None:
    watch = PartingWatch(one_in=10)
    assert sum(watch.take(100) for _ in range(100)) == 10
    assert not any(watch.take(10**7) for _ in range(100))
    assert not any(PartingWatch(one_in=0).take(100) for _ in range(100))


async def test_live_requests_are_watched_in_the_pool() -> None:
    metrics = Metrics()
    service = TokenService({"m": "x"}, loader=returns_tiny, metrics=metrics, limits=TokenLimits(watch_one_in=1))
    await service.start()
    try:
        await settled(service)
        for minute in range(10, 15):
            body = msgspec.json.encode(chat(f"Today, 10:{minute}, we begin. {RULES}"))
            await service.prompt(model="m", endpoint="/v1/chat/completions", body=body)
        async with asyncio.timeout(60):
            while service.partings()["m"]["examined"] < 5:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while not metrics.value("warmroute_early_partings_total", cause="timestamp"):
                await asyncio.sleep(0.01)
        assert service.partings()["m"]["causes"]["timestamp"] >= 1
    finally:
        await service.close()
