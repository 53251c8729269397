"""Every shape decodes alike; nothing else gets through the door but WireError."""

import contextlib
from random import Random
from typing import Any

import msgspec
import pytest

from indexer.wire import PAYLOAD_MAX_BYTES, Batch, Cleared, Removed, Stored, Unknown, WireError, decode
from tests.fakes.recorded import SETS, as_arrays, as_map_batch, frames, raw


def pack(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


@pytest.mark.parametrize("name", SETS)
def test_every_recorded_frame_decodes_alike_in_all_shapes(name: str) -> None:
    for _, payload in frames(name):
        ts, events, rank = raw(payload)
        batch = decode(payload)
        assert (batch.ts_s, batch.rank, len(batch.events)) == (ts, rank, len(events))
        assert decode(as_arrays(payload)) == batch
        assert decode(as_map_batch(payload)).events == batch.events
        for event, told in zip(batch.events, events, strict=True):
            assert {"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}[told["type"]] is type(
                event
            )


@pytest.mark.parametrize("name", SETS)
def test_fields_are_the_recorded_ones(name: str) -> None:
    for _, payload in frames(name):
        for event, told in zip(decode(payload).events, raw(payload)[1], strict=True):
            if not isinstance(event, Stored):
                continue
            assert event.block_size_tokens == told["block_size"]
            tokens = [int.from_bytes(event.tokens[i : i + 4], "little") for i in range(0, len(event.tokens), 4)]
            assert tokens == told["token_ids"]
            names = [h if isinstance(h, int) else int.from_bytes(h[-8:], "big") for h in told["block_hashes"]]
            assert list(event.hashes) == names
            assert (event.lora_name, event.extra_keys) == (told["lora_name"], told["extra_keys"])


def test_ints_are_unsigned_and_bytes_of_any_length_give_their_low_64_bits() -> None:
    top = 2**64 - 1
    digest = bytes(range(32))
    batch = decode(pack({"type": "BlockRemoved", "block_hashes": [top, digest, digest[16:], digest[24:]]}))
    low = int.from_bytes(digest[24:], "big")
    assert batch.events == (Removed((top, low, low, low)),)
    signed = decode(pack({"type": "BlockRemoved", "block_hashes": [-1]}))
    assert signed.events == (Removed((top,)),)


STORED_MAP = {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2}
STORED = Stored((7,), None, b"\1\0\0\0\2\0\0\0", 2)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param(STORED_MAP, STORED, id="only what is needed"),
        pytest.param({**STORED_MAP, "new_field": {"a": [1]}, "zzz": None}, STORED, id="two unknown fields"),
        pytest.param(["BlockStored", [7], None, [1, 2], 2], STORED, id="0.10 array, defaults cut"),
        pytest.param(
            [
                "BlockStored",
                [7],
                9,
                [1, 2],
                2,
                None,
                "GPU",
                "ad",
                [["ad"]],
                1,
                "full_attention",
                None,
                "LOCAL",
                None,
                "s",
                [[5]],
                "x",
                1,
            ],
            msgspec.structs.replace(
                STORED,
                parent=9,
                medium="GPU",
                lora_name="ad",
                extra_keys=[["ad"]],
                group=1,
                kind="full_attention",
                lookahead=True,
            ),
            id="array longer than we know",
        ),
        pytest.param(
            {**STORED_MAP, "lookahead_token_ids": [[5]]}, msgspec.structs.replace(STORED, lookahead=True), id="0.33"
        ),
        pytest.param({"type": "BlocksMoved", "a": 1}, Unknown("BlocksMoved"), id="unknown type, map"),
        pytest.param(["BlocksMoved", 1], Unknown("BlocksMoved"), id="unknown type, array"),
        pytest.param({"type": "AllBlocksCleared", "medium": "GPU"}, Cleared(), id="cleared with a field"),
        pytest.param(["AllBlocksCleared"], Cleared(), id="cleared, array"),
        pytest.param({**STORED_MAP, "group_idx": "one"}, STORED, id="a field of a strange type that names nothing"),
    ],
)
def test_shapes(event: Any, expected: Any) -> None:
    assert decode(pack(event)).events == (expected,)
    mixed = decode(pack(["Later", 1], event, {"type": "Later"}))
    assert mixed.events == (Unknown("Later"), expected, Unknown("Later"))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="a byte that msgpack never uses"),
        pytest.param(msgspec.msgpack.encode("text"), id="a text"),
        pytest.param(msgspec.msgpack.encode([1.0]), id="too short"),
        pytest.param(msgspec.msgpack.encode([1.0, {"a": 1}, 0]), id="events are a map"),
        pytest.param(pack("BlockStored"), id="an event is a text"),
        pytest.param(pack([]), id="an empty event"),
        pytest.param(pack({"block_hashes": [1]}), id="no type"),
        pytest.param(pack({"type": "BlockStored", "token_ids": [1], "block_size": 1}), id="stored without hashes"),
        pytest.param(pack({**STORED_MAP, "token_ids": [-1, 2]}), id="a negative token"),
        pytest.param(pack({**STORED_MAP, "token_ids": [1 << 32, 2]}), id="a token beyond 32 bits"),
        pytest.param(pack({**STORED_MAP, "token_ids": ["a", 2]}), id="a token that is a text"),
        pytest.param(pack({**STORED_MAP, "block_hashes": [b""]}), id="an empty hash"),
        pytest.param(pack({**STORED_MAP, "parent_block_hash": "p"}), id="a parent that is a text"),
        pytest.param(pack({**STORED_MAP, "lora_name": 5}), id="an adapter we could take for none"),
        pytest.param(pack({**STORED_MAP, "extra_keys": {"a": 1}}), id="extra keys we could take for none"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="an array that claims four billion"),
        pytest.param(b"\x91" * 100_000, id="nested without end"),
    ],
)
def test_what_is_not_a_batch(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(payload)


def survives(payload: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode(payload), Batch)


@pytest.mark.parametrize("name", SETS)
def test_cut_frames_raise_nothing_else(name: str) -> None:
    rng = Random(1)
    for _, payload in frames(name):
        for shape in (payload, as_arrays(payload), as_map_batch(payload)):
            for _ in range(20):
                survives(shape[: rng.randrange(len(shape))])


def test_random_and_flipped_bytes_raise_nothing_else() -> None:
    rng = Random(2)
    some = [p for name in SETS for _, p in frames(name)][::5]
    for _ in range(3000):
        survives(rng.randbytes(rng.randrange(80)))
        flipped = bytearray(rng.choice(some))
        for _ in range(rng.randrange(1, 8)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        survives(bytes(flipped))


def test_a_payload_beyond_the_bound_is_not_read() -> None:
    with pytest.raises(WireError, match="at most"):
        decode(bytes(PAYLOAD_MAX_BYTES + 1))


@pytest.mark.parametrize("parent", ["text", [1], 1.5])
def test_a_parent_that_is_no_hash_is_refused(parent: Any) -> None:
    with pytest.raises(WireError, match="parent_block_hash"):
        decode(pack({**STORED_MAP, "parent_block_hash": parent}))


@pytest.mark.parametrize("change", [{"token_ids": "text"}, {"block_size": "16"}, {"block_size": True}])
def test_blocks_without_tokens_or_size_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="token_ids and block_size"):
        decode(pack({**STORED_MAP, **change}))
