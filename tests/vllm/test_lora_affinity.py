"""Two real engines with one adapter slot each, two adapters: each adapter finds its engine and stays there."""

import asyncio
import random
from collections import Counter, defaultdict
from typing import Any

import aiohttp
import pytest

from router.fleet.load import LoraLoad, parse_metrics
from tests.vllm.engines import DATA, Engine, router, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
ADAPTERS = {"ad1": DATA / "lora1", "ad2": DATA / "lora2"}
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1", "--lora-modules")
REQUESTS, CLIENTS = 60, 4


async def ask(s: aiohttp.ClientSession, url: str, model: str, rng: random.Random, **more: Any) -> str:
    """The pod that answered."""
    ids = [rng.randrange(5, 400) for _ in range(100)]
    body = {"model": model, "prompt": ids, "max_tokens": 16, "temperature": 0, **more}
    async with s.post(url + "/v1/completions", json=body) as r:
        assert r.status == 200, await r.text()
        await r.read()
        return r.headers.get("x-warmroute-pod", "")


async def lora_of(s: aiohttp.ClientSession, engine: Engine) -> LoraLoad | None:
    async with s.get(engine.url + "/metrics") as r:
        return parse_metrics(await r.read(), now_s=0.0).lora


async def what_the_metric_says(engine: Engine) -> None:
    """The one that runs is told, under both labels; one that waits for the slot is not (vLLM 0.32 hears of a request's
    queueing with its first token); nothing is when the engine is idle."""
    rng = random.Random(1)
    async with aiohttp.ClientSession() as s:
        long = {"max_tokens": 400, "ignore_eos": True}
        asked = [asyncio.create_task(ask(s, engine.url, name, rng, **long)) for name in ("ad1", "ad2")]
        seen = set()
        while not all(a.done() for a in asked):
            lora = await lora_of(s, engine)
            if lora is not None:
                seen.add((lora.max_loras, lora.running, lora.waiting))
            await asyncio.sleep(0.02)
        await asyncio.gather(*asked)
        print(f"lora_requests_info while two adapters wanted one slot: {sorted(seen)}")
        assert {(1, (name,), (name,)) for name in ADAPTERS} <= seen <= {(1, n, n) for n in ((), ("ad1",), ("ad2",))}
        assert await lora_of(s, engine) == LoraLoad(max_loras=1)


async def spread(url: str, policy: str) -> dict[str, Counter[str]]:
    """Which pods answered for each adapter, unlike prompts, some at once."""
    rng = random.Random(2)
    pods: dict[str, Counter[str]] = defaultdict(Counter)
    names = [rng.choice(list(ADAPTERS)) for _ in range(REQUESTS)]
    async with aiohttp.ClientSession(headers={"x-warmroute-policy": policy}) as s:

        async def client() -> None:
            while names:
                name = names.pop()
                pods[name][await ask(s, url, name, rng)] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return pods


def test_each_adapter_has_its_engine() -> None:
    modules = [f"{name}={path}" for name, path in ADAPTERS.items()]
    engines = [Engine(f"lora{i}", blocks=600, extra=(*LORA, *modules)) for i in range(2)]
    with running(engines):
        asyncio.run(what_the_metric_says(engines[0]))
        with router(engines, name="lora-router") as serving:
            asyncio.run(serving.ready(2, limit_s=200.0))
            asyncio.run(asyncio.sleep(1.5))  # a scrape
            by_load = asyncio.run(spread(serving.url, "least-loaded"))
            ours = asyncio.run(spread(serving.url, "prefix"))
        print(f"least-loaded {dict(by_load)}\nprefix {dict(ours)}")
        homes = {name: pods.most_common(1)[0][0] for name, pods in ours.items()}
        at_home = sum(pods[homes[name]] for name, pods in ours.items())
        assert len(set(homes.values())) == 2
        assert at_home >= 0.9 * REQUESTS
        assert sum(max(pods.values()) for pods in by_load.values()) < 0.9 * REQUESTS, "chance would not do"
