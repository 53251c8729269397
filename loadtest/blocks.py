"""A pod's KV blocks: reference counts, the table of hashes, and eviction as vLLM's block pool does it. Pure.

Free blocks stay in the table until they are allocated again; unhashed ones are reused first. A hash may have
several copies. May import: the standard library, msgspec.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

import msgspec


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that became full in one step, a run of one request's chain. Hashes are the engine's own."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]  # empty for synthetic requests
    block_size_tokens: int
    lora_name: str | None = None
    cache_salt: str | None = None  # only when the run begins at token 0


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One copy of a block was evicted."""

    hash: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The whole cache was forgotten."""


Event = Stored | Removed | Cleared


class BlockPool:
    """Block ids 1 .. num_blocks - 1 (0 is vLLM's null block). Evictions are appended to `events`."""

    def __init__(self, num_blocks: int, events: list[Event]) -> None:
        self.events = events
        self.usable_blocks = num_blocks - 1
        self.refs = [0] * num_blocks
        self.hash_of: list[int | None] = [None] * num_blocks
        self.table: dict[int, int | dict[int, None]] = {}  # hash -> block, or the blocks in order of storing
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    def match(self, hashes: Sequence[int], limit_blocks: int) -> list[int]:
        """The longest run of blocks from the chain's start that is in the table; the oldest copy of each."""
        found: list[int] = []
        for copies in map(self.table.get, hashes[:limit_blocks]):
            if copies is None:
                break
            found.append(copies if isinstance(copies, int) else next(iter(copies)))
        return found

    def depth(self, hashes: Sequence[int], limit_blocks: int) -> int:
        """How many blocks `match` would find, at a third of its cost."""
        return len(list(takewhile(self.table.__contains__, islice(hashes, limit_blocks))))

    def unreferenced(self, blocks: Iterable[int]) -> int:
        refs = self.refs
        return sum(1 for b in blocks if not refs[b])

    def touch(self, blocks: Iterable[int]) -> None:
        """Take a reference to each."""
        refs, free = self.refs, self.free
        for b in blocks:
            if not refs[b]:
                del free[b]
            refs[b] += 1

    def allocate(self, count: int) -> list[int]:
        """Blocks from the front of the free queue; what they held is evicted. The caller has checked the room."""
        taken: list[int] = []
        pop, hash_of, refs = self.free.popitem, self.hash_of, self.refs
        for _ in range(count):
            b = pop(last=False)[0]
            if hash_of[b] is not None:
                self._evict(b)
            refs[b] = 1
            taken.append(b)
        return taken

    def store(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Enter full blocks into the table; a hash that is there already gets another copy."""
        table, hash_of = self.table, self.hash_of
        for b, h in zip(blocks, hashes, strict=True):
            hash_of[b] = h
            copies = table.get(h)
            if copies is None:
                table[h] = b
            elif isinstance(copies, int):
                table[h] = {copies: None, b: None}
            else:
                copies[b] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each, tail first, so that a chain dies from its end; unhashed blocks go to the front."""
        refs, free, hash_of = self.refs, self.free, self.hash_of
        for b in reversed(blocks):
            refs[b] -= 1
            if not refs[b]:
                free[b] = None
                if hash_of[b] is None:
                    free.move_to_end(b, last=False)

    def clear(self) -> bool:
        """Forget every hash; False, and nothing done, while any block is held."""
        if len(self.free) != self.usable_blocks:
            return False
        self.table.clear()
        self.hash_of = [None] * len(self.hash_of)
        self.events.append(Cleared())
        return True

    def _evict(self, block: int) -> None:
        h = self.hash_of[block]
        assert h is not None
        copies = self.table[h]
        if isinstance(copies, int):
            del self.table[h]
        else:
            del copies[block]
            if not copies:
                del self.table[h]
        self.hash_of[block] = None
        self.events.append(Removed(h))
