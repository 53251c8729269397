"""The scribe's procedure around the Ledger, with a scripted source, in virtual time. Each hole found is named here."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from indexer.consumer import Consumer, Limits
from indexer.plan import Ledger
from indexer.source import Connected, Dropped, Inbox, Live, ReplayFailed, SourceSpec
from router.core.hashing import chain_keys, pack_tokens, root_key
from router.core.types import BlockKey, IndexOp, IndexUnavailable, WorkerAddress, WorkerId
from router.index.memory import MemoryIndex
from tests.sim.world import VirtualLoop

A = WorkerAddress("http://a")
SIZE = 2


def payload(block: int, *, life: int = 0, removed: bool = False) -> bytes:
    """Block `block` of one chain is stored by a life of the engine."""
    event: dict[str, Any] = {
        "type": "BlockRemoved" if removed else "BlockStored",
        "block_hashes": [life * 100 + block + 1],
    }
    if not removed:
        event |= {"parent_block_hash": life * 100 + block if block else None, "block_size": SIZE}
        event |= {"token_ids": [2 * block, 2 * block + 1]}
    return msgspec.msgpack.encode([0.0, [event], 0])


def keys(n: int) -> list[BlockKey]:
    return chain_keys(root_key(seed="s", model="m"), pack_tokens(range(n * SIZE)), SIZE)


class Engine:
    """What a replay is answered from. A switch may refuse; `while_replaying` is called after the first frame."""

    def __init__(self) -> None:
        self.buffer: list[tuple[int, bytes]] = []
        self.answering = True
        self.while_replaying: Callable[[], None] | None = None
        self.asked: list[int] = []


class ScriptedSource:
    def __init__(self, engine: Engine, inbox: Inbox) -> None:
        self.spec = SourceSpec(A, "m", "tcp://x:1", "tcp://x:2")
        self.connected, self.connections, self.last_error = True, 0, None
        self.engine, self._inbox = engine, inbox
        self.reconnects = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    def connect(self) -> None:
        self.connections += 1
        self._inbox.put(Connected(self.connections))

    def reconnect(self) -> None:
        self.reconnects += 1
        asyncio.get_running_loop().call_later(0.1, self.connect)

    def live(self, seq: int, message: bytes) -> None:
        self._inbox.put(Live(self.connections, seq, message))

    async def replay(self, from_seq: int) -> AsyncGenerator[tuple[int, bytes], None]:
        self.engine.asked.append(from_seq)
        if not self.engine.answering:
            await asyncio.sleep(3.0)
            raise ReplayFailed("nobody")
        for seq, message in list(self.engine.buffer):
            if seq >= from_seq:
                yield seq, message
                await asyncio.sleep(0)
                if self.engine.while_replaying is not None:
                    happens, self.engine.while_replaying = self.engine.while_replaying, None
                    happens()


class Store(MemoryIndex):
    away = False

    async def register(self, worker: WorkerId) -> None:
        if self.away:
            raise IndexUnavailable("connection")
        await super().register(worker)

    def apply_now(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        if self.away:
            raise IndexUnavailable("connection")
        super().apply_now(worker, ops)


class Bench:
    """A consumer at work."""

    def __init__(self, loop: VirtualLoop, limits: Limits) -> None:
        self.engine, self.inbox, self.store = Engine(), Inbox(max_messages=50), Store()
        self.source = ScriptedSource(self.engine, self.inbox)
        self.counts: dict[str, int] = {}
        self.consumer = Consumer(
            self.source,  # type: ignore[arg-type]
            self.inbox,
            Ledger(seed="s", model="m"),
            self.store,
            mint=lambda: f"life {len(self.counts)} {loop.time()}",
            clock=loop.time,
            observer=self,
            limits=limits,
        )

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    def depth(self, blocks: int = 10) -> int:
        held = self.store.holders_now(keys(blocks)).get(A)
        return held.gpu if held else 0


def run(scenario: Callable[[Bench], Coroutine[Any, Any, None]], limits: Limits = Limits(short_retry_s=10.0)) -> Bench:  # noqa: B008
    """In virtual time."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    bench = Bench(loop, limits)

    async def body() -> None:
        task = asyncio.create_task(bench.consumer.run())
        try:
            await scenario(bench)
            msgspec.json.encode(bench.consumer.status())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    try:
        loop.run_until_complete(asyncio.wait_for(body(), 10_000))
    finally:
        loop.close()
        asyncio.set_event_loop(None)
    return bench


def test_a_start_that_got_no_replay_is_tried_again_though_nothing_looks_wrong() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.buffer = [(0, payload(0)), (1, payload(1))]
        b.engine.answering = False
        b.source.connect()
        await asyncio.sleep(5)
        b.source.live(2, payload(0, life=7))  # a chain of its own: no parent is missing
        await asyncio.sleep(1)
        assert b.depth() == 1
        b.engine.answering = True
        b.engine.buffer.append((2, payload(0, life=7)))
        await asyncio.sleep(30)
        assert b.depth() == 2
        assert b.consumer.ledger.whole

    run(scenario)


