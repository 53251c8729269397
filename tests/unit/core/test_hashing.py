"""Golden vectors: a difference of one bit between two versions is a fleet with no cache hits and no error."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from router.core.hashing import chain_keys, next_key, pack_tokens, root_key, usable_blocks

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "block_keys.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", GOLDEN)
def test_keys_are_the_golden_ones(row: dict[str, Any]) -> None:
    root = root_key(seed=row["seed"], model=row["model"], lora_name=row["lora_name"], cache_salt=row["cache_salt"])
    packed = pack_tokens(row["tokens"])
    size = row["block_size_tokens"]
    assert root.hex() == row["root"]
    assert [k.hex() for k in chain_keys(root, packed, size)] == row["keys"]
    key, step = root, 4 * size
    for i, expected in enumerate(row["keys"]):
        key = next_key(key, packed[i * step : (i + 1) * step])
        assert key.hex() == expected


def test_every_golden_root_is_another_one() -> None:
    assert len({row["root"] for row in GOLDEN}) == len({(*list(row.values())[:4],) for row in GOLDEN})


def test_a_block_size_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        chain_keys(root_key(seed="", model=""), b"", 0)


def test_a_big_endian_machine_names_blocks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big" if sys.byteorder == "little" else "little")
    swapped = pack_tokens([1, 0x01020304])
    monkeypatch.undo()
    assert swapped == pack_tokens([0x01000000, 0x04030201])


@pytest.mark.parametrize("tokens", [[-1], [1 << 32]])
def test_ids_that_are_no_token_are_refused(tokens: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_tokens(tokens)


@pytest.mark.parametrize(("prompt", "size", "blocks"), [(0, 16, 0), (1, 1, 0), (16, 16, 0), (17, 16, 1), (192, 32, 5)])
def test_the_last_token_is_always_computed(prompt: int, size: int, blocks: int) -> None:
    assert usable_blocks(prompt, size) == blocks
