"""What besides its tokens decides a block's content: tier, adapter, salt, media. Pure.

Extra keys in events are untagged (the adapter's name, a salt, a media item's id and offset); the adapter's name tells
the first two apart. What our keys cannot name must not be taken for plain text. May import: indexer.wire, router.core.
"""

from collections.abc import Sequence
from typing import Any

from indexer.wire import Stored
from router.core.types import Tier


def tier_of(medium: str | None) -> Tier:
    """vLLM's `medium`: absent or GPU is the GPU, CPU the host's memory, anything else storage."""
    if medium is None or medium[:3].upper() == "GPU":
        return "gpu"
    return "cpu" if medium[:3].upper() == "CPU" else "storage"


def _extras(e: Stored, i: int) -> list[Any]:
    """Block i's extra keys without the adapter's name and without the tokens that follow the block (lookahead)."""
    keys = e.extra_keys[i] if e.extra_keys is not None and i < len(e.extra_keys) else None
    extras = list(keys) if isinstance(keys, Sequence) and not isinstance(keys, str | bytes) else [keys]
    if e.lookahead:
        extras = [x for x in extras if type(x) is not int]
    extras = [x for x in extras if x is not None]
    if e.lora_name is not None:
        for at, x in enumerate(extras):
            if x == e.lora_name or _tag(x) == "lora":  # the first one: a salt may look alike
                del extras[at]
                break
    return extras


def _tag(x: object) -> object:
    return x[0] if isinstance(x, list | tuple) and len(x) > 1 and isinstance(x[1], str) else None


def salt_of(e: Stored) -> str | None:
    """The cache salt: the one text among the first block's extra keys."""
    extras = _extras(e, 0) if e.hashes else []
    if len(extras) == 1:
        x = extras[0]
        if isinstance(x, str):
            return x
        if _tag(x) == "cache_salt":
            return str(x[1])
    return None


def is_plain(e: Stored, i: int) -> bool:
    """Is block i's content named by its tokens, adapter and salt alone?"""
    extras = _extras(e, i)
    return not extras or (i == 0 and e.parent is None and salt_of(e) is not None)
