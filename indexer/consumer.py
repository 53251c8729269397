"""One worker's scribe: what its source receives goes through its Ledger into the index.

The ordinary next batch is learnt in the step that received it, and written in it too where the store takes it at once:
a request looked up afterwards sees it. For all else there are two tasks besides the receiving one: `_learn` keeps the
Ledger true and never waits for the store; `_write` brings the store after it, and when the store was away or lost
everything, fills it again from the Ledger.
May import: indexer.source, indexer.plan, indexer.wire, router.core, router.index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import xxhash

from indexer.merge import merged
from indexer.plan import AskReplay, Ledger, Told
from indexer.snapshot import pack, unpack
from indexer.source import Connected, Dropped, Inbox, Item, Live, ReplayFailed, Source
from indexer.wire import Batch, WireError, decode
from router.core.types import TIERS, Add, BlockKey, Clear, Clock, IndexOp, IndexUnavailable, WorkerId
from router.index.port import ImmediateWriter, IndexWriter, SlotLost, SnapshotStore

log = logging.getLogger("warmroute.indexer")


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one worker."""

    flush_max_blocks: int = 4096  # in one call of the store
    pending_max_blocks: int = 200_000  # waiting for the store; beyond it the store is filled anew instead
    replay_tries: int = 3
    replay_pause_s: float = 0.3
    short_retry_s: float = 10.0  # how soon a start that got no replay is tried again; doubles up to 300 s
    turn_s: float = 0.002  # learning without giving others a turn
    write_backoff_max_s: float = 2.0
    snapshot_every_s: float = 10.0
    catch_up_s: float = 5.0  # the store is left as it is for so long, until the first replay is through


class Observer(Protocol):
    """Where a consumer counts; router.ops metrics behind it."""

    def count(self, what: str, n: int = 1) -> None:
        """`what` comes from a closed set."""
        ...


