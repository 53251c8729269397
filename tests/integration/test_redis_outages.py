"""Redis slow, cut, read-only, away, emptied: a lookup never waits beyond its deadline, and everything comes back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from indexer.app import Indexer
from indexer.check import _safely, compare, dumped, show
from indexer.consumer import Limits
from indexer.source import SourceSpec
from router.core.types import Add, BlockKey, IndexUnavailable, Remove, WorkerAddress, WorkerId
from router.index.lua import fingerprint
from router.index.port import SlotLost
from router.index.redis import RedisIndexReader, RedisIndexWriter
from router.ops import Metrics
from tests.fakes.publisher import Publisher
from tests.fakes.redis_proxy import HostileProxy
from tests.fakes.redis_servers import Server, free_port, running
from tests.integration.test_zmq_events import LIMITS, batch, keys_of

A, B = WorkerId(WorkerAddress("http://a"), "life-a"), WorkerId(WorkerAddress("http://b"), "life-b")


async def until(condition: Callable[[], Any], within_s: float = 40.0) -> None:
    """Polls a condition, a coroutine function or not; lookups that fail count as "not yet"."""
    ends = time.monotonic() + within_s
    while True:
        with contextlib.suppress(IndexUnavailable):
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
        assert time.monotonic() < ends, "never happened"
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("redis", tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.command("FLUSHALL")
    return shared


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[HostileProxy]:
    async with HostileProxy(server.port) as it:
        yield it


@contextlib.asynccontextmanager
async def reading(url: str, **options: Any) -> AsyncIterator[RedisIndexReader]:
    options = {"deadline_s": 10.0, "near_cache_s": 0.0, **options}
    reader = RedisIndexReader(url, seed="s", metrics=Metrics(), **options)
    await reader.start()
    try:
        yield reader
    finally:
        await reader.close()


@contextlib.asynccontextmanager
async def writing(url: str, **options: Any) -> AsyncIterator[RedisIndexWriter]:
    writer = RedisIndexWriter(url, seed="s", **{"deadline_s": 10.0, **options})
    try:
        yield writer
    finally:
        await writer.close()


def chain(n: int, tag: int = 0) -> tuple[BlockKey, ...]:
    rng = Random(tag)
    return tuple(BlockKey(rng.randbytes(8)) for _ in range(n))


async def gpu(reader: RedisIndexReader, keys: Sequence[BlockKey], worker: WorkerId = A) -> int:
    held = (await reader.holders(keys)).get(worker.address)
    return held.gpu if held else 0


async def filled(url: str, chains: int) -> None:
    """Chain n has n % 7 + 1 blocks."""
    async with writing(url) as writer:
        await writer.register(A)
        await writer.apply(A, [Add(chain(n % 7 + 1, n)) for n in range(chains)])


async def test_cancelled_lookups_never_leave_an_answer_for_the_next(server: Server, proxy: HostileProxy) -> None:
    await filled(server.url, 300)
    async with reading(proxy.url, max_connections=4) as reader:
        proxy.delay_s = 0.004
        rng = Random(1)
        for n in range(300):
            task = asyncio.create_task(reader.holders(chain(7, n)))
            await asyncio.sleep(rng.random() * 0.008)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        proxy.delay_s = 0.0
        for n in range(300):
            assert await gpu(reader, chain(7, n)) == n % 7 + 1


async def test_more_lookups_than_connections_wait_and_are_answered_rightly(server: Server) -> None:
    await filled(server.url, 200)
    async with reading(server.url, max_connections=2, deadline_s=30.0) as reader:
        got = await asyncio.gather(*(gpu(reader, chain(7, n)) for n in range(200)))
        assert got == [n % 7 + 1 for n in range(200)]


async def test_a_lookup_that_finds_no_free_connection_in_time_says_busy(server: Server, proxy: HostileProxy) -> None:
    await filled(server.url, 1)
    async with reading(proxy.url, max_connections=1, deadline_s=0.3) as reader:
        await until(lambda: gpu(reader, chain(1)))
        proxy.silent = True
        got = await asyncio.gather(*(reader.holders(chain(1)) for _ in range(5)), return_exceptions=True)
        assert {getattr(e, "reason", None) for e in got} <= {"busy", "deadline", "connection"}
        assert all(isinstance(e, IndexUnavailable) for e in got)


async def test_late_replies_cost_no_connections_and_answer_nobody_else(server: Server, proxy: HostileProxy) -> None:
    await filled(server.url, 300)
    async with reading(proxy.url, deadline_s=0.15) as reader:
        await until(lambda: _is(gpu(reader, chain(7, 6)), 7))
        before, proxy.delay_s = proxy.connections, 0.4
        for n in range(3):
            with pytest.raises(IndexUnavailable):
                await reader.holders(chain(7, n))
            await asyncio.sleep(0.6)
        proxy.delay_s = 0.0
        assert proxy.connections - before <= 1
        for n in range(100):
            await until(lambda n=n: _is(gpu(reader, chain(7, n)), n % 7 + 1))


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_a_reply_that_came_while_we_stood_still_counts(server: Server, loops: str) -> None:
    """The deadline is on Redis: a loop that was held up by something else must not call Redis late."""

    async def scenario() -> None:
        await filled(server.url, 7)
        long = chain(300, 99)  # two steps
        async with writing(server.url) as writer, reading(server.url, deadline_s=0.2) as reader:
            await writer.register(B)
            await writer.apply(B, [Add(long)])
            await until(lambda: gpu(reader, long, B))
            for keys, worker in ((chain(7, 6), A), (long, B)):
                for _ in range(5):
                    lookup = asyncio.create_task(gpu(reader, keys, worker))
                    await asyncio.sleep(0)  # it has asked
                    time.sleep(0.3)
                    assert await lookup == len(keys)
            assert reader.status()["breaker"] == "closed"

    asyncio.run(scenario()) if loops == "asyncio" else uvloop.run(scenario())


async def test_a_slow_redis_opens_the_breaker_and_closes_it_by_itself(server: Server, proxy: HostileProxy) -> None:
    await filled(server.url, 8)
    async with reading(proxy.url, deadline_s=0.25) as reader:
        await until(lambda: gpu(reader, chain(7, 6)))
        proxy.delay_s = 2.0
        reasons = []
        waited_s = 0.0
        for _ in range(200):
            started = time.monotonic()
            with pytest.raises(IndexUnavailable) as failure:
                await reader.holders(chain(7, 6))
            waited_s += time.monotonic() - started
            reasons.append(failure.value.reason)
        assert reasons.count("breaker_open") >= 190  # a few waited for their deadline, the rest asked nobody
        assert reader.status()["breaker"] == "open"
        proxy.delay_s = 0.0
        await until(lambda: reader.status()["breaker"] == "closed")
        await until(lambda: gpu(reader, chain(7, 6)))


@pytest.mark.parametrize("cut_at", [0, 1, 7, 40])
async def test_a_reply_cut_in_the_middle_is_never_half_an_answer(
    server: Server, proxy: HostileProxy, cut_at: int
) -> None:
    await filled(server.url, 8)
    async with reading(proxy.url, max_connections=1) as reader:
        await until(lambda: gpu(reader, chain(7, 6)))
        for _ in range(10):
            proxy.cut_after_bytes = cut_at
            with contextlib.suppress(IndexUnavailable):
                assert await gpu(reader, chain(7, 6)) == 7
            proxy.cut_after_bytes = None
        await until(lambda: reader.status()["breaker"] == "closed")
        assert await gpu(reader, chain(7, 6)) == 7


async def test_starting_without_redis_and_finding_it_later(tmp_path: Path) -> None:
    with running("redis", tmp_path) as server:
        server.stop()
        async with reading(server.url) as reader:
            with pytest.raises(IndexUnavailable):
                await reader.holders(chain(1))
            server.start()
            await filled(server.url, 1)
            await until(lambda: gpu(reader, chain(1)))
            server.stop()
            with pytest.raises(IndexUnavailable):
                await reader.holders(chain(1))
            server.start()
            await filled(server.url, 1)
            await until(lambda: gpu(reader, chain(1)))


async def test_a_read_only_redis_is_waited_out(server: Server, proxy: HostileProxy) -> None:
    async with writing(proxy.url, deadline_s=0.5) as writer, reading(server.url) as reader:
        await writer.register(A)
        proxy.readonly = True
        with pytest.raises(IndexUnavailable):
            await writer.apply(A, [Add(chain(3))])
        proxy.readonly = False
        await writer.apply(A, [Add(chain(3))])
        assert await gpu(reader, chain(3)) == 3


async def test_a_primary_that_becomes_a_replica_and_back(server: Server) -> None:
    """As after a failover: lookups go on, writes wait, and what was told meanwhile comes through afterwards."""
    with contextlib.closing(Publisher()) as publisher:
        async with indexing(server.url, publisher), reading(server.url) as reader:
            publisher.publish(batch(1, 0))
            await until(lambda: gpu(reader, keys_of(1, 1)))
            try:
                server.command("REPLICAOF", "127.0.0.1", str(free_port()))
                publisher.publish(batch(1, 1))
                publisher.publish(batch(1, 0, removed=True))
                await asyncio.sleep(0.3)
                assert await gpu(reader, keys_of(1, 2)) == 1
            finally:
                server.command("REPLICAOF", "NO", "ONE")
            await until(lambda: _is(gpu(reader, keys_of(1, 1)), 0))
            publisher.publish(batch(1, 0))
            await until(lambda: _is(gpu(reader, keys_of(1, 2)), 2))


async def test_a_late_write_of_a_former_owner_changes_nothing(server: Server) -> None:
    async with writing(server.url, lease_s=0.3) as old, writing(server.url) as new, reading(server.url) as reader:
        await old.register(A)
        await old.apply(A, [Add(chain(3))])
        with pytest.raises(SlotLost, match="not_owner"):
            await new.register(WorkerId(A.address, "too early"))
        await asyncio.sleep(0.35)  # the owner is paused for longer than its lease
        second = WorkerId(A.address, "second owner")
        await new.register(second)
        await new.apply(second, [Add(chain(1))])
        with pytest.raises(SlotLost, match="unregistered"):
            await old.apply(A, [Add(chain(3))])
        with pytest.raises(SlotLost, match="not_owner"):
            await old.register(A)
        await old.drop(A.address)
        assert await gpu(reader, chain(3)) == 1


async def test_strange_things_in_redis_hurt_nobody(server: Server) -> None:
    async with writing(server.url) as writer, reading(server.url) as reader:
        await writer.register(A)
        await writer.apply(A, [Add(chain(4))])
        prefix = next(k[:4] for k in server.command("KEYS", "*") if len(k) == 12)  # type: ignore[attr-defined]
        server.command("SET", prefix + chain(4)[1], b"\xff" * 64)  # bits of slots that nobody has
        server.command("DEL", prefix + chain(4)[2])
        server.command("HSET", prefix + chain(4)[2], "a", "b")  # not a bitmap at all
        assert set(await reader.holders(chain(4))) == {A.address}
        assert await gpu(reader, chain(4)) == 2
        registry = next(k for k in server.command("KEYS", "warmroute:*:reg"))  # type: ignore[attr-defined]
        for field in ("s:77", "s:-1", "s:99999999", "s:x", "a:x", "b:http://a#0", "o:", "\xff", "zzz"):
            server.command("HSET", registry, field, "nonsense")
        n = server.command("HINCRBY", registry, "n", "1")
        epoch = server.command("HGET", registry, "epoch")
        assert isinstance(epoch, bytes)
        server.command("SET", registry.replace(b":reg", b":ver"), epoch + f":{n}".encode())
        assert await gpu(reader, chain(4)) == 2
        server.command("DEL", registry.replace(b":reg", b":ver"))
        assert await gpu(reader, chain(4)) == 0


async def test_removals_heard_take_the_near_cache_away(server: Server) -> None:
    async with writing(server.url) as writer, reading(server.url, near_cache_s=3600.0) as reader:
        for worker in (A, B):
            await writer.register(worker)
            await writer.apply(worker, [Add(chain(5))])
        await until(lambda: reader.status()["feed_connected"])
        for _ in range(3):
            assert await gpu(reader, chain(5)) == 5
        assert reader.status()["near_cache_blocks"] >= 5
        await writer.apply(A, [Remove(chain(5)[3:])])
        await until(lambda: _is(gpu(reader, chain(5)), 3))
        assert await gpu(reader, chain(5), B) == 5
        await writer.drop(B.address)
        await until(lambda: _is(gpu(reader, chain(5), B), 0))


async def _is(coroutine: Any, value: int) -> bool:
    return bool(await coroutine == value)


# -- the indexer over Redis ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def indexing(
    url: str, publisher: Publisher, address: WorkerAddress = A.address, limits: Limits = LIMITS, seed: str = "s"
) -> AsyncIterator[Indexer]:
    writer = RedisIndexWriter(url, seed=seed, deadline_s=2.0)
    indexer = Indexer(writer, seed=seed, metrics=Metrics(), limits=limits)
    await indexer.start()
    indexer.set_pods([SourceSpec(address, "m", publisher.events, publisher.replay)])
    try:
        yield indexer
    finally:
        await indexer.close()


async def test_an_emptied_redis_is_filled_again_from_the_ledger(server: Server) -> None:
    with contextlib.closing(Publisher(buffer_batches=2)) as publisher:  # replay alone could not bring it back
        async with indexing(server.url, publisher) as indexer, reading(server.url) as reader:
            await until(lambda: indexer.status()[str(A.address)]["last_replay"])
            for block in range(40):
                publisher.publish(batch(1, block))
            await until(lambda: _is(gpu(reader, keys_of(1, 40)), 40))
            server.command("FLUSHALL")
            started = time.monotonic()
            await until(lambda: _is(gpu(reader, keys_of(1, 40)), 40))
            assert time.monotonic() - started < 15 + 15  # 15 s, and room for a busy machine
            assert reader.block_sizes() == {A.address: 4}
            publisher.publish(batch(1, 39, removed=True))
            await until(lambda: _is(gpu(reader, keys_of(1, 40)), 39))


async def test_what_was_told_while_redis_was_away_is_written_afterwards(server: Server, proxy: HostileProxy) -> None:
    with contextlib.closing(Publisher()) as publisher:
        async with indexing(proxy.url, publisher) as indexer, reading(server.url) as reader:
            await until(lambda: indexer.status()[str(A.address)]["last_replay"])
            for block in range(10):
                publisher.publish(batch(1, block))
            await until(lambda: _is(gpu(reader, keys_of(1, 10)), 10))
            proxy.refusing = True
            proxy.cut_all()
            for block in range(5, 10):
                publisher.publish(batch(1, block, removed=True))
            for block in range(3):
                publisher.publish(batch(2, block))
            await until(lambda: indexer.status()[str(A.address)]["last_seq"] == 17)
            assert await gpu(reader, keys_of(1, 10)) == 10
            proxy.refusing = False
            await until(lambda: _is(gpu(reader, keys_of(1, 10)), 5))
            await until(lambda: _is(gpu(reader, keys_of(2, 3)), 3))


@pytest.mark.parametrize("fault", ["readonly", "silent", "delay", "cut"])
async def test_writes_come_through_every_fault_of_the_road(server: Server, proxy: HostileProxy, fault: str) -> None:
    with contextlib.closing(Publisher()) as publisher:
        async with indexing(proxy.url, publisher), reading(server.url) as reader:
            publisher.publish(batch(1, 0))
            await until(lambda: gpu(reader, keys_of(1, 1)))
            for n in range(1, 16):
                if fault == "cut":
                    proxy.cut_after_bytes = n % 4
                else:
                    setattr(proxy, {"delay": "delay_s"}.get(fault, fault), 0.03 if fault == "delay" else n % 3 == 0)
                publisher.publish(batch(1, n))
                if n % 4 == 0:
                    publisher.publish(batch(1, n, removed=True))
                    publisher.publish(batch(1, n))
                await asyncio.sleep(0.02)
            proxy.readonly = proxy.silent = False
            proxy.delay_s, proxy.cut_after_bytes = 0.0, None
            await until(lambda: _is(gpu(reader, keys_of(1, 16)), 16))
            publisher.publish(batch(1, 15, removed=True))
            await until(lambda: _is(gpu(reader, keys_of(1, 16)), 15))


async def test_a_dead_indexer_shows_and_what_it_wrote_is_believed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.index.registry.UNATTENDED_AFTER_S", 0.8)
    with contextlib.closing(Publisher()) as publisher:
        async with reading(server.url) as reader:
            async with indexing(server.url, publisher):
                publisher.publish(batch(1, 0))
                await until(lambda: gpu(reader, keys_of(1, 1)))
                await until(lambda: reader.status()["unattended_workers"] == 0)
            await until(lambda: reader.status()["unattended_workers"] == 1)
            assert await gpu(reader, keys_of(1, 1)) == 1
            async with indexing(server.url, publisher):
                await until(lambda: reader.status()["unattended_workers"] == 0)


async def test_an_index_that_nobody_ever_filled_shows(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No indexer runs, or it has another key seed."""
    monkeypatch.setattr("router.index.registry.UNATTENDED_AFTER_S", 0.8)
    with contextlib.closing(Publisher()) as publisher:
        async with indexing(server.url, publisher, seed="another"), reading(server.url) as reader:
            reader.expect(lambda: [A.address])
            await until(lambda: reader.status()["unattended_workers"] == 1)
            async with indexing(server.url, publisher):
                await until(lambda: reader.status()["unattended_workers"] == 0)


