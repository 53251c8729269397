"""The index in this process's memory: reader and writer in one. For one router without Redis.

A block's value is a bitmap of slots, an int. A dropped or cleared worker's slot is masked at once; its bits are swept
out later, a few thousand blocks at a time, and only then is the slot given to somebody else.
May import: router.core, router.index.port.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from router.core.matching import depths
from router.core.types import TIERS, Add, BlockKey, Clear, IndexOp, Remove, Tier, WorkerAddress, WorkerId
from router.index.port import Held, RemovalListener, SlotLost, held_by_address

_SHARDS = 256  # by the key's first byte; keys are uniform
_SWEEP_BLOCKS = 1024  # looked at in one step, about 0.2 ms


class MemoryIndex:
    """IndexReader and IndexWriter over dicts. Not shared between threads or processes."""

    def __init__(self) -> None:
        self._tiers: dict[Tier, list[dict[BlockKey, int]]] = {t: [{} for _ in range(_SHARDS)] for t in TIERS}
        self._used: set[Tier] = {"gpu"}  # tiers that ever held a block
        self._slots: dict[WorkerAddress, int] = {}
        self._lives: dict[WorkerAddress, WorkerId] = {}
        self._names: dict[int, WorkerAddress] = {}
        self._live_mask = 0
        self._retired_mask = 0  # masked, and some blocks still have the bit
        self._sweeping_mask = 0
        self._sweep_at = 0
        self._sizes: dict[WorkerAddress, int] = {}
        self._listeners: list[RemovalListener] = []

    # -- reader -----------------------------------------------------------------------------------------------

    async def holders(self, keys: Sequence[BlockKey]) -> Mapping[WorkerAddress, Held]:
        """See IndexReader. Never raises."""
        return self.holders_now(keys)

    def holders_now(self, keys: Sequence[BlockKey]) -> dict[WorkerAddress, Held]:
        """The same without a coroutine."""
        if not self._live_mask or not keys:
            return {}
        walks: list[dict[int, int]] = []
        bitmaps: Callable[[], Iterable[int]] | None = None
        for tier in TIERS:
            if tier not in self._used:
                walks.append(walks[-1])
                continue
            bitmaps = _or(bitmaps, self._column(tier, keys))
            walks.append(depths(bitmaps(), self._live_mask))
        return held_by_address(walks, self._names)

    def _column(self, tier: Tier, keys: Sequence[BlockKey]) -> Callable[[], Iterable[int]]:
        shards = self._tiers[tier]
        return lambda: (shards[k[0]].get(k, 0) for k in keys)

    def block_sizes(self) -> Mapping[WorkerAddress, int]:
        """Block size in tokens per worker, as learnt from events."""
        return self._sizes

    def listen(self, listener: RemovalListener) -> None:
        """Tell this listener of every removal and clear from now on."""
        self._listeners.append(listener)

    def status(self) -> dict[str, Any]:
        """For /debug/pods."""
        return {
            "store": "memory",
            "blocks": {t: sum(map(len, self._tiers[t])) for t in TIERS if t in self._used},
            "live_slots": self._live_mask.bit_count(),
            "retired_slots": (self._retired_mask | self._sweeping_mask).bit_count(),
        }

    # -- writer -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def register(self, worker: WorkerId) -> None:
        """See IndexWriter."""
        self._retire(worker.address)
        self._new_slot(worker)

    async def apply(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        """See IndexWriter. Raises SlotLost when this life of the worker is not the registered one."""
        self.apply_now(worker, ops)

    def apply_now(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        """The same without a coroutine."""
        if self._lives.get(worker.address) != worker:
            raise SlotLost("unregistered")
        for op in ops:
            if isinstance(op, Clear):
                self._retire(worker.address)
                self._new_slot(worker)
            elif isinstance(op, Add):
                self._add(self._slots[worker.address], op)
            else:
                self._remove(worker.address, op)

    async def drop(self, address: WorkerAddress) -> None:
        """See IndexWriter."""
        self._retire(address)
        self._lives.pop(address, None)
        self._sizes.pop(address, None)

    async def learnt(self, worker: WorkerId, block_size_tokens: int) -> None:
        """The worker's block size, as its events say."""
        self._sizes[worker.address] = block_size_tokens

    async def maintain(self) -> bool:
        """Sweep a few thousand blocks for retired slots. True while there is more to do."""
        if not self._sweeping_mask:
            if not self._retired_mask:
                return False
            self._sweeping_mask, self._retired_mask, self._sweep_at = self._retired_mask, 0, 0
        seen = 0
        while self._sweeping_mask and seen < _SWEEP_BLOCKS:
            seen += self._sweep_shard(self._sweep_at, self._sweeping_mask)
            self._sweep_at += 1
            if self._sweep_at == _SHARDS:
                self._sweeping_mask = 0  # nobody has these bits any longer: the slots are free
        return bool(self._sweeping_mask or self._retired_mask)

    def lost(self) -> frozenset[WorkerAddress]:
        """Memory loses nothing."""
        return frozenset()

    def _sweep_shard(self, at: int, dead: int) -> int:
        seen = 0
        for tier in self._used:
            shard = self._tiers[tier][at]
            seen += len(shard)
            for key in [k for k, bitmap in shard.items() if bitmap & dead]:
                _store(shard, key, shard[key] & ~dead)
        return seen

    # -- inside -----------------------------------------------------------------------------------------------

    def _new_slot(self, worker: WorkerId) -> None:
        taken = self._live_mask | self._retired_mask | self._sweeping_mask
        slot = (~taken & (taken + 1)).bit_length() - 1  # the lowest free one
        self._slots[worker.address] = slot
        self._names[slot] = worker.address
        self._lives[worker.address] = worker
        self._live_mask |= 1 << slot

    def _retire(self, address: WorkerAddress) -> None:
        slot = self._slots.pop(address, None)
        if slot is None:
            return
        del self._names[slot]
        self._live_mask &= ~(1 << slot)
        self._retired_mask |= 1 << slot
        for listener in self._listeners:
            listener.cleared(address)

    def _add(self, slot: int, op: Add) -> None:
        bit = 1 << slot
        self._used.add(op.tier)
        shards = self._tiers[op.tier]
        for key in op.keys:
            shard = shards[key[0]]
            shard[key] = shard.get(key, 0) | bit

    def _remove(self, address: WorkerAddress, op: Remove) -> None:
        mask = ~(1 << self._slots[address])
        shards = self._tiers[op.tier]
        for key in op.keys:
            shard = shards[key[0]]
            bitmap = shard.get(key)
            if bitmap is not None:
                _store(shard, key, bitmap & mask)
        if op.tier == "gpu":
            for listener in self._listeners:
                listener.removed(address, op.keys)


def _store(shard: dict[BlockKey, int], key: BlockKey, bitmap: int) -> None:
    if bitmap:
        shard[key] = bitmap
    else:
        del shard[key]


def _or(one: Callable[[], Iterable[int]] | None, other: Callable[[], Iterable[int]]) -> Callable[[], Iterable[int]]:
    if one is None:
        return other
    return lambda: map(int.__or__, one(), other())
