"""Loading, failing and falling back, with a loader that is handed in."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from router.core.hashing import pack_tokens
from router.tokenize.export import Exported
from router.tokenize.load import LoadFailure
from router.tokenize.port import NoTokens, PromptTokens
from router.tokenize.service import TokenLimits, TokenService
from router.tokenize.shelf import LoadLimits
from tests.unit.tokenize.exported import tiny_exported

CHAT = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hello there"}]})


def returns_tiny(source: str, **_: Any) -> Exported:
    return tiny_exported()


async def settled(service: TokenService) -> None:
    """Until no model is loading any more."""
    async with asyncio.timeout(60):
        while any(m["state"] == "loading" for m in service.status()["models"].values()):
            await asyncio.sleep(0.005)


async def test_token_id_prompts_need_no_tokenizer() -> None:
    service = TokenService()
    await service.start()
    try:
        for prompt, ids in [([1, 2, 3], [1, 2, 3]), ([[4, 5], [6]], [4, 5])]:
            body = msgspec.json.encode({"model": "m", "prompt": prompt})
            found = await service.prompt(model="anything", endpoint="/v1/completions", body=body)
            assert found == PromptTokens(packed=pack_tokens(ids))
    finally:
        await service.close()


async def test_text_without_a_tokenizer_is_counted_by_reason() -> None:
    service = TokenService()
    await service.start()
    try:
        found = await service.prompt(model="m", endpoint="/v1/chat/completions", body=CHAT)
        assert isinstance(found, NoTokens)
        assert found.reason == "no_tokenizer"
        assert service.outcomes["no_tokenizer"] == 1
    finally:
        await service.close()


async def test_a_configured_served_name_counts_for_the_base_model() -> None:
    service = TokenService({"served": "some/where"}, loader=returns_tiny)
    await service.start()
    try:
        service.ensure("base/id", "/models/base", names=("other", "served"))
        await settled(service)
        found = await service.prompt(model="base/id", endpoint="/v1/chat/completions", body=CHAT)
        assert isinstance(found, PromptTokens)
        assert service.status()["models"]["served"]["models"] == ["base/id", "served"]
    finally:
        await service.close()


@pytest.mark.parametrize(
    ("model", "names", "here", "expected"),
    [
        pytest.param("/models/here", (), {"/models/here"}, [("/models/here", True)], id="a folder"),
        pytest.param("org/model", (), {"org/model"}, [("org/model", True)], id="the hub's cache, without the hub"),
        pytest.param("org/model", ("tiny",), set(), [("org/model", False)], id="else the hub"),
        pytest.param("/pods/own", ("org/model",), set(), [("org/model", False)], id="the pod's path is not here"),
        pytest.param("/pods/own", ("org/model",), {"org/model"}, [("org/model", True)], id="but its id is cached"),
    ],
)
async def test_where_the_tokenizer_of_an_unset_model_comes_from(
    model: str, names: tuple[str, ...], here: set[str], expected: list[tuple[str, bool]]
) -> None:
    asked: list[tuple[str, bool]] = []

    def loader(source: str, *, offline: bool, **_: Any) -> Exported:
        asked.append((source, offline))
        return tiny_exported()

    service = TokenService(loader=loader, at_hand=here.__contains__, may_be_fetched=lambda s: s.startswith("org/"))
    await service.start()
    try:
        service.ensure(model, names=names)
        await settled(service)
        assert asked == expected
        assert isinstance(await service.prompt(model=model, endpoint="/v1/chat/completions", body=CHAT), PromptTokens)
    finally:
        await service.close()


async def test_what_the_cache_has_in_part_only_is_fetched() -> None:
    asked: list[tuple[str, bool]] = []

    def loader(source: str, *, offline: bool, **_: Any) -> Exported:
        asked.append((source, offline))
        if offline:
            raise LoadFailure("tokenizer.json is missing")
        return tiny_exported()

    limits = TokenLimits(load=LoadLimits(retry_first_s=0.01))
    service = TokenService(loader=loader, limits=limits, at_hand=lambda _: True, may_be_fetched=lambda _: True)
    await service.start()
    try:
        service.ensure("org/model")
        async with asyncio.timeout(60):
            while service.status()["models"]["org/model"]["state"] != "ready":
                await asyncio.sleep(0.01)
        assert asked == [("org/model", True), ("org/model", False)]
    finally:
        await service.close()


async def test_what_is_nowhere_is_told_with_its_cure(caplog: pytest.LogCaptureFixture) -> None:
    service = TokenService(loader=returns_tiny, at_hand=lambda _: False, may_be_fetched=lambda _: False)
    await service.start()
    try:
        service.ensure("gone", "/models/gone")
        await settled(service)
        assert service.status()["models"]["/models/gone"]["state"] == "absent"
        assert caplog.messages[0].startswith("tokenizer /models/gone: not on this machine; --tokenizer gone=PATH ")
    finally:
        await service.close()


async def test_a_failure_is_remembered_shown_and_retried_later_and_not_by_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = 0
    fixed = threading.Event()

    def loader(source: str, *, offline: bool, **_: Any) -> Exported:
        nonlocal calls
        calls += 1
        if not fixed.is_set():
            raise LoadFailure("no such repository")
        return tiny_exported()

    service = TokenService(
        {"m": "no/such"}, loader=loader, limits=TokenLimits(load=LoadLimits(retry_first_s=0.05, retry_max_s=0.05))
    )
    await service.start()
    try:
        await settled(service)
        before = calls
        found = await service.prompt(model="m", endpoint="/v1/chat/completions", body=CHAT)
        assert found == NoTokens("tokenizer_failed", "no such repository")
        assert calls == before
        assert service.status()["models"]["m"]["error"] == "no such repository"
        assert "tokenizer no/such: no such repository; --tokenizer m=PATH (a folder" in caplog.messages[0]
        fixed.set()
        async with asyncio.timeout(60):
            while service.status()["models"]["m"]["state"] != "ready":
                await asyncio.sleep(0.01)
        assert isinstance(await service.prompt(model="m", endpoint="/v1/chat/completions", body=CHAT), PromptTokens)
    finally:
        await service.close()


async def test_a_body_that_is_no_request_is_no_exception() -> None:
    service = TokenService({"m": "x"}, loader=returns_tiny)
    await service.start()
    try:
        await settled(service)
        for body in [b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": [{}]}', b'{"messages": []}', b"[" * 100_000]:
            for endpoint in ("/v1/chat/completions", "/v1/completions"):
                found = await service.prompt(model="m", endpoint=endpoint, body=body)
                assert isinstance(found, NoTokens), (endpoint, body[:40])
                assert found.reason == "unrenderable"
    finally:
        await service.close()


async def test_a_queue_that_is_full_and_a_deadline_that_passes_give_reasons_not_waits() -> None:
    limits = TokenLimits(queue_requests=1, threads=1, deadline_s=0.01, inline_max_bytes=0)
    service = TokenService({"m": "x"}, loader=returns_tiny, limits=limits)
    await service.start()
    release = threading.Event()
    try:
        await settled(service)
        service._pool.submit(release.wait)  # the only thread is taken
        late = await service.prompt(model="m", endpoint="/v1/chat/completions", body=CHAT)
        full = await service.prompt(model="m", endpoint="/v1/chat/completions", body=CHAT)
        assert [r.reason for r in (late, full) if isinstance(r, NoTokens)] == ["deadline", "busy"]
    finally:
        release.set()
        await service.close()


async def test_a_body_beyond_the_bound_is_not_looked_at() -> None:
    service = TokenService({"m": "x"}, loader=returns_tiny, limits=TokenLimits(body_max_bytes=10))
    await service.start()
    try:
        await settled(service)
        found = await service.prompt(model="m", endpoint="/v1/chat/completions", body=CHAT)
        assert isinstance(found, NoTokens)
        assert found.reason == "too_long"
    finally:
        await service.close()


async def test_long_bodies_give_the_same_ids_in_the_pool() -> None:
    inline = TokenService({"m": "x"}, loader=returns_tiny)
    pooled = TokenService({"m": "x"}, loader=returns_tiny, limits=TokenLimits(inline_max_bytes=0, deadline_s=60))
    gaps = TokenService({"m": "x"}, loader=returns_tiny, limits=TokenLimits(inline_max_chars=0, deadline_s=60))
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "so many words here " * 400}]})
    found = []
    for service in (inline, pooled, gaps):
        await service.start()
        try:
            await settled(service)
            found.append(await service.prompt(model="m", endpoint="/v1/chat/completions", body=body))
        finally:
            await service.close()
    assert isinstance(found[0], PromptTokens)
    assert found[0] == found[1] == found[2]


async def test_the_pods_length_is_what_truncating_to_minus_one_means() -> None:
    service = TokenService({"m": "x"}, loader=returns_tiny)
    await service.start()
    body = msgspec.json.encode({"prompt": "one two three " * 20, "truncate_prompt_tokens": -1, "max_tokens": 4})
    try:
        await settled(service)
        unknown = await service.prompt(model="m", endpoint="/v1/completions", body=body)
        assert isinstance(unknown, NoTokens)
        service.ensure("m", max_model_len_tokens=10)
        found = await service.prompt(model="m", endpoint="/v1/completions", body=body)
        assert isinstance(found, PromptTokens)
        assert found.count == 9  # one token of the context stays free for the answer
    finally:
        await service.close()