async def test_a_standby_takes_over_from_a_dead_indexer(server: Server) -> None:
    with contextlib.closing(Publisher()) as publisher:
        async with reading(server.url) as reader, indexing(server.url, publisher) as standby:
            await until(lambda: standby.status()[str(A.address)]["last_replay"])
            publisher.publish(batch(1, 0))
            await until(lambda: gpu(reader, keys_of(1, 1)))
            async with indexing(server.url, publisher) as second:
                await until(lambda: second.status()[str(A.address)]["last_seq"] == 0)
                publisher.publish(batch(1, 1))
                await until(lambda: _is(gpu(reader, keys_of(1, 2)), 2))
                lives = reader._registry.lives[A.address]
                owner = standby._writer
                for task in standby._tasks.values():  # dies: nothing is released
                    task.cancel()
                assert standby._housekeeping is not None
                standby._housekeeping.cancel()
                assert isinstance(owner, RedisIndexWriter)
                owner._lives.clear()
                publisher.publish(batch(1, 2))
                started = time.monotonic()
                await until(lambda: _is(gpu(reader, keys_of(1, 3)), 3))
                assert time.monotonic() - started < 5 + 15  # 5 s, and room for a busy machine
                assert reader._registry.lives[A.address] != lives


async def test_a_restarted_indexer_goes_on_from_its_snapshot(server: Server) -> None:
    """Replay reaches back three batches only: without the snapshot the index would be nearly empty."""
    soon = Limits(snapshot_every_s=0.1)
    with contextlib.closing(Publisher(buffer_batches=3)) as publisher:
        async with reading(server.url) as reader:
            async with indexing(server.url, publisher, limits=soon) as indexer:
                await until(lambda: indexer.status()[str(A.address)]["last_replay"])
                for block in range(30):
                    publisher.publish(batch(1, block))
                    await asyncio.sleep(0.005)
                await until(lambda: _is(gpu(reader, keys_of(1, 30)), 30))
                await until(lambda: server.command("EXISTS", f"warmroute:1:{fingerprint('s')}:snap:{A.address}"))
                publisher.publish(batch(1, 29, removed=True))
                await until(lambda: _is(gpu(reader, keys_of(1, 30)), 29))
                await until(lambda: indexer._consumers[A.address]._snapshot_seq == 30)
            publisher.publish(batch(1, 28, removed=True))  # while nobody listens
            async with indexing(server.url, publisher, limits=soon) as again:
                await until(lambda: _is(gpu(reader, keys_of(1, 30)), 28))
                state = again.status()[str(A.address)]
                assert (state["history_whole"], state["batches"], state["forgets"]) == (True, 1, 0)


