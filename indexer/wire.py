"""Engine bytes in, events out: every shape that vLLM 0.10 to 0.33 sends. Pure.

`decode` is the door: whatever comes in, it returns a Batch or raises WireError and nothing else. Batches come as
arrays or maps, events as arrays (to 0.23) or maps (from 0.24), hashes as unsigned 64-bit integers or as 16 or 32 bytes.
Fields and event types that we do not know are tolerated, so that a new engine release does not stop the index.
May import: the standard library, msgspec, router.core.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from router.core.hashing import pack_tokens

PAYLOAD_MAX_BYTES = 64 << 20
_LOW64 = (1 << 64) - 1


class WireError(Exception):
    """This payload is not a batch of KV events that we understand. The message says what was wrong, without content."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The engine put these blocks of one chain into its cache."""

    hashes: tuple[int, ...]  # the engine's own names, low 64 bits
    parent: int | None  # None: the first of them starts at token 0
    tokens: bytes  # uint32 little-endian, as router.core.hashing.pack_tokens makes them
    block_size_tokens: int
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None  # per block: what else is in the engine's hash, untagged
    group: int | None = None
    kind: str | None = None
    lookahead: bool = False  # the hash also covers tokens after the block (0.33 with EAGLE or MTP)


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One copy of each of these is gone."""

    hashes: tuple[int, ...]
    medium: str | None = None
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The engine forgot its whole GPU cache."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """An event type of a later release; it is counted."""

    type: str


Event = Stored | Removed | Cleared | Unknown


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What one engine step published."""

    ts_s: float
    events: tuple[Event, ...]
    rank: int | None = None


_Hash = int | bytes


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    lookahead_token_ids: Any = None


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


_FAST = msgspec.msgpack.Decoder(tuple[float, list[_StoredMap | _RemovedMap | _ClearedMap], int | None])
_ANY = msgspec.msgpack.Decoder()
# Positional fields of the array form, in the order of vllm/distributed/kv_events.py.
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
    "lookahead_token_ids",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


def decode(payload: bytes) -> Batch:
    """One message's payload. Raises WireError, and only that."""
    if len(payload) > PAYLOAD_MAX_BYTES:
        raise WireError(f"payload of {len(payload)} bytes; at most {PAYLOAD_MAX_BYTES} are read")
    try:
        try:
            ts_s, events, rank = _FAST.decode(payload)
        except msgspec.ValidationError:
            return _tolerant(_ANY.decode(payload))
        return Batch(ts_s, tuple(map(_event, events)), rank)
    except WireError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as exc:
        raise WireError(f"{type(exc).__name__}: {exc}") from None


def _event(e: _StoredMap | _RemovedMap | _ClearedMap) -> Event:
    if isinstance(e, _StoredMap):
        return Stored(
            _names(e.block_hashes),
            None if e.parent_block_hash is None else _name(e.parent_block_hash),
            pack_tokens(e.token_ids),
            e.block_size,
            e.medium,
            e.lora_id,
            e.lora_name,
            e.extra_keys,
            e.group_idx,
            e.kv_cache_spec_kind,
            e.lookahead_token_ids is not None,
        )
    if isinstance(e, _RemovedMap):
        return Removed(_names(e.block_hashes), e.medium, e.group_idx)
    return Cleared()


def _name(h: _Hash) -> int:
    if isinstance(h, int):
        return h & _LOW64
    if not h:
        raise WireError("a block hash of 0 bytes")
    return int.from_bytes(h[-8:], "big")


def _names(hashes: Iterable[_Hash]) -> tuple[int, ...]:
    return tuple([h if type(h) is int and h >= 0 else _name(h) for h in hashes])


def _tolerant(raw: object) -> Batch:
    """The slow door: any mixture of maps and arrays, types of later releases in between."""
    if isinstance(raw, dict):
        ts, events, rank = raw.get("ts", 0.0), raw.get("events"), raw.get("data_parallel_rank")
    elif isinstance(raw, list) and len(raw) >= 2:
        ts, events, rank = raw[0], raw[1], raw[2] if len(raw) > 2 else None
    else:
        raise WireError(f"a batch is a map or an array of at least 2, not {type(raw).__name__}")
    if not isinstance(events, list):
        raise WireError(f"events are an array, not {type(events).__name__}")
    ts_s = float(ts) if isinstance(ts, int | float) and not isinstance(ts, bool) else 0.0
    return Batch(ts_s, tuple(map(_tolerant_event, events)), rank if type(rank) is int else None)


def _tolerant_event(raw: object) -> Event:
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, raw[1:], strict=False))
    else:
        raise WireError(f"an event is a map or an array with a type, not {type(raw).__name__}")
    if kind == "BlockStored":
        return _tolerant_stored(fields)
    if kind == "BlockRemoved":
        return Removed(_hashes(fields), _of(fields, "medium", str), _of(fields, "group_idx", int))
    if kind == "AllBlocksCleared":
        return Cleared()
    if isinstance(kind, str):
        return Unknown(kind[:64])
    raise WireError("an event without a type")


def _tolerant_stored(f: Mapping[str, object]) -> Stored:
    parent = f.get("parent_block_hash")
    if parent is not None and not isinstance(parent, int | bytes):
        raise WireError("parent_block_hash is neither an integer nor bytes")
    tokens = f.get("token_ids", [])
    size = f.get("block_size", 0)
    if not isinstance(tokens, list) or type(size) is not int:
        raise WireError("BlockStored without token_ids and block_size")
    return Stored(
        _hashes(f),
        None if parent is None else _name(parent),
        pack_tokens(tokens),
        size,
        _of(f, "medium", str),
        _of(f, "lora_id", int),
        _of(f, "lora_name", str),
        _of(f, "extra_keys", list),
        _of(f, "group_idx", int),
        _of(f, "kv_cache_spec_kind", str),
        f.get("lookahead_token_ids") is not None,
    )


def _hashes(f: Mapping[str, object]) -> tuple[int, ...]:
    hashes = f.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(h, int | bytes) for h in hashes):
        raise WireError("block_hashes is not an array of integers or bytes")
    return _names(hashes)


def _of(f: Mapping[str, object], name: str, kind: type) -> Any:
    """An optional field; absent or of a type that we do not know reads as None... except that None has meaning.

    A LoRA name or extra keys of a strange type must not read as "no adapter": that would claim another prompt's blocks.
    """
    value = f.get(name)
    if value is None or isinstance(value, kind):
        return value
    if name in ("lora_id", "lora_name", "extra_keys"):
        raise WireError(f"{name} is a {type(value).__name__}")
    return None
