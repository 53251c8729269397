"""Tokens in, chain of block keys out. Pure.

Router and indexer must agree on every byte of this file: a difference of one bit is a fleet with
no cache hits and no error. tests/golden/block_keys.json pins it.

    root  = H(fields: seed, base model id, LoRA name, cache salt)   each field: uint32 LE length + UTF-8 bytes
    key_0 = H(root  + tokens_0)                                     tokens: uint32 LE each, full blocks only
    key_i = H(key_{i-1} + tokens_i)
    H     = xxh3-64, 8 bytes, big-endian (xxHash canonical form)

An absent LoRA name or salt has length 0xffffffff, so that absent and empty differ.
May import: the standard library, xxhash and router.core.
"""

import struct
import sys
from array import array
from collections.abc import Iterable

import xxhash

from router.core.types import BlockKey

_H = xxhash.xxh3_64_digest
_ABSENT = struct.pack("<I", 0xFFFFFFFF)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as uint32 little-endian bytes. Raises OverflowError for an id outside 0 .. 2^32-1."""
    packed = array("I", tokens)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def root_key(*, seed: str, model: str, lora_name: str | None = None, cache_salt: str | None = None) -> BlockKey:
    """The parent of a chain's first block.

    `model` is the pod's base model id (`root` in /v1/models) under whatever name it is served; `seed` is the
    installation's secret, so that nobody can craft collisions or probe what others have cached.
    """
    fields = (seed, model, lora_name, cache_salt)
    return BlockKey(_H(b"".join(_ABSENT if f is None else _field(f) for f in fields)))


def _field(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(raw)) + raw


def chain_keys(parent: BlockKey, packed_tokens: bytes | memoryview, block_size_tokens: int) -> list[BlockKey]:
    """One key per full block of `packed_tokens` (see `pack_tokens`), continuing the chain after `parent`.

    The tail that does not fill a block has no key. Raises ValueError for a block size below 1.
    """
    if block_size_tokens < 1:
        raise ValueError(f"block size is {block_size_tokens}; it must be at least 1 token")
    step = 4 * block_size_tokens
    view = bytes(packed_tokens)
    key: bytes = parent
    keys: list[BlockKey] = []
    append = keys.append
    for start in range(0, len(view) - step + 1, step):
        key = _H(key + view[start : start + step])
        append(BlockKey(key))
    return keys


def next_key(parent: BlockKey, packed_block: bytes) -> BlockKey:
    """The key of one full block whose predecessor's key is `parent`."""
    return BlockKey(_H(parent + packed_block))


def usable_blocks(prompt_tokens: int, block_size_tokens: int) -> int:
    """How many blocks of a prompt an engine can take from its cache: at most prompt - 1 tokens.

    vLLM always computes the last token (v1/core/kv_cache_manager.py, get_computed_blocks).
    """
    return max(prompt_tokens - 1, 0) // block_size_tokens
