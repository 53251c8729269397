"""The index under everything at once, on real vLLM: 8 at a time, caches too small, salts, adapters, resets, pauses,
engines killed; then the same with Redis, the indexer killed again and again and Redis emptied once.

Predicted and delivered cached tokens may differ only where a recorder of the engines' events shows why: the block was
evicted in between, a sibling was still computing it, or its event was under way. Anything else is a bug.
WARMROUTE_HOSTILE_REQUESTS sets the length (default 600; the published figures are of 2000). A lookup that Redis did not
answer in time is none of these; WARMROUTE_HOSTILE_DEADLINE_MS=20 shows how many a machine has at the router's default.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.vllm.engines import DATA, Engine, Router, child, free_ports, router, running
from tests.vllm.test_predicted_delivered import redis_server
from tests.vllm.timeline import Timeline, chain

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
REQUESTS = int(os.environ.get("WARMROUTE_HOSTILE_REQUESTS", "600"))
# Of a lookup in Redis, generous: whether the index is right is asked here, not whether two cores are enough for it all.
DEADLINE_MS = os.environ.get("WARMROUTE_HOSTILE_DEADLINE_MS", "500")
LATE_S = 0.02
AT_A_TIME, BLOCK, BLOCKS = 8, 32, 300
# About what one cache holds, so that while the other engine is down a session is often gone before its next turn:
HEADS, HEAD_TOKENS, SESSIONS, TURNS, NEW_TOKENS = 16, 200, 14, 4, (60, 200)
HIT_SHARE, EVICTED_SHARE = (0.30, 0.80), 0.30  # otherwise the run proves little
NOBODY_S = 3.0  # from an indexer's death until the next one is started
LAG_S = 2.0  # of events, ours and the recorder's: engines, router and clients share two cores


class Sent(msgspec.Struct):
    """One request and what became of it."""

    keys: list[bytes]
    pod: str
    predicted: int
    delivered: int
    sent_s: float
    ended_s: float


class Verdict(msgspec.Struct):
    """What a run came to. Shares are of requests, of prompt tokens, and of blocks stored."""

    equal: float
    bugs: int
    hit_share: float
    evicted_share: float


class Session:
    """A conversation in token ids: each prompt is the last one, its answer, and something new."""

    def __init__(self, rng: Random, head: list[int]) -> None:
        self.ids = [*head, *(rng.randrange(100, 8000) for _ in range(rng.randrange(20, 200)))]
        self.lora = "ad1" if rng.random() < 0.15 else None
        self.salt = f"tenant{rng.randrange(3)}" if rng.random() < 0.2 else None
        self.turns = 0


class Crowd:
    """Users that go on until enough was asked; the troublemaker works beside them."""

    def __init__(self, url: str, engines: list[Engine], timelines: dict[str, Timeline], seed: int) -> None:
        self.url, self.engines, self.timelines = url, engines, timelines
        self.rng = Random(seed)
        self.heads = [[self.rng.randrange(100, 8000) for _ in range(HEAD_TOKENS)] for _ in range(HEADS)]
        self.sessions: list[Session] = []
        self.done: list[Sent] = []
        self.failed: Counter[str] = Counter()
        self.killed_s: list[float] = []
        self.admin, self.metrics = "", [""]
        self.enough = asyncio.Event()

    async def run(self, trouble: Any, at_a_time: int = AT_A_TIME) -> None:
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=limit) as http, asyncio.TaskGroup() as group:
            users = [group.create_task(self._user(http)) for _ in range(at_a_time)]
            await trouble(self, http)
            while len(self.done) < REQUESTS:
                await asyncio.sleep(0.2)
            self.enough.set()
            await asyncio.gather(*users)

    async def _user(self, http: aiohttp.ClientSession) -> None:
        rng = self.rng
        while not self.enough.is_set():
            if len(self.sessions) < SESSIONS or rng.random() < 0.1:
                self.sessions.append(Session(rng, rng.choice(self.heads)))
            session = self.sessions.pop(rng.randrange(len(self.sessions)))
            if await self._turn(http, session) and session.turns < TURNS and len(session.ids) < 1500:
                self.sessions.append(session)

    async def _turn(self, http: aiohttp.ClientSession, session: Session) -> bool:
        body: dict[str, Any] = {"model": session.lora or "tiny", "prompt": session.ids, "temperature": 0}
        body |= {"max_tokens": self.rng.choice([4, 40]), "return_token_ids": True}
        if session.salt:
            body["cache_salt"] = session.salt
        sent_s = time.time()
        try:
            async with http.post(self.url + "/v1/completions", json=body) as reply:
                answer = await reply.json()
                if reply.status != 200:
                    self.failed[f"{reply.status}"] += 1
                    return False
                self._note(session, reply.headers, answer, sent_s)
        except (aiohttp.ClientError, TimeoutError) as exc:
            self.failed[type(exc).__name__] += 1
            return False
        session.ids = [*session.ids, *answer["choices"][0]["token_ids"]]
        session.ids += [self.rng.randrange(100, 8000) for _ in range(self.rng.randrange(*NEW_TOKENS))]
        session.turns += 1
        return True

    def _note(self, session: Session, headers: Any, answer: dict[str, Any], sent_s: float) -> None:
        usage = answer["usage"]
        assert int(headers["x-warmroute-prompt-tokens"]) == usage["prompt_tokens"] == len(session.ids)
        self.done.append(
            Sent(
                keys=chain(session.ids, BLOCK, session.lora, session.salt),
                pod=headers["x-warmroute-pod"],
                predicted=int(headers["x-warmroute-matched-tokens"]),
                delivered=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
                sent_s=sent_s,
                ended_s=time.time(),
            )
        )

    # -- judgement --------------------------------------------------------------------------------------------

    def classed(self, sent: Sent) -> str:
        """Why predicted and delivered differ, by the recorded events of the first block they differ in."""
        line = self.timelines[sent.pod]
        key = sent.keys[min(sent.predicted, sent.delivered) // BLOCK]
        before_s, after_s = sent.sent_s - LAG_S, sent.ended_s + LAG_S
        if any(sent.sent_s - LAG_S <= at <= after_s for at in line.resets):
            return "reset or restart"  # a clear is told with the engine's next step only
        if sent.predicted > sent.delivered:
            if False in line.changed(key, before_s, after_s):
                return "raced eviction"
            siblings = [s for s in self.done if s is not sent and s.pod == sent.pod and key in s.keys]
            if any(s.sent_s <= sent.ended_s and s.ended_s >= before_s for s in siblings):
                return "sibling in flight"
            return "BUG: claimed, but long gone"
        if True in line.changed(key, before_s, after_s):
            return "sibling in flight or event under way"
        return "BUG: held for long, but not claimed"

    def event_was_late(self, sent: Sent) -> bool:
        """Did the first block they differ in reach the recorder only just before the request was sent, or after?"""
        if sent.predicted >= sent.delivered:
            return False
        key = sent.keys[sent.predicted // BLOCK]
        return not self.timelines[sent.pod].held_at(key, sent.sent_s - LATE_S)

    def _show_difference(self, sent: Sent, cause: str) -> None:
        line = self.timelines[sent.pod]
        key = sent.keys[min(sent.predicted, sent.delivered) // BLOCK]
        log = [(round(at - sent.sent_s, 3), held) for at, held in line._changes.get(key, [])]
        resets = [round(at - sent.sent_s, 3) for at in line.resets]
        print(
            f"  {cause}: predicted {sent.predicted}, delivered {sent.delivered} of {len(sent.keys) * BLOCK}, took "
            f"{sent.ended_s - sent.sent_s:.3f} s; seconds from its sending: block {log[-6:]}, resets {resets[-3:]}"
        )

    def show(self, what: str) -> Verdict:
        """Count, and print what was found."""
        differ = [s for s in self.done if s.predicted != s.delivered]
        causes = Counter(self.classed(s) for s in differ)
        tokens = sum(len(s.keys) * BLOCK for s in self.done)
        removed, stored = (sum(getattr(t, n) for t in self.timelines.values()) for n in ("removed", "stored"))
        verdict = Verdict(
            equal=1 - len(differ) / len(self.done),
            bugs=sum(n for cause, n in causes.items() if cause.startswith("BUG")),
            hit_share=sum(s.delivered for s in self.done) / tokens,
            evicted_share=removed / stored,
        )
        print(
            f"\n{what}: {len(self.done)} requests, {dict(Counter(s.pod for s in self.done))}; "
            f"equal {verdict.equal:.4f}; hit share {verdict.hit_share:.2f}; "
            f"{removed} of {stored} blocks evicted; differences {dict(causes)}; failed {dict(self.failed)}"
        )
        for sent in differ:
            cause = self.classed(sent)
            if cause.startswith("BUG") or len(differ) <= 10:
                self._show_difference(sent, cause)
        return verdict


async def trouble_with_engines(crowd: Crowd, http: aiohttp.ClientSession) -> None:
    """Resets and pauses, and each engine killed once and started again while the other works."""
    loop = asyncio.get_running_loop()

    async def post(engine: Engine, path: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.post(engine.url + path):
                pass

    async def asked(n: int) -> None:
        while len(crowd.done) < n:
            await asyncio.sleep(0.1)

    for n in range(1, 4):
        await asked(n * REQUESTS // 12)
        engine = crowd.engines[n % 2]
        if n % 2:
            await post(engine, "/reset_prefix_cache")
        else:
            await post(engine, "/pause?mode=wait&clear_cache=true")
            await post(engine, "/resume")
    for n, engine in enumerate(crowd.engines):
        await asked((n + 1) * REQUESTS // 3)
        await loop.run_in_executor(None, engine.kill)
        crowd.timelines[engine.url].forget(time.time())
        engine.start()
        while await _up(http, engine) != 200:
            await asyncio.sleep(0.5)


async def _up(http: aiohttp.ClientSession, engine: Engine) -> int:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with http.get(engine.url + "/health") as reply:
            return reply.status
    return 0


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    extra = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", f"ad1={DATA / 'lora1'}")
    found = [Engine(f"hostile-{n}", blocks=BLOCKS, extra=extra) for n in (1, 2)]
    with running(found):
        yield found


@contextlib.contextmanager
def recorded(engines: list[Engine]) -> Iterator[dict[str, Timeline]]:
    lines = {engine.url: Timeline(engine.events_port) for engine in engines}
    try:
        time.sleep(1.0)
        yield lines
    finally:
        for line in lines.values():
            line.close()


def judge(crowd: Crowd, what: str, equal_at_least: float = 0.97) -> None:
    verdict = crowd.show(what)
    assert verdict.bugs == 0
    assert verdict.equal >= equal_at_least
    assert HIT_SHARE[0] <= verdict.hit_share <= HIT_SHARE[1]
    assert verdict.evicted_share >= EVICTED_SHARE
    assert len({s.pod for s in crowd.done}) == 2


async def _reset(engines: list[Engine]) -> None:
    async with aiohttp.ClientSession() as http:
        for engine in engines:
            async with http.post(engine.url + "/reset_prefix_cache") as reply:
                assert reply.status == 200


def test_one_at_a_time(engines: list[Engine]) -> None:
    """99.9 % of those that could be known. Raw, a quiet machine gave 100 % of 2,004, busy cores less: an engine
    answers before it publishes the block that its decode just filled, so a next turn sent at once can be sooner.
    """

    async def no_trouble(crowd: Crowd, http: aiohttp.ClientSession) -> None:
        pass

    async def scenario(r: Router, lines: dict[str, Timeline]) -> Crowd:
        await r.ready(2, limit_s=180)
        crowd = Crowd(r.url, engines, lines, seed=10)
        await crowd.run(no_trouble, at_a_time=1)
        return crowd

    asyncio.run(_reset(engines))
    with recorded(engines) as lines, router(engines, name="router-single") as r:
        crowd = asyncio.run(scenario(r, lines))
        judge(crowd, "memory index, one at a time", equal_at_least=0.995)
        decidable = [s for s in crowd.done if not crowd.event_was_late(s)]
        equal = sum(s.predicted == s.delivered for s in decidable) / len(decidable)
        print(f"  of {len(decidable)} whose events were out {LATE_S:g} s before: equal {equal:.4f}")
        assert equal >= 0.999


def test_memory_index_and_engines_in_trouble(engines: list[Engine]) -> None:
    async def scenario(r: Router, lines: dict[str, Timeline]) -> Crowd:
        await r.ready(2, limit_s=180)
        crowd = Crowd(r.url, engines, lines, seed=11)
        await crowd.run(trouble_with_engines)
        return crowd

    asyncio.run(_reset(engines))
    with recorded(engines) as lines, router(engines, name="router-hostile") as r:
        judge(asyncio.run(scenario(r, lines)), "memory index")


def test_redis_index_and_an_indexer_in_trouble(engines: list[Engine]) -> None:
    redis_port, admin_1, admin_2 = free_ports(3)
    url = f"redis://127.0.0.1:{redis_port}/0"

    def index(name: str, admin: int) -> Any:
        argv = [sys.executable, "-m", "indexer", "--redis-url", url, "--admin-port", str(admin)]
        for engine in engines:
            argv += ["--pod", engine.spec]
        return child(name, argv)

    async def trouble(crowd: Crowd, http: aiohttp.ClientSession) -> None:
        """The indexer is killed every 30 s and begun anew; Redis is emptied once."""
        import redis.asyncio

        for n in range(4):
            with index(f"index-{n}", admin_1 if n % 2 else admin_2) as process:
                await asyncio.sleep(13.5)
                if n == 2:
                    async with redis.asyncio.Redis(port=redis_port) as client:
                        await client.flushall()
                await asyncio.sleep(13.5)
                if n < 3:
                    process.kill()
                    crowd.killed_s.append(time.time())
                    await asyncio.sleep(NOBODY_S)
                    continue
                ends_s = time.time() + 45.0
                while len(crowd.done) < REQUESTS or time.time() < ends_s:
                    await asyncio.sleep(0.2)
        async with http.get(crowd.admin + "/metrics") as reply:
            lines = (await reply.text()).splitlines()
        crowd.metrics = [x for x in lines if x.startswith("warmroute_index_fallbacks_total")]

    async def scenario(r: Router, lines: dict[str, Timeline]) -> Crowd:
        await r.ready(2, limit_s=180)
        crowd = Crowd(r.url, engines, lines, seed=12)
        crowd.admin = r.admin
        await crowd.run(trouble)
        return crowd

    asyncio.run(_reset(engines))
    with (
        recorded(engines) as lines,
        child("redis-hostile", redis_server(redis_port)),
        router(engines, "--redis-url", url, "--index-deadline-ms", DEADLINE_MS, name="router-hostile-redis") as r,
    ):
        crowd = asyncio.run(scenario(r, lines))
    print("\n".join(crowd.metrics))
    everything = crowd.done
    last = crowd.killed_s[-1] + 30.0
    crowd.show("Redis index, trouble included")
    crowd.done = [s for s in everything if any(0 < s.sent_s - killed_s < NOBODY_S for killed_s in crowd.killed_s)]
    if crowd.done:
        crowd.show("of these, while no indexer ran")
    crowd.done = [s for s in everything if s.sent_s > last]
    judge(crowd, "Redis index, from 30 s after the last trouble on")
