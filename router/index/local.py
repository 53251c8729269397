"""What this router routed lately, and the hot heads of chains it looked up lately.

LocalView bridges the time until a worker's events arrive (bursts of siblings), serves pods without events, and is all
there is while the index is away. A removal that the worker reports takes the memory away at once.
May import: the standard library, router.core.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice, repeat
from weakref import WeakSet

from router.core.types import BlockKey, Clock, WorkerAddress


class Note:
    """A chain that was sent somewhere and may yet turn out not to have been computed. Forgotten with its request."""

    __slots__ = ("__weakref__", "address", "end_s", "keys", "known")

    def __init__(self, address: WorkerAddress, keys: Sequence[BlockKey], known: int, end_s: float) -> None:
        self.address, self.keys = address, keys
        self.known = known  # its first blocks, predicted by somebody else already: they stay whatever becomes of it
        self.end_s = end_s


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
        self._open: dict[WorkerAddress, WeakSet[Note]] = {}  # neither settled nor unsaid; requests in flight hold them

    def note(self, address: WorkerAddress, keys: Sequence[BlockKey], *, ttl_s: float | None = None) -> Note:
        """This chain, from its block 0, was just sent there. The last word counts: a shorter ttl shortens."""
        now_s = self._clock()
        end_s = now_s + (self._ttl_s if ttl_s is None else ttl_s)
        noted = Note(address, keys, self.depth(address, keys), end_s)
        self._until(address, keys, end_s, now_s)
        self._open.setdefault(address, WeakSet()).add(noted)
        return noted

    def heard(self, address: WorkerAddress, keys: Sequence[BlockKey], *, ttl_s: float) -> None:
        """Another router sent this chain there. Ends only move away: our own notes know better."""
        now_s = self._clock()
        end_s, ends = now_s + ttl_s, self._ends.get(address, {})
        later = [k for k in keys if ends.get(k, 0.0) < end_s]
        if later:
            self._until(address, later, end_s, now_s)

    def settle(self, note: Note, *, ttl_s: float, revive: bool = False) -> None:
        """It was computed: another end for what was noted, not a new use of it.

        What was removed meanwhile stays removed, unless `revive`: nobody reports removals, so it can only be pruned.
        """
        self._close(note)
        now_s, ends = self._clock(), self._ends.get(note.address, {})
        known = note.keys if revive else [k for k in note.keys if k in ends]
        if known:
            self._until(note.address, known, now_s + ttl_s, now_s)

    def unsay(self, note: Note) -> None:
        """It was not computed after all. What other requests noted too stays, and is theirs to unsay."""
        self._close(note)
        ends, shared, heir = self._ends.get(note.address, {}), 0, note
        for other in self._open.get(note.address, ()):
            alike = _shared(note.keys, other.keys)
            if alike > note.known:
                other.known = min(other.known, note.known)
            if alike > shared:
                shared, heir = alike, other
        for i, key in enumerate(note.keys):
            if ends.get(key) == note.end_s:  # nobody has had a later word about it
                if i < shared:
                    ends[key] = heir.end_s
                elif i >= note.known:
                    del ends[key]

    def _close(self, note: Note) -> None:
        if (notes := self._open.get(note.address)) is not None:
            notes.discard(note)
            if not notes:
                del self._open[note.address]

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


def _shared(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """How many blocks two chains begin with alike: a key names its whole prefix, so equal once is equal before."""
    if not one or not other or one[0] != other[0]:
        return 0
    return bisect_left(range(min(len(one), len(other))), True, key=lambda i: one[i] != other[i])


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