def test_a_batch_is_found_in_the_step_that_received_it() -> None:
    """A request that is looked up right after an event was read must see it: no task has its turn in between."""

    async def scenario(b: Bench) -> None:
        b.engine.buffer = [(0, payload(0))]
        b.source.connect()
        await asyncio.sleep(1)
        b.source.live(1, payload(1))
        b.source.live(2, payload(2))
        assert b.depth() == 3
        b.source.live(3, payload(2, removed=True))
        assert b.depth() == 2
        b.engine.buffer = [(i, payload(i)) for i in range(7)]
        b.source.live(5, payload(5))  # a hole: this one and what comes behind it wait for the replay
        b.source.live(6, payload(6))
        assert b.depth() == 2
        await asyncio.sleep(1)
        assert b.depth() == 7
        b.source.live(7, b"no batch")
        assert b.consumer.status()["last_seq"] == 6

    run(scenario)


def test_a_batch_lost_before_the_first_that_is_heard_is_asked_for() -> None:
    async def scenario(b: Bench) -> None:
        b.source.connect()
        await asyncio.sleep(1)
        b.engine.buffer = [(i, payload(i)) for i in range(4)]
        b.source.live(3, payload(3))
        await asyncio.sleep(1)
        assert b.depth() == 4

    assert run(scenario).engine.asked == [0, 0]


def test_a_restart_told_of_in_the_middle_of_a_replay() -> None:
    """What the rest of that answer says is of the engine that is gone."""

    async def scenario(b: Bench) -> None:
        old, new = [(i, payload(i)) for i in range(6)], [(0, payload(0, life=1))]

        def restart() -> None:
            b.engine.buffer = new
            b.consumer.restarted()

        b.engine.buffer = old
        b.engine.while_replaying = restart
        b.source.connect()
        await asyncio.sleep(5)
        assert (b.depth(), b.consumer.ledger.last_seq, b.consumer.ledger.whole) == (1, 0, True)
        b.engine.buffer = [*new, (1, payload(1, life=1))]
        b.source.live(1, payload(1, life=1))
        await asyncio.sleep(1)
        assert b.depth() == 2

    assert run(scenario).source.reconnects == 1


def test_a_gap_that_cannot_be_filled_is_followed_by_another_try() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.buffer = [(0, payload(0))]
        b.source.connect()
        await asyncio.sleep(1)
        b.engine.answering = False
        b.source.live(2, payload(2))
        await asyncio.sleep(20)
        assert b.depth() == 0  # cold rather than wrong
        b.engine.answering = True
        b.engine.buffer = [(i, payload(i)) for i in range(3)]
        await asyncio.sleep(60)
        assert b.depth() == 3

    run(scenario)


def test_a_replay_of_another_process_in_mid_stream_makes_it_connect_anew() -> None:
    """The gap belongs to a connection whose engine is gone; what else comes through it is not believed."""

    async def scenario(b: Bench) -> None:
        b.engine.buffer = [(i, payload(i)) for i in range(3)]
        b.source.connect()
        await asyncio.sleep(1)
        b.engine.buffer = [(i, payload(i, life=1)) for i in range(4)]
        b.source.live(5, payload(5))
        b.source.live(6, payload(6))
        await asyncio.sleep(5)
        assert (b.depth(), b.consumer.ledger.last_seq) == (4, 3)

    assert run(scenario).source.reconnects == 1


def test_a_full_queue_is_made_good_by_replay() -> None:
    async def scenario(b: Bench) -> None:
        b.source.connect()
        await asyncio.sleep(1)
        b.engine.buffer = [(i, payload(i)) for i in range(8)]
        b.source.live(0, payload(0))
        b.inbox.put(Dropped())
        await asyncio.sleep(1)
        assert b.depth() == 8

    assert run(scenario).counts["overflows"] == 1


@pytest.mark.parametrize("pending_max", [2, 1000], ids=["more than is kept", "all kept"])
def test_what_was_told_while_the_store_was_away_is_written_afterwards(pending_max: int) -> None:
    async def scenario(b: Bench) -> None:
        b.engine.buffer = [(i, payload(i)) for i in range(6)]
        b.source.connect()
        await asyncio.sleep(1)
        b.store.away = True
        for seq, block in ((6, 5), (7, 4)):
            b.source.live(seq, payload(block, removed=True))
        b.source.live(8, payload(4))
        await asyncio.sleep(10)
        assert b.depth() == 6
        b.store.away = False
        await asyncio.sleep(10)
        assert b.depth() == 5
        assert b.consumer.status()["unwritten_blocks"] == 0

    run(scenario, Limits(pending_max_blocks=pending_max))


def test_a_store_that_forgot_the_worker_is_filled_again() -> None:
    async def scenario(b: Bench) -> None:
        b.engine.buffer = [(i, payload(i)) for i in range(6)]
        b.source.connect()
        await asyncio.sleep(1)
        await b.store.drop(A)
        assert b.depth() == 0
        b.consumer.store_lost()
        await asyncio.sleep(1)
        assert b.depth() == 6

    run(scenario)
