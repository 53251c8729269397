"""The engine model against a real vLLM on the CPU: cached tokens and KV events, request by request.

Token-id prompts, so that no tokenizer stands between. One engine with 300 blocks of 32 tokens and chunks of at most
512 tokens, so that evictions and chunked prefills happen all the time.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from indexer import wire
from loadtest import engine as model
from loadtest.profile import Profile, load_profile
from tests.vllm.engines import ROOT, Engine

pytestmark = pytest.mark.vllm
BLOCK, BLOCKS, CHUNK, SEQS = 32, 300, 512, 8
SERIAL, AT_ONCE = 1000, 300
QUIET_S = 0.03


class Asked(msgspec.Struct):
    """One request as it went, and what the engine said."""

    prompt: list[int]
    output_tokens: int
    salt: str | None = None
    output: list[int] = []
    cached: int = 0
    sent_s: float = 0.0
    done_s: float = 0.0
    steps: list[Counter[tuple[str, int]]] = []


@pytest.fixture(scope="module")
def real() -> Iterator[Engine]:
    engine = Engine(
        "model-check", blocks=BLOCKS, extra=("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", str(SEQS))
    )
    try:
        engine.start()
        engine.wait()
        yield engine
    finally:
        engine.kill()


class Traffic:
    """Prompts that begin alike, go on after answers, repeat whole, and end on block borders. Seeded."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.prefixes = [self.fresh(self.rng.randrange(64, 900)) for _ in range(10)]
        self.done: list[Asked] = []

    def fresh(self, count: int) -> list[int]:
        return [self.rng.randrange(100, 8000) for _ in range(count)]

    def next(self) -> Asked:
        rng = self.rng
        shape = rng.random()
        if shape < 0.25 and self.done:
            before = rng.choice(self.done[-12:])
            prompt = before.prompt + before.output + self.fresh(rng.randrange(1, 60))
            if len(prompt) > 2500:
                prompt = rng.choice(self.prefixes)[:]
        elif shape < 0.32 and self.done:
            prompt = rng.choice(self.done[-20:]).prompt[:]
        elif shape < 0.4:
            prompt = self.fresh(BLOCK * rng.randrange(1, 30))
        else:
            prompt = rng.choice(self.prefixes) + self.fresh(rng.randrange(1, 200))
        return Asked(prompt, rng.choice([1, 2, 5, 20, 33, 64]), rng.choice([None] * 19 + ["s"]))


class Events:
    """Batches as they come, each a multiset of (what, which block), a block being its whole prefix."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._names: dict[int, int] = {}

    async def until_quiet(self) -> list[Counter[tuple[str, int]]]:
        steps = []
        while await self._socket.poll(QUIET_S * 1000):
            frames = await self._socket.recv_multipart()
            steps.append(self._named(wire.decode(frames[2]).events))
        return [s for s in steps if s]

    def _named(self, events: Sequence[wire.Event]) -> Counter[tuple[str, int]]:
        out: Counter[tuple[str, int]] = Counter()
        for event in events:
            if isinstance(event, wire.Stored):
                salt = event.extra_keys[0] if event.extra_keys else None
                parent = self._names[event.parent] if event.parent is not None else hash(str(salt))
                size = 4 * event.block_size_tokens
                for i, h in enumerate(event.hashes):
                    parent = self._names[h] = hash((parent, event.tokens[i * size : (i + 1) * size]))
                    out["stored", parent] += 1
            elif isinstance(event, wire.Removed):
                for h in event.hashes:
                    out["removed", self._names[h]] += 1
        return out

    def close(self) -> None:
        self._socket.close(0)


class ModelEvents(Events):
    """The same for the model's events."""

    def __init__(self) -> None:
        self._names = {}

    def named(self, events: Sequence[model.Event]) -> Counter[tuple[str, int]]:
        out = []
        for e in events:
            if isinstance(e, model.Stored):
                salt = [[e.cache_salt]] if e.cache_salt else None
                tokens = wire.pack_tokens(e.token_ids)
                out.append(wire.Stored(e.hashes, e.parent, tokens, e.block_size_tokens, extra_keys=salt))
            elif isinstance(e, model.Removed):
                out.append(wire.Removed((e.hash,)))
        return self._named(out)


