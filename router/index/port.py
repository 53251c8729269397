"""The port between routing and whatever keeps the index. Two stores implement it: memory.py and redis.py.

One suite (tests/ports/test_index.py) runs over both. May import: router.core.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from router.core.types import BlockKey, IndexOp, WorkerAddress, WorkerId


class Held(msgspec.Struct, frozen=True):
    """How far one worker's cache covers a chain of keys, in blocks from block 0, without holes.

    `gpu` <= `cpu` <= `storage`: each tier counts a block that is there or in a faster tier.
    """

    gpu: int
    cpu: int
    storage: int


class IndexReader(Protocol):
    """What the router asks."""

    async def holders(self, keys: Sequence[BlockKey]) -> Mapping[WorkerAddress, Held]:
        """Depth per live worker; workers that hold nothing of it are absent.

        Raises IndexUnavailable when no answer can be had within the reader's deadline.
        """
        ...


class IndexWriter(Protocol):
    """What the indexer tells. One owner per worker; operations are idempotent and applied in order."""

    async def register(self, worker: WorkerId) -> None:
        """Give this life of the worker a fresh slot; whatever an earlier life of the address held is masked at once."""
        ...

    async def apply(self, worker: WorkerId, ops: Sequence[IndexOp]) -> None:
        """Apply in order. Raises IndexUnavailable when the store cannot be written; nothing is lost: apply again."""
        ...

    async def drop(self, address: WorkerAddress) -> None:
        """The worker is gone: masked at once, its bits swept later. Never scans."""
        ...
