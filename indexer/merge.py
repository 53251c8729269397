"""The same outcome in fewer index operations. Pure. May import: router.core."""

from collections.abc import Iterable

from router.core.types import TIERS, Add, BlockKey, Clear, IndexOp, Remove, Tier


def merged(ops: Iterable[IndexOp]) -> list[IndexOp]:
    """The same outcome in fewer operations: per tier and key the last word counts; a Clear voids what came before."""
    cleared = False
    last: dict[Tier, dict[BlockKey, bool]] = {tier: {} for tier in TIERS}
    for op in ops:
        if isinstance(op, Clear):
            cleared = True
            for words in last.values():
                words.clear()
        else:
            words, is_add = last[op.tier], isinstance(op, Add)
            for key in op.keys:
                words[key] = is_add
    out: list[IndexOp] = [Clear()] if cleared else []
    for tier, words in last.items():
        removes = tuple(k for k, add in words.items() if not add)
        adds = tuple(k for k, add in words.items() if add)
        out += [Remove(removes, tier)] if removes and not cleared else []
        out += [Add(adds, tier)] if adds else []
    return out