async def ask(session: aiohttp.ClientSession, url: str, asked: Asked) -> None:
    body: dict[str, Any] = {
        "model": "tiny", "prompt": asked.prompt, "max_tokens": asked.output_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if asked.salt:
        body["cache_salt"] = asked.salt
    asked.sent_s = time.monotonic()
    async with session.post(url + "/v1/completions", json=body) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
    asked.done_s = time.monotonic()
    asked.output = answer["choices"][0]["token_ids"]
    asked.cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    assert len(asked.output) == asked.output_tokens


def tiny_profile(**changes: Any) -> Profile:
    return msgspec.structs.replace(
        load_profile("laptop-toy"),
        block_size_tokens=BLOCK,
        num_blocks=BLOCKS,
        max_num_seqs=SEQS,
        max_num_batched_tokens=CHUNK,
        max_model_len_tokens=8192,
        **changes,
    )


def request(number: int, asked: Asked) -> model.Request:
    return model.request_from_tokens(number, asked.prompt, asked.output, BLOCK, cache_salt=asked.salt)


async def reset(url: str) -> None:
    async with aiohttp.ClientSession() as s, s.post(url + "/reset_prefix_cache") as reply:
        assert reply.status == 200


async def serial(real: Engine) -> list[Asked]:
    traffic = Traffic(1)
    events = Events(f"tcp://127.0.0.1:{real.events_port}")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        warm = Asked(traffic.fresh(40), 1)
        for _ in range(50):  # until the subscription is known to the publisher
            await ask(session, real.url, warm)
            if await events.until_quiet():
                break
        await reset(real.url)
        for _ in range(SERIAL):
            asked = traffic.next()
            await ask(session, real.url, asked)
            asked.steps = await events.until_quiet()
            traffic.done.append(asked)
    events.close()
    return traffic.done


def test_one_at_a_time(real: Engine) -> None:
    done = asyncio.run(serial(real))
    engine, names = model.Engine(tiny_profile()), ModelEvents()
    wrong_tokens, wrong_events, evicted, now_s = [], [], 0, 0.0
    for i, asked in enumerate(done):
        engine.submit(request(i, asked), now_s)
        steps, cached = [], -1
        while (at := engine.next_step_s(now_s)) is not None:
            result = engine.step(at)
            assert result is not None
            now_s = result.ends_s
            steps += [named] if (named := names.named(result.events)) else []
            cached = next((f.cached_tokens for f in result.first), cached)
        evicted += sum(n for s in asked.steps for (what, _), n in s.items() if what == "removed")
        if cached != asked.cached:
            wrong_tokens.append((i, cached, asked.cached))
        if steps != asked.steps:
            wrong_events.append((i, [dict(Counter(w for w, _ in s.elements())) for s in (*steps, *asked.steps)]))
    report("serial", len(done), wrong_tokens, wrong_events, evicted)
    assert evicted > SERIAL
    assert len(wrong_tokens) <= 0.005 * len(done), wrong_tokens[:20]
    assert len(wrong_events) <= 0.005 * len(done), wrong_events[:20]


async def at_once(real: Engine) -> list[Asked]:
    traffic = Traffic(2)
    await reset(real.url)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for prefix in traffic.prefixes:
            asked = Asked(prefix[:], 1)
            await ask(session, real.url, asked)
            traffic.done.append(asked)
        left = iter(range(AT_ONCE))

        async def client() -> None:
            for _ in left:
                asked = traffic.next()
                await ask(session, real.url, asked)
                traffic.done.append(asked)

        await asyncio.gather(*(client() for _ in range(4)))
    return traffic.done


def test_four_at_once(real: Engine) -> None:
    """Requests enter the model when they entered the engine; its steps are timed roughly, which decides little."""
    done = sorted(asyncio.run(at_once(real)), key=lambda a: a.sent_s)
    begun = done[0].sent_s
    engine = model.Engine(tiny_profile(t0_s=0.004, prefill_tokens_per_s=20_000.0, frontend_s=0.003))
    cached: dict[int, int] = {}
    waiting = list(enumerate(done))
    now_s = 0.0
    while len(cached) < len(done):
        while waiting and waiting[0][1].sent_s - begun <= now_s:
            i, asked = waiting.pop(0)
            engine.submit(request(i, asked), asked.sent_s - begun)
        at = engine.next_step_s(now_s)
        if at is None or (waiting and waiting[0][1].sent_s - begun < at):
            now_s = max(now_s, waiting[0][1].sent_s - begun)
            continue
        result = engine.step(at)
        if result is None:
            now_s = at
            continue
        now_s = result.ends_s
        cached |= {int(f.id): f.cached_tokens for f in result.first}
    wrong = [(i, cached[i], a.cached) for i, a in enumerate(done) if cached[i] != a.cached]
    report("at-once", len(done), wrong, [], 0)
    assert len(wrong) <= 0.05 * len(done), wrong


def report(name: str, requests: int, wrong: list[Any], wrong_events: list[Any], evicted: int) -> None:
    out = ROOT / "out" / "vllm"
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "requests": requests, "cached_tokens_wrong": len(wrong), "events_wrong": len(wrong_events),
        "evicted_blocks": evicted, "examples": [*map(str, wrong[:20]), *map(str, wrong_events[:20])],
    }  # fmt: skip
    (out / f"engine-model-{name}.json").write_text(json.dumps(figures, indent=1))
