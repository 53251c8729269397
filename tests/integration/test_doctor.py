"""The doctor against a hand-made pod that is right, and wrong in six ways. Real sockets, real ZMQ."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router.diagnosis import Finding, diagnose
from router.doctor import examine
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.port import PromptTokens
from router.tokenize.rendering import render_fully
from tests.fakes.proxy_world import world
from tests.fakes.publisher import Publisher
from tests.unit.tokenize.exported import TINY, tiny_exported, with_template

SIZE = 16
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


class Pod:
    """What the doctor asks for, with switches for what is wrong."""

    def __init__(
        self, publisher: Publisher, *, caching: bool = True, sources: Any = None, old: bool = False, template: str = ""
    ) -> None:
        self.publisher = publisher
        self.caching = caching
        self.sources = sources
        self.old = old
        self.seen: set[bytes] = set()
        self.renderer = ModelRenderer(with_template(template) if template else tiny_exported(), ModelOptions())

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.post("/v1/completions", self.complete),
                web.post("/tokenize", self.tokenize),
            ]
        )
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        return web.json_response(self.sources)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "root": "org/m", "parent": None, "max_model_len": 8192}]})

    async def metrics(self, _: web.Request) -> web.Response:
        labels = f'block_size="{SIZE}",enable_prefix_caching="{self.caching}"'
        return web.Response(text=f"vllm:cache_config_info{{{labels}}} 1.0\n")

    async def complete(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        known = self.caching and json.dumps(prompt).encode() in self.seen
        self.seen.add(json.dumps(prompt).encode())
        if self.caching and not known:
            self.publisher.publish(self.event(prompt))
        cached = (len(prompt) - 1) // SIZE * SIZE if known else 0
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        return web.json_response({"choices": [], "usage": usage})

    def event(self, prompt: list[int]) -> bytes:
        hashes = list(range(len(prompt) // SIZE))
        tokens = prompt[: len(hashes) * SIZE]
        names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        values = (hashes, None, tokens, SIZE, None, "GPU")
        made = dict(zip(names, values, strict=True))
        event: Any = ["BlockStored", *values] if self.old else {"type": "BlockStored", **made}
        return msgspec.msgpack.encode([1.0, [event], 0])

    async def tokenize(self, request: web.Request) -> web.Response:
        found = render_fully(self.renderer, "/v1/chat/completions", await request.read())
        if not isinstance(found, PromptTokens):
            return web.json_response({"error": found.detail}, status=400)
        return web.json_response({"tokens": list(memoryview(found.packed).cast("I"))})


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is tested elsewhere; here it would start a process per test."""
    monkeypatch.setattr("router.doctor.load", lambda source, **_: tiny_exported())


@contextlib.asynccontextmanager
async def serving(**switches: Any) -> AsyncIterator[tuple[str, Publisher]]:
    publisher = Publisher(replay=None)
    try:
        source = {"0": {"endpoint": publisher.events.replace("127.0.0.1", "*")}}
        runner = web.AppRunner(Pod(publisher, **{"sources": source, **switches}).app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", publisher
        finally:
            await runner.cleanup()
    finally:
        publisher.close()


async def findings(url: str, *, events: str | None = None, wait_s: float = 20.0) -> list[Finding]:
    return diagnose(await examine(url, events=events, tokenizer=str(TINY), api_key=None, wait_s=wait_s))


def bad(found: list[Finding]) -> list[str]:
    return [f.name for f in found if f.level == "bad"]


async def test_a_right_pod() -> None:
    async with serving() as (url, _):
        found = await findings(url)
    assert {f.level for f in found} == {"ok"}, found
    assert [f.name for f in found] == [
        "reachable",
        "model",
        "prefix_caching",
        "events",
        "block_size",
        "tokens",
        "prediction",
    ]


@pytest.mark.parametrize(
    ("switches", "name"),
    [
        ({"sources": {}}, "no_events"),
        ({"sources": {"0": {"endpoint": "tcp://router.example:5557"}}}, "endpoint_without_star"),
        ({"caching": False}, "prefix_caching_off"),
        ({"template": PLAIN}, "wrong_tokenizer"),
    ],
)
async def test_a_pod_that_is_wrong_in_one_way(switches: dict[str, Any], name: str) -> None:
    async with serving(**switches) as (url, _):
        found = await findings(url, wait_s=1.0)
    assert name in bad(found)


async def test_the_wrong_port() -> None:
    other = Publisher(replay=None)  # somebody else's, where nothing is said
    try:
        async with serving() as (url, _):
            assert "wrong_port" in bad(await findings(url, events=other.events, wait_s=1.0))
    finally:
        other.close()


async def test_events_of_an_old_engine() -> None:
    async with serving(old=True) as (url, _):
        found = await findings(url)
    assert bad(found) == []
    assert "old_events" in [f.name for f in found]


async def test_a_router_is_told_from_a_pod() -> None:
    async with world() as w:
        assert bad(await findings(w.url, wait_s=0.1)) == ["is_a_router"]
        w.fleet.urls.clear()
        assert bad(await findings(w.url, wait_s=0.1)) == ["is_a_router"], "one that is not ready is one too"
        assert w.bodies() == 0


async def test_nobody_there() -> None:
    assert bad(await findings("http://127.0.0.1:9", wait_s=0.1)) == ["unreachable"]
