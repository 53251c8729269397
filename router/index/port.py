"""The port between routing and whatever keeps the index. Two stores implement it: memory.py and redis.py.

One suite (tests/ports/test_index.py) runs over both. May import: router.core.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Literal, Protocol, runtime_checkable

import msgspec

from router.core.types import BlockKey, IndexOp, WorkerAddress, WorkerId


class Held(msgspec.Struct, frozen=True):
    """How far one worker's cache covers a chain of keys, in blocks from block 0, without holes.

    `gpu` <= `cpu` <= `storage`: each tier counts a block that is there or in a faster tier.
    """

    gpu: int
    cpu: int
    storage: int


class SlotLost(Exception):
    """The store does not know this life of the worker (any longer).

    `unregistered`: register it and write everything again. `not_owner`: another indexer owns the worker now.
    """

    def __init__(self, reason: Literal["unregistered", "not_owner"]) -> None:
        super().__init__(reason)
        self.reason = reason


class RemovalListener(Protocol):
    """Whoever remembers blocks on his own account and must hear when a worker says that they are gone."""

    def removed(self, address: WorkerAddress, keys: Sequence[BlockKey]) -> None:
        """These left the worker's GPU cache."""
        ...

    def cleared(self, address: WorkerAddress) -> None:
        """Nothing that this worker held counts any longer: cleared, restarted or gone."""
        ...


@runtime_checkable
class SnapshotStore(Protocol):
    """Where the indexer's own memory is kept over its restarts."""

    async def save(self, address: WorkerAddress, blob: bytes) -> None:
        """Replace the worker's snapshot. Raises IndexUnavailable."""
        ...

    async def load(self, address: WorkerAddress) -> bytes | None:
        """The worker's snapshot, if there is one. Raises IndexUnavailable."""
        ...


@runtime_checkable
class ImmediateWriter(Protocol):
    """A store that is written without waiting: what it was told is found by the next lookup."""

    def apply_now(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        """As IndexWriter.apply."""
        ...


class IndexReader(Protocol):
    """What the router asks."""

    async def holders(self, keys: Sequence[BlockKey]) -> Mapping[WorkerAddress, Held]:
        """Depth per live worker; workers that hold nothing of it are absent.

        Raises IndexUnavailable when no answer can be had within the reader's deadline.
        """
        ...


class IndexWriter(Protocol):
    """What the indexer tells. One owner per worker; operations are idempotent and applied in order."""

    async def start(self) -> None:
        """Begin; never fails because the store is away."""
        ...

    async def close(self) -> None:
        """Give back connections and ownership."""
        ...

    async def register(self, worker: WorkerId) -> None:
        """Give this life of the worker a fresh slot; whatever an earlier life of the address held is masked at once.

        Raises IndexUnavailable, or SlotLost("not_owner").
        """
        ...

    async def apply(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        """Apply in order. Raises IndexUnavailable when the store cannot be written; nothing is lost: apply again.

        Raises SlotLost when the store does not know this life of the worker.
        """
        ...

    async def drop(self, address: WorkerAddress) -> None:
        """The worker is gone: masked at once, its bits swept later. Never scans."""
        ...

    async def learnt(self, worker: WorkerId, block_size_tokens: int) -> None:
        """The worker's block size, so that routers know it too."""
        ...

    async def maintain(self) -> bool:
        """A bounded piece of housekeeping (sweeping). True while there is more to do."""
        ...

    def lost(self) -> Set[WorkerAddress]:
        """Workers whose life the store forgot, or whom another owner has, since this was last asked."""
        ...


def held_by_address(
    walks: Sequence[Mapping[int, int]], names: Mapping[int, WorkerAddress]
) -> dict[WorkerAddress, Held]:
    """Depths per slot for gpu, gpu or cpu, and all tiers -> Held per worker. A slot without a name is not live."""
    gpu, cpu, storage = walks
    if storage is gpu:  # only the GPU tier is in use
        return {names[s]: Held(d, d, d) for s, d in gpu.items() if s in names}
    return {names[s]: Held(gpu.get(s, 0), cpu.get(s, 0), d) for s, d in storage.items() if s in names}
