"""Recorded KV events of real engines (tests/data/recorded), and the same events in the shapes of older releases."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parents[1] / "data" / "recorded"
SETS = ("default", "cbor", "lora")
# The positional form of vLLM <= 0.23, vllm/distributed/kv_events.py.
STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
)  # fmt: skip
REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership")


def frames(name: str) -> list[tuple[int, bytes]]:
    """(sequence number, payload) of every recorded message."""
    out = []
    for line in (FOLDER / name / "frames.jsonl").read_text().splitlines():
        _, seq, payload = (base64.b64decode(x) for x in json.loads(line)["frames"])
        out.append((int.from_bytes(seq, "big"), payload))
    return out


def raw(payload: bytes) -> Any:
    """A payload as plain lists and dicts."""
    return msgspec.msgpack.decode(payload)


def as_arrays(payload: bytes) -> bytes:
    """The batch with its events in the array form, trailing defaults cut as msgspec cut them."""
    ts, events, rank = raw(payload)
    return msgspec.msgpack.encode([ts, [_array(e) for e in events], rank])


def as_map_batch(payload: bytes) -> bytes:
    """The batch as a map, fields that are nil left out."""
    ts, events, _ = raw(payload)
    return msgspec.msgpack.encode({"ts": ts, "events": [{k: v for k, v in e.items() if v is not None} for e in events]})


def _array(event: dict[str, Any]) -> list[Any]:
    names = {"BlockStored": STORED, "BlockRemoved": REMOVED}.get(event["type"], ())
    values = [event.get(n) for n in names]
    while values and values[-1] is None:
        values.pop()
    return [event["type"], *values]
