"""A hostile world in virtual time around the real Consumer, Ledger, Inbox and MemoryIndex. One thread, one seed.

Pods store, duplicate, remove, clear, restart and publish garbage; messages are late, lost or doubled; restarts are seen
late; replays fail, are cut or have holes; the store is away, answers ambiguously, loses everything or some blocks; the
indexer dies in the middle of a batch; pods leave and come back. What a pod holds is kept apart, by other code.
"""

from __future__ import annotations

import asyncio
import selectors
import struct
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import xxhash

from indexer.consumer import Consumer, Limits
from indexer.plan import Ledger
from indexer.source import Connected, Inbox, Live, ReplayFailed, SourceSpec
from router.core.types import BlockKey, IndexOp, IndexUnavailable, WorkerAddress, WorkerId
from router.index.memory import MemoryIndex

SIZE = 2
CHATS, BLOCKS = 6, 6
REPAIR_S = 30.0  # silence of a replay three times over, pauses and back-offs, with room
LIMITS = Limits(
    flush_max_blocks=7,
    pending_max_blocks=40,
    replay_pause_s=0.05,
    short_retry_s=1.0,
    write_backoff_max_s=1.0,
    snapshot_every_s=1.0,
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits take no time: the clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now_s


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen again"
        self._loop.now_s += max(timeout, 0.0)
        return []


async def _at_once(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def key_of(chat: int, block: int) -> bytes:
    """The key of a chat's block, by hand."""
    fields = b"".join(struct.pack("<I", len(f)) + f for f in (b"seed", b"m")) + b"\xff" * 8
    key = xxhash.xxh3_64_digest(fields)
    for b in range(block + 1):
        key = xxhash.xxh3_64_digest(key + struct.pack("<II", *tokens_of(chat, b)))
    return key


def tokens_of(chat: int, block: int) -> tuple[int, int]:
    """The first block is the same in every two chats."""
    return (chat // 2 * 1000 if block == 0 else chat * 1000 + block, block)


KEYS = {(c, b): key_of(c, b) for c in range(CHATS) for b in range(BLOCKS)}


class Process:
    """One life of an engine: its table of blocks and copies, and its publisher's buffer."""

    def __init__(self, rng: Random, buffer_batches: int) -> None:
        self._salt = rng.getrandbits(40)
        self.copies: Counter[tuple[int, int]] = Counter()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self.seq = 0
        self.to_clear = False

    def name(self, chat: int, block: int) -> int:
        chat = chat // 2 * 2 if block == 0 else chat
        return self._salt * 10_000 + chat * 100 + block + 1

    def step(self, rng: Random) -> list[dict[str, Any]]:
        """One engine step: what it did, as events."""
        events: list[dict[str, Any]] = []
        if self.to_clear:
            self.to_clear = False
            self.copies.clear()
            events.append({"type": "AllBlocksCleared"})
        for _ in range(rng.randrange(3)):
            held = [x for x, n in self.copies.items() if n]
            if held:
                chat, block = rng.choice(held)
                self._less(chat, block)
                events.append({"type": "BlockRemoved", "block_hashes": [self.name(chat, block)]})
        events.append(self._store(rng))
        return events

    def _store(self, rng: Random) -> dict[str, Any]:
        chat = rng.randrange(CHATS)
        known = next((b for b in range(BLOCKS) if not self.copies[self._at(chat, b)]), BLOCKS)
        start = rng.randrange(known + 1) if rng.random() < 0.3 else known  # recomputing stores duplicates
        stop = min(start + 1 + rng.randrange(3), BLOCKS)
        start = min(start, stop - 1)
        for b in range(start, stop):
            self.copies[self._at(chat, b)] += 1
        return {
            "type": "BlockStored",
            "block_hashes": [self.name(chat, b) for b in range(start, stop)],
            "parent_block_hash": self.name(chat, start - 1) if start else None,
            "token_ids": [t for b in range(start, stop) for t in tokens_of(chat, b)],
            "block_size": SIZE,
        }

    def _at(self, chat: int, block: int) -> tuple[int, int]:
        return (chat // 2 * 2 if block == 0 else chat, block)

    def _less(self, chat: int, block: int) -> None:
        self.copies[chat, block] -= 1

    def truth(self) -> set[bytes]:
        """The keys it holds."""
        return {KEYS[x] for x, n in self.copies.items() if n > 0}


class FakeSource:
    """Source's interface over the world's network."""

    def __init__(self, world: World, pod: Pod, inbox: Inbox) -> None:
        self.spec = SourceSpec(pod.address, "m", "tcp://x:1", "tcp://x:2" if pod.replayable else None)
        self.connected, self.connections, self.last_error = False, 0, None
        self._world, self._pod, self._inbox = world, pod, inbox
        self.process: Process | None = None  # whom the present connection is to
        self._break = asyncio.Event()
        self._last_at_s = 0.0

    def reconnect(self) -> None:
        self._break.set()

    def break_soon(self, after_s: float) -> None:
        """The other end is gone; it is noticed later."""
        connection = self.connections
        asyncio.get_running_loop().call_later(
            after_s, lambda: self._break.set() if connection == self.connections else None
        )

    async def run(self) -> None:
        while True:
            if self._pod.process is not None:
                self._break.clear()
                self.connections += 1
                self.process = self._pod.process
                self.connected = True
                self._inbox.put(Connected(self.connections))
                await self._break.wait()
                self.connected = False
            await asyncio.sleep(self._world.rng.uniform(0.05, 1.0))

    def send(self, process: Process, seq: int, payload: bytes) -> None:
        """On its way through the connection, if that is to this process."""
        world = self._world
        if not self.connected or self.process is not process or world.chance(world.loss):
            return
        loop = asyncio.get_running_loop()
        self._last_at_s = max(self._last_at_s, loop.time() + world.rng.random() * world.lag_s)
        for _ in range(2 if world.chance(world.doubling) else 1):
            loop.call_at(self._last_at_s, self._inbox.put, Live(self.connections, seq, payload))

    async def replay(self, from_seq: int) -> AsyncGenerator[tuple[int, bytes], None]:
        world, process = self._world, self._pod.process
        await asyncio.sleep(world.rng.random() * 0.2)
        if process is None or self.spec.replay is None or world.chance(world.replay_failing):
            await asyncio.sleep(3.0)
            raise ReplayFailed("nobody")
        for n, (seq, payload) in enumerate([x for x in process.buffer if x[0] >= from_seq]):
            if world.chance(world.replay_failing / 10):
                await asyncio.sleep(3.0)
                raise ReplayFailed("silent in the middle")
            if n and world.chance(world.replay_failing / 10):
                continue  # a hole: a ROUTER drops when its queue is full, so never the first
            if world.chance(0.1):
                await asyncio.sleep(world.rng.random() * 0.3)
            if self._pod.process is not process:
                await asyncio.sleep(3.0)
                raise ReplayFailed("died in the middle")
            yield seq, payload


class FlakyStore:
    """IndexWriter over a MemoryIndex that can be away, answer ambiguously, and lose things."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.index = MemoryIndex()
        self.away = False
        self._lost: set[WorkerAddress] = set()
        self._snapshots: dict[WorkerAddress, bytes] = {}

    async def save(self, address: WorkerAddress, blob: bytes) -> None:
        async def keep(_: MemoryIndex) -> None:
            self._snapshots[address] = blob

        await self._call(keep)

    async def load(self, address: WorkerAddress) -> bytes | None:
        if self.away or self._world.chance(self._world.store_failing):
            raise IndexUnavailable("connection")
        blob = self._snapshots.get(address)
        return blob[:-9] if blob and self._world.chance(0.1) else blob

    async def _call(self, call: Callable[[MemoryIndex], Coroutine[Any, Any, Any]]) -> None:
        world = self._world
        await asyncio.sleep(world.rng.random() * 0.05)
        if self.away or world.chance(world.store_failing):
            await asyncio.sleep(world.rng.random() * 0.5)
            raise IndexUnavailable("connection")
        await call(self.index)
        if world.chance(world.store_failing):
            raise IndexUnavailable("deadline")  # it was done, but nobody can know

    async def register(self, worker: WorkerId) -> None:
        await self._call(lambda index: index.register(worker))
        self._lost.discard(worker.address)

    async def apply(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        await self._call(lambda index: index.apply(worker, ops))

    async def learnt(self, worker: WorkerId, block_size_tokens: int) -> None:
        await self._call(lambda index: index.learnt(worker, block_size_tokens))

    async def drop(self, address: WorkerAddress) -> None:
        await self._call(lambda index: index.drop(address))

    async def maintain(self) -> bool:
        return await self.index.maintain()

    def lost(self) -> set[WorkerAddress]:
        lost, self._lost = self._lost, set()
        return lost

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    def flush(self) -> None:
        """Everything is gone: registry, slots, blocks."""
        self._lost |= set(self.index._slots)
        self.index = MemoryIndex()

    def evict(self, rng: Random) -> None:
        """maxmemory with allkeys-lru: some blocks are gone."""
        for shard in self.index._tiers["gpu"]:
            for key in list(shard):
                if rng.random() < 0.2:
                    del shard[key]

    def held(self, address: WorkerAddress) -> set[bytes]:
        """What a router would believe of this worker, block by block."""
        return {k for k in KEYS.values() if address in self.index.holders_now([BlockKey(k)])}


class ImmediateStore(FlakyStore):
    """One that is written without waiting, when it can be."""

    def apply_now(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        world = self._world
        if self.away or world.chance(world.store_failing):
            raise IndexUnavailable("connection")
        self.index.apply_now(worker, ops)
        if world.chance(world.store_failing):
            raise IndexUnavailable("deadline")


class Pod:
    """An address with, at most times, a process behind it."""

    def __init__(self, world: World, address: WorkerAddress) -> None:
        self.world, self.address = world, address
        self.buffer_batches = world.rng.choice([4, 10_000, 10_000])
        self.replayable = world.rng.random() < 0.9
        self.process: Process | None = Process(world.rng, self.buffer_batches)
        self.whole = self.replayable and self.buffer_batches > 1000  # nothing forces the index to be incomplete
        self.gone_at_s: dict[bytes, float] = {}  # key -> since when it is not held
        self.source: FakeSource | None = None
        self.consumer: Consumer | None = None
        self.task: asyncio.Task[None] | None = None

    def publish(self) -> None:
        """One engine step, published."""
        process, world = self.process, self.world
        if process is None:
            return
        if world.chance(world.garbage):
            payload, self.whole = world.rng.randbytes(12), False
        else:
            payload = msgspec.msgpack.encode([world.clock(), process.step(world.rng), 0])
        seq = process.seq
        process.seq += 1
        process.buffer.append((seq, payload))
        self.note_losses()
        if self.source is not None:
            self.source.send(process, seq, payload)

    def note_losses(self) -> None:
        """Remember since when each key is not held."""
        truth, now_s = self.truth(), self.world.loop.time()
        for key in KEYS.values():
            if key in truth:
                self.gone_at_s.pop(key, None)
            else:
                self.gone_at_s.setdefault(key, now_s)

    def truth(self) -> set[bytes]:
        return self.process.truth() if self.process else set()

    def die(self) -> None:
        self.process = None
        self.note_losses()
        if self.source is not None:
            self.source.break_soon(self.world.rng.random() * 5.0)

    def rise(self) -> None:
        self.process = Process(self.world.rng, self.buffer_batches)


class World:
    """`run` makes trouble for a number of steps, then heals everything and compares."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.loop = VirtualLoop()
        self.faults = True
        some = self.rng.choice([0.0, 0.02, 0.2])
        self.loss, self.doubling, self.garbage = some, some, 0.002 if self.rng.random() < 0.3 else 0.0
        self.replay_failing = self.rng.choice([0.0, 0.1, 0.5])
        self.store_failing = self.rng.choice([0.0, 0.05, 0.3])
        self.lag_s = self.rng.choice([0.0, 0.1, 2.0])
        self.jump_s = 0.0
        self.snapshots = self.rng.random() < 0.6
        self.counts: Counter[str] = Counter()
        self.evicted = False
        self.calm_since_s = 0.0

    def clock(self) -> float:
        return self.loop.time() + self.jump_s

    def chance(self, p: float) -> bool:
        return self.faults and self.rng.random() < p

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] += n

    def run(self, steps: int = 100) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            with patch("asyncio.to_thread", _at_once):  # a thread would take real time
                self.loop.run_until_complete(self._run(steps))
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            asyncio.set_event_loop(None)

    async def _run(self, steps: int) -> None:
        self.store = ImmediateStore(self) if self.seed % 2 else FlakyStore(self)
        self.pods = [Pod(self, WorkerAddress(f"http://pod-{n}")) for n in range(2)]
        house = asyncio.create_task(self._keep_house())
        for pod in self.pods:
            self.follow(pod)
        for _ in range(steps):
            self._trouble()
            await asyncio.sleep(self.rng.random() * self.rng.choice([0.02, 0.2, 2.0]))
            self._check_staleness()
        await self._heal()
        self._compare()
        await self._leave()
        house.cancel()

    # -- trouble ----------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        rng, pod = self.rng, self.rng.choice(self.pods)
        dice = rng.random()
        if dice < 0.72:
            for _ in range(rng.choice([1, 1, 1, 12])):
                pod.publish()
        elif dice < 0.76 and pod.process is not None:
            pod.process.to_clear = True
        elif dice < 0.80:
            pod.die() if pod.process is not None else pod.rise()
        elif dice < 0.84:
            if pod.process is not None:
                pod.die()
            pod.rise()  # at once, at the same address; the connection notices later
        elif dice < 0.87 and pod.source is not None:
            pod.source.reconnect()
        elif dice < 0.89:
            self.unfollow(pod) if pod.consumer is not None else self.follow(pod)
        elif dice < 0.91 and pod.consumer is not None:
            self.unfollow(pod, drop=False)  # the indexer dies, in whatever it is doing, and another begins
            self.follow(pod)
        elif dice < 0.93 and pod.consumer is not None and pod.process is not None:
            pod.consumer.restarted()  # somebody says so, rightly or not
        elif dice < 0.95:
            self.store.flush()
        elif dice < 0.96:
            self.store.evict(rng)
            self.evicted = True
        elif dice < 0.98:
            self.store.away = not self.store.away
        else:
            self.jump_s += rng.choice([-100.0, 1000.0])
        if self.store.away or any(p.process is None or p.consumer is None for p in self.pods):
            self.calm_since_s = self.loop.time()

    def follow(self, pod: Pod) -> None:
        inbox = Inbox(max_messages=20)
        pod.source = FakeSource(self, pod, inbox)
        pod.consumer = Consumer(
            pod.source,  # type: ignore[arg-type]
            inbox,
            Ledger(seed="seed", model="m"),
            self.store,
            mint=lambda: f"{self.rng.getrandbits(40):x}",
            clock=self.clock,
            observer=self,
            snapshots=self.store if self.snapshots else None,
            limits=LIMITS,
        )
        pod.task = asyncio.create_task(pod.consumer.run())

    def unfollow(self, pod: Pod, *, drop: bool = True) -> None:
        assert pod.task is not None
        pod.task.cancel()
        pod.source = pod.consumer = pod.task = None
        if drop:
            asyncio.create_task(self._drop(pod))  # noqa: RUF006  the loop ends after it

    async def _drop(self, pod: Pod) -> None:
        while pod.consumer is None:
            try:
                await self.store.drop(pod.address)
                return
            except IndexUnavailable:
                await asyncio.sleep(0.1)

    async def _keep_house(self) -> None:
        while True:
            await self.store.maintain()
            for address in sorted(self.store.lost()):
                for pod in self.pods:
                    if pod.address == address and pod.consumer is not None:
                        pod.consumer.store_lost()
            await asyncio.sleep(1.0)

    # -- what must hold ---------------------------------------------------------------------------------------

    def _check_staleness(self) -> None:
        """While everything can be reached: no claim of a block that was lost longer ago than one repair time."""
        now_s = self.loop.time()
        if self.store_failing > 0.1 or self.replay_failing > 0.1 or now_s - self.calm_since_s < REPAIR_S:
            return
        for pod in self.pods:
            pod.publish()  # an engine that works says something
            for key in self.store.held(pod.address) - pod.truth():
                age_s = now_s - pod.gone_at_s.get(key, now_s)
                assert age_s <= REPAIR_S, f"seed {self.seed}: {pod.address} lost a block {age_s:.1f} s ago"

    async def _heal(self) -> None:
        self.faults = self.store.away = False
        for pod in self.pods:
            if pod.process is None:
                pod.rise()
            if pod.consumer is None:
                self.follow(pod)
        for _ in range(3):
            for pod in self.pods:
                pod.publish()
            await asyncio.sleep(400.0)  # a short history is asked for again after at most 300 s
        for pod in self.pods:
            pod.publish()
        await asyncio.sleep(REPAIR_S)

    def _compare(self) -> None:
        for pod in self.pods:
            assert pod.consumer is not None
            told, held = set(pod.consumer.ledger.claims("gpu")), self.store.held(pod.address)
            context = f"seed {self.seed}, {pod.address}: {pod.consumer.status()}"
            assert told <= pod.truth(), context
            if pod.whole:
                assert told == pod.truth(), context
            assert held <= told, context
            if not self.evicted:
                assert held == told, context
            assert not pod.consumer._pending, context
            assert not pod.consumer._renew, context
            assert len(pod.consumer._inbox) == 0, context

    async def _leave(self) -> None:
        """Everybody goes: nothing may stay behind."""
        for pod in self.pods:
            self.unfollow(pod)
        await asyncio.sleep(600.0)
        status = self.store.index.status()
        assert status["blocks"] == {"gpu": 0}, f"seed {self.seed}: {status}"
        assert (status["live_slots"], status["retired_slots"]) == (0, 0), f"seed {self.seed}: {status}"
