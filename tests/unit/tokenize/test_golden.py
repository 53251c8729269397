"""Every feature against the engine's own front half: tests/golden/prompt_ids.jsonl (python -m tests.parity --record).

The oracle is vLLM 0.32's request models, renderer and tokenizer, run on these bodies; none of our code made the ids.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.core.hashing import pack_tokens
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.port import PromptTokens
from router.tokenize.rendering import ENDPOINTS, render_fully
from tests.unit.tokenize.exported import tiny_exported

GOLDEN = Path(__file__).parents[2] / "golden" / "prompt_ids.jsonl"


def rows() -> list[Any]:
    made = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return [pytest.param(row, id=f"{n}-{row['feature'].replace(' ', '_')}") for n, row in enumerate(made)]


@pytest.fixture(scope="module")
def tiny() -> ModelRenderer:
    return ModelRenderer(tiny_exported(), ModelOptions())


@pytest.mark.parametrize("row", rows())
def test_same_ids_as_the_engines_front_half(tiny: ModelRenderer, row: dict[str, Any]) -> None:
    body = msgspec.json.encode(row["body"])
    for _ in range(2):  # cold, then from the piece cache
        found = render_fully(tiny, row["path"], body)
        assert isinstance(found, PromptTokens), found
        assert found.packed == pack_tokens(row["ids"])


def test_every_endpoint_is_in_the_golden_file() -> None:
    seen = {json.loads(line)["path"] for line in GOLDEN.read_text().splitlines()}
    assert seen == set(ENDPOINTS)
