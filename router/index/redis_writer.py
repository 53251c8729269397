"""The index in Redis or Valkey, as the one owner of each worker writes it. The schema is in lua.py.

A worker's life in the registry names slot and incarnation; every write compares it, so a former owner's late batch
changes nothing. May import: router.core, router.index, router.ops.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from router.core.types import Add, Clear, Clock, IndexOp, IndexUnavailable, WorkerAddress, WorkerId
from router.index import lua
from router.index.link import Link, Script
from router.index.port import SlotLost

_REGISTER, _APPLY, _DROP, _LEARNT, _RENEW, _RELEASE = map(
    Script, (lua.REGISTER, lua.APPLY, lua.DROP, lua.LEARNT, lua.RENEW, lua.RELEASE)
)
_SWEEP_BEGIN, _SWEEP_STEP, _SWEEP_END = map(Script, (lua.SWEEP_BEGIN, lua.SWEEP_STEP, lua.SWEEP_END))

LEASE_S = 3.0
RENEW_EVERY_S = 0.5
COOL_S = 3.0  # registry refresh (0.25 s) + near cache (1 s) + room
_SWEEP_COUNT = 100  # looked at in one step, about 0.2 ms of the server


class RedisIndexWriter:
    """IndexWriter over Redis for one indexer process. `owner` tells two indexers apart."""

    def __init__(
        self,
        url: str,
        *,
        seed: str,
        owner: str | None = None,
        deadline_s: float = 2.0,
        lease_s: float = LEASE_S,
        cool_s: float = COOL_S,
        max_connections: int = 4,
        clock: Clock = time.monotonic,
        mint: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        self._link = Link(url, max_connections=max_connections)
        self._fp = lua.fingerprint(seed)
        self._keys = [f"warmroute:{lua.SCHEMA}:{self._fp}:{x}".encode() for x in ("reg", "ver", "feed")]
        self.owner = owner or secrets.token_hex(6)
        self._deadline_s, self._lease_ms, self._cool_ms = deadline_s, round(1000 * lease_s), round(1000 * cool_s)
        self._mint, self._clock, self._renewed_s = mint, clock, -math.inf
        self._lives: dict[WorkerAddress, _Life] = {}
        self._lost: set[WorkerAddress] = set()
        self._sweep: _Sweep | None = None
        self.swept_blocks = 0

    async def start(self) -> None:
        """Nothing is asked of Redis before it is needed."""

    async def close(self) -> None:
        """Give ownership back and disconnect."""
        if self._lives:
            with contextlib.suppress(IndexUnavailable):  # otherwise the lease ends by itself
                await self._run(_RELEASE, self.owner, *map(str, self._lives))
            self._lives.clear()
        await self._link.close()

    async def register(self, worker: WorkerId) -> None:
        """See IndexWriter."""
        self._lives.pop(worker.address, None)
        self._lost.discard(worker.address)
        reply = await self._run(
            _REGISTER, str(worker.address), self.owner, self._lease_ms, worker.incarnation, self._mint(), lua.MAX_SLOTS
        )
        word = _text(reply[0])
        if word == "not_owner":
            raise SlotLost("not_owner")
        if word != "ok":
            raise IndexUnavailable("reply")  # no slot is free until a sweep has been through
        epoch, slot = _text(reply[1]), int(reply[2])
        self._lives[worker.address] = _Life(worker, epoch, slot, lua.block_prefixes(self._fp, epoch))

    async def apply(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        """See IndexWriter. A Clear inside is a new slot."""
        start = 0
        for i, op in enumerate(ops):
            if isinstance(op, Clear):
                await self._apply(worker, ops[start:i])
                start = i + 1
                self._life(worker)
                await self.register(worker)
        await self._apply(worker, ops[start:])

    async def _apply(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        life = self._life(worker)
        if not ops:
            return
        args: list[bytes | str | int] = []
        tiers: set[str] = set()
        for op in ops:
            assert not isinstance(op, Clear)
            args += ("+" if isinstance(op, Add) else "-", life.prefixes[op.tier], b"".join(op.keys))
            if op.tier not in life.told_tiers:
                tiers.add(op.tier)
        word = await self._run(
            _APPLY,
            str(worker.address),
            life.name,
            life.epoch,
            ",".join(sorted(tiers)),
            life.slot ^ 7,
            life.prefixes["gpu"],
            *args,
        )
        if _text(word) != "ok":
            raise SlotLost("unregistered")
        life.told_tiers |= tiers

    async def drop(self, address: WorkerAddress) -> None:
        """See IndexWriter."""
        self._lives.pop(address, None)
        self._lost.discard(address)
        await self._run(_DROP, str(address), self.owner)
        await self._link.call(("DEL", self._snapshot_name(address)), deadline_s=self._deadline_s)

    async def learnt(self, worker: WorkerId, block_size_tokens: int) -> None:
        """See IndexWriter."""
        life = self._life(worker)
        if _text(await self._run(_LEARNT, str(worker.address), life.name, block_size_tokens)) != "ok":
            raise SlotLost("unregistered")

    async def maintain(self) -> bool:
        """Prolong the leases, notice what Redis lost, sweep a little."""
        if self._lives and self._clock() - self._renewed_s >= RENEW_EVERY_S:
            self._renewed_s = self._clock()
            pairs = [x for a, life in list(self._lives.items()) for x in (str(a), life.name)]
            names = {str(a): a for a in self._lives}
            gone = await self._run(_RENEW, self.owner, self._lease_ms, *pairs)
            self._lost |= {names[_text(g)] for g in gone if _text(g) in names}
        return await self._sweep_a_little()

    async def save(self, address: WorkerAddress, blob: bytes) -> None:
        """See SnapshotStore. Kept for a day."""
        await self._link.call(("SET", self._snapshot_name(address), blob, "PX", 86_400_000), deadline_s=10.0)

    async def load(self, address: WorkerAddress) -> bytes | None:
        """See SnapshotStore."""
        blob = (await self._link.call(("GET", self._snapshot_name(address)), deadline_s=10.0))[0]
        return blob if isinstance(blob, bytes) else None

    def _snapshot_name(self, address: WorkerAddress) -> bytes:
        return f"warmroute:{lua.SCHEMA}:{self._fp}:snap:{address}".encode()

    def lost(self) -> set[WorkerAddress]:
        """Workers whose life the store forgot, or whom another owner has, since this was last asked."""
        lost, self._lost = self._lost, set()
        return lost

    async def _sweep_a_little(self) -> bool:
        if self._sweep is None:
            word, *rest = map(_text, await self._run(_SWEEP_BEGIN, self.owner, self._lease_ms, self._cool_ms))
            if word != "sweep":
                return False
            self._sweep = _Sweep(rest[0], rest[1:], list(lua.block_prefixes(self._fp, rest[0]).values()))
        sweep = self._sweep
        cursor, touched = await self._sweep_step(sweep)
        self.swept_blocks += touched
        sweep.cursor = cursor
        if cursor == "0":
            sweep.prefixes.pop()
        if cursor == "other" or not sweep.prefixes:
            self._sweep = None
            if cursor != "other":
                await self._run(_SWEEP_END, self.owner, sweep.epoch, *sweep.slots)
        return self._sweep is not None

    async def _sweep_step(self, sweep: _Sweep) -> tuple[str, int]:
        reply = await self._run(
            _SWEEP_STEP,
            self.owner,
            self._lease_ms,
            sweep.epoch,
            sweep.cursor,
            sweep.prefixes[-1],
            _SWEEP_COUNT,
            *(int(slot) ^ 7 for slot in sweep.slots),
        )
        return ("other", 0) if _text(reply[0]) == "other" else (_text(reply[0]), int(reply[1]))

    def _life(self, worker: WorkerId) -> _Life:
        life = self._lives.get(worker.address)
        if life is None or life.worker != worker:
            raise SlotLost("unregistered")
        return life

    async def _run(self, script: Script, *args: bytes | str | int) -> Any:
        return await self._link.run(script, self._keys, args, self._deadline_s)


class _Life:
    """What the registry said when this life was registered."""

    __slots__ = ("epoch", "name", "prefixes", "slot", "told_tiers", "worker")

    def __init__(self, worker: WorkerId, epoch: str, slot: int, prefixes: dict[Any, bytes]) -> None:
        self.worker, self.epoch, self.slot, self.prefixes = worker, epoch, slot, prefixes
        self.name = f"{slot}|{worker.incarnation}"
        self.told_tiers: set[str] = {"gpu"}


class _Sweep:
    """How far a sweep is."""

    __slots__ = ("cursor", "epoch", "prefixes", "slots")

    def __init__(self, epoch: str, slots: list[str], prefixes: list[bytes]) -> None:
        self.epoch, self.slots, self.prefixes, self.cursor = epoch, slots, prefixes, "0"


def _text(raw: bytes | str | int) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)
