"""What this router routed lately, and the hot heads of chains it looked up lately.

LocalView bridges the time until a worker's events arrive (bursts of siblings), serves pods without events, and is all
there is while the index is away. A removal that the worker reports takes the memory away at once.
May import: the standard library, router.core.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import islice, repeat

from router.core.types import BlockKey, Clock, WorkerAddress


class LocalView:
    """Chains of keys per worker, each with an end. Bounded by `max_blocks` over all workers."""

    def __init__(
        self,
        *,
        ttl_s: float = 10.0,
        max_blocks: int = 400_000,
        clock: Clock = time.monotonic,
    ) -> None:
        self._ttl_s, self._max_blocks, self._clock = ttl_s, max_blocks, clock
        self._ends: dict[WorkerAddress, dict[BlockKey, float]] = {}  # key -> when it stops counting
        self._prune_at: dict[WorkerAddress, int] = {}

    def note(self, address: WorkerAddress, keys: Sequence[BlockKey], *, ttl_s: float | None = None) -> float:
        """This chain, from its block 0, was just sent there. The last word counts: a shorter ttl shortens.

        Returns its end, by which `unsay` knows it.
        """
        now_s = self._clock()
        end_s = now_s + (self._ttl_s if ttl_s is None else ttl_s)
        self._until(address, keys, end_s, now_s)
        return end_s

    def heard(self, address: WorkerAddress, keys: Sequence[BlockKey], *, ttl_s: float) -> None:
        """Another router sent this chain there. Ends only move away: our own notes know better."""
        now_s = self._clock()
        end_s, ends = now_s + ttl_s, self._ends.get(address, {})
        later = [k for k in keys if ends.get(k, 0.0) < end_s]
        if later:
            self._until(address, later, end_s, now_s)

    def settle(self, address: WorkerAddress, keys: Sequence[BlockKey], *, ttl_s: float, revive: bool = False) -> None:
        """Another end for what was noted before: not a new use of it.

        What was removed meanwhile stays removed, unless `revive`: nobody reports removals, so it can only be pruned.
        """
        now_s, ends = self._clock(), self._ends.get(address, {})
        known = keys if revive else [k for k in keys if k in ends]
        if known:
            self._until(address, known, now_s + ttl_s, now_s)

    def unsay(self, address: WorkerAddress, keys: Iterable[BlockKey], end_s: float) -> None:
        """These blocks were not computed after all; what another request noted since stays."""
        ends = self._ends.get(address, {})
        for key in keys:
            if ends.get(key) == end_s:
                del ends[key]

    def _until(self, address: WorkerAddress, keys: Sequence[BlockKey], end_s: float, now_s: float) -> None:
        ends = self._ends.setdefault(address, {})
        ends.update(dict.fromkeys(keys, end_s))
        if len(ends) > self._prune_at.get(address, 8192):
            self._prune(address, now_s)

    def holders(self, keys: Sequence[BlockKey]) -> dict[WorkerAddress, int]:
        """Depth in blocks per worker, without holes; workers with nothing are absent."""
        if not keys:
            return {}
        now_s, first = self._clock(), keys[0]
        return {a: _depth(ends, keys, now_s) for a, ends in self._ends.items() if ends.get(first, now_s) > now_s}

    def depth(self, address: WorkerAddress, keys: Sequence[BlockKey]) -> int:
        """The same for one worker."""
        ends = self._ends.get(address)
        return _depth(ends, keys, self._clock()) if ends else 0

    def forget(self, address: WorkerAddress, keys: Iterable[BlockKey] | None = None) -> None:
        """These blocks are not there (any longer); None: nothing is."""
        if keys is None:
            self._ends.pop(address, None)
            self._prune_at.pop(address, None)
            return
        ends = self._ends.get(address)
        if ends:
            for key in keys:
                ends.pop(key, None)

    def removed(self, address: WorkerAddress, keys: Sequence[BlockKey]) -> None:
        """See RemovalListener."""
        self.forget(address, keys)

    def cleared(self, address: WorkerAddress) -> None:
        """See RemovalListener."""
        self.forget(address)

    @property
    def blocks(self) -> int:
        """Entries kept, ended ones that are not pruned yet included."""
        return sum(map(len, self._ends.values()))

    def _prune(self, address: WorkerAddress, now_s: float) -> None:
        ends = self._ends[address] = {k: end for k, end in self._ends[address].items() if end > now_s}
        while self.blocks > self._max_blocks:
            biggest = max(self._ends, key=lambda a: len(self._ends[a]))
            there = self._ends[biggest]
            self._ends[biggest] = dict(islice(there.items(), len(there) // 2 + 1, None))  # the older half goes
        ends = self._ends[address]
        self._prune_at[address] = max(8192, 2 * len(ends))


def _depth(ends: dict[BlockKey, float], keys: Sequence[BlockKey], now_s: float) -> int:
    """Gallop to a bound, then look at every block below it: the cost follows this worker's depth, not the prompt's."""
    get = ends.get
    bound = 1
    while bound < len(keys) and get(keys[bound - 1], 0.0) > now_s:
        bound *= 2
    found = list(map(get, keys[:bound], repeat(0.0)))
    if min(found) > now_s:
        return len(found)
    return next(i for i, end in enumerate(found) if end <= now_s)