class Consumer:
    """Everything about one worker's events. Owned by indexer.app; lives until the pod is removed."""

    def __init__(
        self,
        source: Source,
        inbox: Inbox,
        ledger: Ledger,
        writer: IndexWriter,
        *,
        mint: Callable[[], str],
        clock: Clock,
        observer: Observer,
        snapshots: SnapshotStore | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
    ) -> None:
        self.source, self.ledger, self.address = source, ledger, source.spec.address
        self._inbox, self._writer, self._mint, self._clock = inbox, writer, mint, clock
        self._observer, self._limits = observer, limits
        self._snapshots = snapshots
        self._immediate = writer if isinstance(writer, ImmediateWriter) else None
        self._idle = False  # the learner waits for something to learn
        self._written = False  # the writer waits for something to write
        inbox.taker = self._at_once
        self._snapshot_seq = -1
        self._caught_up = asyncio.Event()
        self._connection = -1  # only messages of this connection count
        self._restarts = 0  # how often somebody told us of one
        self._pending: list[IndexOp] = []
        self._pending_blocks = 0
        self._renew = True  # the store needs a new slot and everything in it
        self._wake = asyncio.Event()
        self._told_size: int | None = None
        self._worker: WorkerId | None = None
        self._retry_s = limits.short_retry_s
        self._retry_at_s: float | None = None
        self._replayed_s = clock()
        self.last_event_s: float | None = None
        self.last_error: str | None = None
        self.replays = 0
        self.last_replay: dict[str, Any] | None = None

    async def run(self) -> None:
        """Until cancelled."""
        if self._snapshots is not None and self.ledger.last_seq < 0:
            await self._restore(self._snapshots)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.source.run())
            tasks.create_task(self._learn())
            tasks.create_task(self._write())
            if self._snapshots is not None:
                tasks.create_task(self._keep_snapshots(self._snapshots))

    def restarted(self) -> None:
        """Somebody saw that the process is a new one: forget at once, and connect and learn anew."""
        self._connection = -1
        self._restarts += 1
        self._put([*self.ledger.clear()])
        self.source.reconnect()

    def store_lost(self) -> None:
        """The store forgot this worker: write everything again."""
        self._renew = True
        self._forget_pending()
        self._wake.set()

    # -- learning ---------------------------------------------------------------------------------------------

    async def _learn(self) -> None:
        turn_ends_s = self._clock() + self._limits.turn_s
        while True:
            self._idle = True
            item = await self._next()
            self._idle = False
            if item is not None:
                await self._learn_one(item)
            self._plan_retry()
            if self._retry_at_s is not None and self._clock() >= self._retry_at_s:
                await self._fill_short_history()
            if self._clock() > turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = self._clock() + self._limits.turn_s

    async def _next(self) -> Item | None:
        """The next item; None when it is time to ask for the old history again."""
        if len(self._inbox) or self._retry_at_s is None:
            return await self._inbox.get()
        try:
            async with asyncio.timeout(max(self._retry_at_s - self._clock(), 0.01)):
                return await self._inbox.get()
        except TimeoutError:
            return None

    def _at_once(self, item: Item) -> bool:
        """The batch after the last one, with nothing waiting: it needs no task's turn. False: it does."""
        if not self._idle or not isinstance(item, Live) or item.connection != self._connection or self.ledger.short:
            return False
        if self.ledger.last_seq < 0 or item.seq != self.ledger.last_seq + 1:
            return False
        try:
            batch = decode(item.payload)
        except WireError:
            return False  # the learner says so, and asks for it again
        self.last_event_s = self._clock()
        told = self.ledger.receive(item.seq, batch, _digest(item.payload))
        assert isinstance(told, list)
        self._put(told)
        return True

    async def _learn_one(self, item: Item) -> None:
        if isinstance(item, Live):
            if item.connection == self._connection:
                await self._live(item)
        elif isinstance(item, Connected):
            self._connection = item.connection
            self._observer.count("connections")
            await self._replay(self.ledger.connected())
        elif isinstance(item, Dropped):
            self._observer.count("overflows")
            if self.ledger.last_seq >= 0:
                await self._replay(AskReplay(self.ledger.last_seq, "gap"))

    async def _live(self, item: Live) -> None:
        batch, digest = self._decode(item.payload), _digest(item.payload)
        self.last_event_s = self._clock()
        tries, reached, orphans = 0, self.ledger.last_seq, self.ledger.facts.orphans
        while isinstance(told := self.ledger.receive(item.seq, batch, digest), AskReplay):
            if told.reason == "gap":
                self._observer.count("gaps")
            if await self._replay(told):
                self._connection = -1  # a replay in mid-stream spoke of another process: this connection may be
                self.source.reconnect()  # to the one that is gone, so nothing more of it is believed
            if item.connection != self._connection:
                return
            tries = tries + 1 if self.ledger.last_seq <= reached else 0
            reached = self.ledger.last_seq
            if tries >= self._limits.replay_tries:
                self.last_error = "a gap could not be filled by replay; started anew"
                self._put(self.ledger.give_up())
        self._put(told)
        if self.ledger.short and self.ledger.facts.orphans > orphans and self._clock() - self._replayed_s > 1.0:
            self._retry_at_s = self._clock()  # blocks under a parent that a replay would tell: no need to wait

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return decode(payload)
        except WireError as exc:
            self.last_error = f"undecodable batch: {exc}"
            self._observer.count("undecodable")
            return None

    async def _replay(self, ask: AskReplay) -> bool:
        """Ask, and ask again as long as the Ledger says so. Afterwards the Ledger is whole, or knows that it is not.

        True if another process answered than the one the Ledger knew.
        """
        failures, reached, restarted, restarts = 0, self.ledger.last_seq, False, self._restarts
        tries = 0 if ask.reason == "start" else self._limits.replay_tries  # a start is tried again later
        again = ask
        while True:
            restarted |= again.reason == "restart"
            self._put(list(again.ops))
            answered, told = await self._one_replay(again, restarts)
            if self._restarts != restarts:
                return restarted  # the next connection begins anew
            if told is None and not answered and failures < tries and self.source.spec.replay:
                failures += 1
                await asyncio.sleep(self._limits.replay_pause_s * failures)
                continue
            if told is None:
                told = self.ledger.end_replay(answered=answered)
            if isinstance(told, list):
                self._put(told)
                break
            if told.reason == "gap" and self.ledger.last_seq <= reached:
                failures += 1  # a hole at the same place
                if failures > self._limits.replay_tries:
                    self._put(self.ledger.give_up())
                    break
            reached, again = self.ledger.last_seq, told
        self._caught_up.set()
        return restarted

    async def _one_replay(self, ask: AskReplay, restarts: int) -> tuple[bool, Told | None]:
        self.replays += 1
        first: int | None = None
        frames = 0
        self.ledger.begin_replay(ask)
        try:
            async with contextlib.aclosing(self.source.replay(ask.from_seq)) as batches:
                async for seq, payload in batches:
                    if self._restarts != restarts:  # told meanwhile that the process is another one
                        break
                    first = seq if first is None else first
                    frames += 1
                    told = self.ledger.replayed(seq, self._decode(payload), _digest(payload))
                    if isinstance(told, AskReplay):
                        return True, told
                    self._put(told)
                    self.last_event_s = self._clock()
        except ReplayFailed as exc:
            if self.source.spec.replay is not None:
                self.last_error = f"replay: {exc}"
                self._observer.count("replays_failed")
            return False, None
        finally:
            self.last_replay = {"reason": ask.reason, "asked_from": ask.from_seq, "first": first, "batches": frames}
            self._observer.count("replays")
            self._replayed_s = self._clock()
        return True, None

    def _plan_retry(self) -> None:
        """While older batches may still be had, ask for them again: soon, then less and less often."""
        if not self.ledger.short or self.source.spec.replay is None:
            self._retry_at_s, self._retry_s = None, self._limits.short_retry_s
        elif self._retry_at_s is None:
            self._retry_at_s = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, 300.0)

    async def _fill_short_history(self) -> None:
        self._retry_at_s = None
        if self.ledger.short and self._connection >= 0:
            await self._replay(AskReplay(0, "start" if self.ledger.last_seq < 0 else "parent"))

    # -- writing ----------------------------------------------------------------------------------------------

    def _put(self, ops: list[IndexOp]) -> None:
        if not ops or self._written_at_once(ops):
            return
        for op in ops:
            if isinstance(op, Clear):
                self._observer.count("clears")
                self._renew = True
                self._forget_pending()
            else:
                self._pending.append(op)
                self._pending_blocks += len(op.keys)
        if self._pending_blocks > self._limits.pending_max_blocks:
            self._renew = True
        if self._renew:
            self._forget_pending()  # the Ledger is written whole
        self._wake.set()

    def _written_at_once(self, ops: list[IndexOp]) -> bool:
        """True if the store has them now. False: they are for the writer, which meets the same error and sees to it."""
        if self._immediate is None or self._worker is None or not self._written:
            return False
        if self._renew or self._pending or any(isinstance(op, Clear) for op in ops):
            return False
        try:
            self._immediate.apply_now(self._worker, ops)
        except (SlotLost, IndexUnavailable):
            return False
        if self.ledger.block_size_tokens != self._told_size:
            self._wake.set()
        return True

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._pending_blocks = 0

    async def _write(self) -> None:
        with contextlib.suppress(TimeoutError):  # what an earlier indexer wrote serves meanwhile
            async with asyncio.timeout(self._limits.catch_up_s):
                await self._caught_up.wait()
        backoff_s, failing = 0.05, False
        while True:
            try:
                if self._renew:
                    await self._write_all()
                await self._write_pending()
                await self._write_size()
            except IndexUnavailable as exc:
                self.last_error = f"index: {exc}"
                self._observer.count("writes_failed")
                if not failing:
                    fields = {"worker": str(self.address), "error": str(exc)}
                    log.warning(
                        "the shared index cannot be written; events are kept until it can", extra={"fields": fields}
                    )
                failing = True
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._limits.write_backoff_max_s)
                continue
            except SlotLost as exc:
                self._renew = True
                self._observer.count(f"slots_lost_{exc.reason}")
                await asyncio.sleep(0.05 if exc.reason == "unregistered" else 1.0)
                continue
            if failing:
                log.info("the shared index is written again", extra={"fields": {"worker": str(self.address)}})
            backoff_s, failing = 0.05, False
            if not self._renew and not self._pending:
                self._written = True
                await self._wake.wait()
                self._written = False
            self._wake.clear()

    async def _write_all(self) -> None:
        """A new life with everything the Ledger has now. Interrupted, it is begun again with another slot."""
        worker = WorkerId(self.address, self._mint())
        await self._writer.register(worker)
        self._worker, self._told_size = worker, None
        self._renew, done = False, False
        self._forget_pending()  # what comes from here on comes after what the Ledger has now
        claims = [(tier, list(self.ledger.claims(tier))) for tier in TIERS]
        try:
            for tier, keys in claims:
                for some in _chunks(keys, self._limits.flush_max_blocks):
                    if self._renew:
                        return
                    await self._writer.apply(worker, [Add(tuple(some), tier)])
            done = True
        finally:
            self._renew |= not done

    async def _write_pending(self) -> None:
        while self._pending and not self._renew:
            assert self._worker is not None
            ops, blocks = self._pending, self._pending_blocks
            self._pending, self._pending_blocks = [], 0
            done = False
            try:
                for some in _slices(merged(ops), self._limits.flush_max_blocks):
                    await self._writer.apply(self._worker, some)
                done = True
            finally:
                if not done and not self._renew:
                    self._pending[:0] = ops  # told again: idempotent and in order
                    self._pending_blocks += blocks

    async def _write_size(self) -> None:
        size = self.ledger.block_size_tokens
        if size is not None and size != self._told_size and self._worker is not None:
            await self._writer.learnt(self._worker, size)
            self._told_size = size

    # -- snapshots --------------------------------------------------------------------------------------------

    async def _restore(self, snapshots: SnapshotStore) -> None:
        try:
            blob = await snapshots.load(self.address)
        except IndexUnavailable:
            return
        found = await asyncio.to_thread(unpack, blob) if blob else None
        if found is not None and self.ledger.restore(found):
            self._snapshot_seq = self.ledger.last_seq
            self._observer.count("snapshots_restored")

    async def _keep_snapshots(self, snapshots: SnapshotStore) -> None:
        """Every 10 s, if there is something new and this indexer owns the worker."""
        while True:
            await asyncio.sleep(self._limits.snapshot_every_s)
            taken = None if self._renew or self.ledger.last_seq == self._snapshot_seq else self.ledger.snapshot()
            if taken is None:
                continue
            try:
                await snapshots.save(self.address, await asyncio.to_thread(pack, taken))
            except IndexUnavailable:
                self._observer.count("snapshots_failed")
            else:
                self._snapshot_seq = taken.last_seq
                self._observer.count("snapshots")

    def status(self) -> dict[str, Any]:
        """For /debug/pods."""
        now_s, ledger, facts = self._clock(), self.ledger, self.ledger.facts
        return {
            "events_endpoint": self.source.spec.events,
            "replay_endpoint": self.source.spec.replay,
            "model": self.source.spec.model,
            "connected": self.source.connected,
            "blocks": dict(ledger.claimed),
            "block_size_tokens": ledger.block_size_tokens,
            "last_seq": ledger.last_seq if ledger.last_seq >= 0 else None,
            "event_age_s": None if self.last_event_s is None else round(now_s - self.last_event_s, 3),
            "history_whole": ledger.whole,
            "queued_messages": len(self._inbox),
            "dropped_messages": self._inbox.dropped_messages,
            "unwritten_blocks": self._pending_blocks,
            "store_behind": self._renew,
            "connections": self.source.connections,
            "replays": self.replays,
            "last_replay": self.last_replay,
            "ledger_bytes": ledger.bytes_used,
            "last_error": self.source.last_error or self.last_error,
            **{name: getattr(facts, name) for name in facts.__struct_fields__},
        }


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _chunks(keys: list[BlockKey], n: int) -> Iterator[list[BlockKey]]:
    return (keys[i : i + n] for i in range(0, len(keys), n))


def _slices(ops: list[IndexOp], max_blocks: int) -> Iterator[list[IndexOp]]:
    """Calls of at most `max_blocks` blocks each, in order."""
    some: list[IndexOp] = []
    room = max_blocks
    for op in ops:
        if isinstance(op, Clear):
            some.append(op)
            continue
        for start in range(0, len(op.keys), max_blocks):
            part = op.keys[start : start + max_blocks]
            if len(part) > room:
                yield some
                some, room = [], max_blocks
            some.append(type(op)(part, op.tier))
            room -= len(part)
    if some:
        yield some
