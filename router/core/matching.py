"""Who holds how much: bitmaps of slots per block in, depth in blocks per slot out. Pure.

One semantics everywhere: a match starts at block 0 and ends at the first gap.
May import: the standard library.
"""

from collections.abc import Iterable


def depths(bitmaps: Iterable[int], live_mask: int) -> dict[int, int]:
    """Depth in blocks per slot that holds at least the first block.

    `bitmaps[i]` has bit s set when slot s holds block i; only slots in `live_mask` count. Slots that hold nothing
    are absent. Costs one AND a block, and a step per slot only where a slot drops out.
    """
    alive = live_mask
    found: dict[int, int] = {}
    depth = 0
    for bitmap in bitmaps:
        still = alive & bitmap
        if still != alive:
            if depth:
                for slot in slots_of(alive & ~still):
                    found[slot] = depth
            alive = still
            if not alive:
                return found
        depth += 1
    if depth:
        for slot in slots_of(alive):
            found[slot] = depth
    return found


def slots_of(bitmap: int) -> Iterable[int]:
    """The numbers of the bits that are set, lowest first."""
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low
