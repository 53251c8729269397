"""Bitmaps of blocks that were looked up twice within a moment: the heads of hot chains, kept for about a second.

Takes system prompts off Redis. Absent blocks are not kept; removals take entries away as they are heard of, and while
nothing can be heard (no feed), nothing is kept. May import: router.core.
"""

from collections.abc import Iterable, Sequence

from router.core.types import BlockKey, Clock, Tier

MAX_BLOCKS = 100_000


class NearCache:
    """Two generations: an entry lives between one and two times half of `life_s`."""

    def __init__(self, life_s: float, clock: Clock) -> None:
        self._half_s, self._clock = life_s / 2, clock
        self._on = False
        self._young: dict[BlockKey, int] = {}
        self._old: dict[BlockKey, int] = {}
        self._seen: set[BlockKey] = set()
        self._seen_before: set[BlockKey] = set()
        self._turned_s = clock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def enable(self) -> None:
        """Removals are heard from now on."""
        self._on = self._half_s > 0

    def disable(self) -> None:
        """Removals are not heard: keep nothing."""
        self._on = False
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._young, self._old, self._seen, self._seen_before = {}, {}, set(), set()

    def head(self, tier: Tier, keys: Sequence[BlockKey]) -> list[int]:
        """The bitmaps of the chain's first blocks as far as they are known here."""
        if not self._on or tier != "gpu":
            return []
        self._turn()
        young, old = self._young, self._old
        found: list[int] = []
        for key in keys:
            bitmap = young.get(key) or old.get(key)
            if bitmap is None:
                break
            found.append(bitmap)
        return found

    def saw(self, keys: Sequence[BlockKey], bitmaps: Sequence[int]) -> None:
        """What a lookup found. Kept from the second time on."""
        if not self._on:
            return
        young, seen, before = self._young, self._seen, self._seen_before
        for key, bitmap in zip(keys, bitmaps, strict=True):
            if not bitmap:
                break
            if key in seen or key in before:
                young[key] = bitmap
            else:
                seen.add(key)
        if len(young) + len(seen) > MAX_BLOCKS:
            self._turned_s = float("-inf")
            self._turn()

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """A worker lost these."""
        young, old = self._young, self._old
        if young or old:
            for key in keys:
                young.pop(key, None)
                old.pop(key, None)

    def _turn(self) -> None:
        now_s = self._clock()
        if now_s - self._turned_s < self._half_s:
            return
        far = now_s - self._turned_s >= 2 * self._half_s
        self._old, self._young = ({} if far else self._young), {}
        self._seen_before, self._seen = (set() if far else self._seen), set()
        self._turned_s = now_s
