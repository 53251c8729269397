"""The oracle: bodies a real vLLM 0.32 engine was sent, and the prompt ids it said it saw."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.core.hashing import pack_tokens
from router.tokenize.model import ModelOptions, ModelRenderer
from router.tokenize.port import PromptTokens
from router.tokenize.rendering import render_fully
from tests.unit.tokenize.exported import tiny_exported

DATA = Path(__file__).parents[2] / "data"


def recorded() -> list[Any]:
    cases = []
    for path in sorted(DATA.glob("recorded/*/requests.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            ids = row.get("prompt_token_ids") or _answered_ids(row)
            if ids and row.get("body"):
                cases.append(pytest.param(row["path"], row["body"], ids, id=f"{path.parent.name}-{row['n']}"))
    return cases


def _answered_ids(row: dict[str, Any]) -> list[int] | None:
    answer = row.get("response")
    if row.get("status") != 200 or not isinstance(answer, dict):
        return None
    return answer.get("tokens") or answer.get("token_ids")


@pytest.fixture(scope="module")
def tiny() -> ModelRenderer:
    return ModelRenderer(tiny_exported(), ModelOptions())


@pytest.mark.parametrize(("path", "body", "ids"), recorded())
def test_same_ids_as_the_engine(tiny: ModelRenderer, path: str, body: dict[str, Any], ids: list[int]) -> None:
    endpoint = "/v1/chat/completions" if "messages" in body else "/v1/completions"  # /tokenize, render: as one of these
    found = render_fully(tiny, endpoint, msgspec.json.encode(body))
    assert isinstance(found, PromptTokens), found
    assert found.packed == pack_tokens(ids)


def test_the_recordings_are_there() -> None:
    assert len(recorded()) > 60
