"""A Ledger as bytes and back, so that a restarted indexer need not depend on how far replay reaches. Pure.

What is read back is only a memory: before anything else the pod is asked to replay the last batch of it, and another
content there means another process, so an old or foreign snapshot costs one replay and never a wrong claim.
May import: the standard library, msgspec, indexer.table.
"""

import zlib

import msgspec

from indexer.table import Part

VERSION = 1
_MAX_BYTES = 1 << 30


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """Everything a Ledger knows. The table of claims is made anew from the blocks."""

    version: int
    origin: bytes  # of which seed and base model, without telling the seed
    last_seq: int
    last_digest: int
    whole: bool
    exhausted: bool
    group: int | None
    group_known: bool
    families: list[tuple[str | None, int | None]]
    sizes: dict[int, int]
    parts: list[int]  # places of each part of the table
    names: bytes
    values: bytes
    counts: bytes


def pack(snapshot: Snapshot) -> bytes:
    """Compressed; takes about 0.1 s for 200,000 blocks, so not on the event loop."""
    return zlib.compress(msgspec.msgpack.encode(snapshot), level=1)


def unpack(blob: bytes) -> Snapshot | None:
    """None for anything that is not a snapshot of this version, whatever it is."""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(blob, _MAX_BYTES)
        if not inflate.eof:
            return None  # cut, or its checksum is wrong
        snapshot = msgspec.msgpack.decode(raw, type=Snapshot)
    except (zlib.error, msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
        return None
    places = 8 * sum(snapshot.parts)
    good = (
        snapshot.version == VERSION
        and snapshot.last_seq >= 0
        and all(n > 0 and n & (n - 1) == 0 for n in snapshot.parts)
        and len(snapshot.names) == len(snapshot.values) == len(snapshot.counts) == places
    )
    return snapshot if good else None


def dump_table(table: list[Part]) -> tuple[list[int], bytes, bytes, bytes]:
    """Copies of a table's arrays, quick enough for the event loop."""
    return (
        [len(part.names) for part in table],
        b"".join([part.names.tobytes() for part in table]),
        b"".join([part.values.tobytes() for part in table]),
        b"".join([part.counts.tobytes() for part in table]),
    )


def load_table(table: list[Part], snapshot: Snapshot) -> bool:
    """Fill a new table from a snapshot's arrays. False if they do not fit it."""
    if len(snapshot.parts) != len(table):
        return False
    at = 0
    for part, places in zip(table, snapshot.parts, strict=True):
        end = at + 8 * places
        part.load(snapshot.names[at:end], snapshot.values[at:end], snapshot.counts[at:end])
        if part.used >= places:
            return False  # probing would never end
        at = end
    return True