async def test_a_snapshot_of_another_process_is_no_claim(server: Server) -> None:
    soon = Limits(snapshot_every_s=0.05)
    async with reading(server.url) as reader:
        with contextlib.closing(Publisher()) as publisher:
            async with indexing(server.url, publisher, limits=soon) as indexer:
                await until(lambda: indexer.status()[str(A.address)]["last_replay"])
                for block in range(5):
                    publisher.publish(batch(1, block))
                await until(lambda: indexer.status()[str(A.address)]["last_seq"] == 4)
                await until(lambda: indexer._consumers[A.address]._snapshot_seq == 4)
        with contextlib.closing(Publisher()) as publisher:
            for block in range(5):
                publisher.publish(batch(2, block))
            async with indexing(server.url, publisher, limits=soon):
                await until(lambda: _is(gpu(reader, keys_of(2, 5)), 5))
                assert await gpu(reader, keys_of(1, 5)) == 0


async def test_a_check_tells_equal_from_missing_and_stale(server: Server) -> None:
    pod = WorkerAddress("http://127.0.0.1:9")  # nobody is there to dump its blocks: replay tells
    with contextlib.closing(Publisher()) as publisher:
        spec = SourceSpec(pod, "m", publisher.events, publisher.replay)
        async with (
            indexing(server.url, publisher, pod),
            reading(server.url) as reader,
            aiohttp.ClientSession() as session,
        ):
            for block in range(6):
                publisher.publish(batch(1, block))
            publisher.publish(batch(1, 5, removed=True))
            await until(lambda: _is(gpu(reader, keys_of(1, 6), WorkerId(pod, "")), 5))
            report = await compare(spec, reader, session, "s", pause_s=0.01)
            assert (report.held_blocks, report.indexed_blocks, show([report])) == (5, 5, 0)
            names = server.command("KEYS", "*")
            assert isinstance(names, list)
            victim = next(n for n in names if n[4:] == keys_of(1, 3)[2])
            server.command("RENAME", victim, victim[:4] + b"no block")
            report = await compare(spec, reader, session, "s", pause_s=0.01)
            assert (report.missing_blocks, report.stale_blocks, show([report])) == (1, 1, 1)
            assert "DIFFERS" in report.line()
            lost = await _safely(spec, reader, session, "s")
            assert (lost.source, show([lost])) == ("replay", 1)
            await asyncio.to_thread(server.stop)
            lost = await _safely(spec, reader, session, "s")
            await asyncio.to_thread(server.start)
            assert "not compared: Redis does not answer: " in lost.line()
            assert (show([lost]), show([lost, report]), show([])) == (3, 1, 3)


async def test_a_check_reads_an_emulated_pods_own_dump(server: Server) -> None:
    async def blocks(_: web.Request) -> web.Response:
        rows = [
            {"hash": 10 + i, "parent": 9 + i if i else None, "lora_name": None, "cache_salt": None, "copies": 1}
            | {"token_ids": [1000 + 4 * i + j for j in range(4)]}
            for i in (2, 0, 1)
        ]
        unknown = {"hash": 99, "parent": 98, "lora_name": None, "cache_salt": None, "copies": 1, "token_ids": [1] * 4}
        return web.json_response({"blocks": [*rows, unknown, {**unknown, "hash": 97, "token_ids": None}]})

    app = web.Application()
    app.add_routes([web.get("/emulated/blocks", blocks)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pod = WorkerAddress(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        async with aiohttp.ClientSession() as session:
            truth = await dumped(SourceSpec(pod, "m", "tcp://127.0.0.1:1"), session, "s")
        assert truth is not None
        assert truth.keys == set(keys_of(1, 3))
    finally:
        await runner.cleanup()
