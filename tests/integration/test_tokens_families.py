"""Slow lane: real tokenizers and templates, fetched in the run. Cuts and parity over many documents."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from router.tokenize.load import load
from router.tokenize.pieces import Cuts, Splitter
from router.tokenize.proof import documents, renders_alike
from router.tokenize.template import ChatTemplate
from tests.chats import text
from tests.families import CHAT_FAMILIES, FAMILIES, family, templates
from tests.parity import TOOLS, compare

VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
DOCUMENTS_EACH = 17_000  # over six families: more than 100,000

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_give_the_whole_texts_ids(name: str) -> None:
    exported = load(str(family(name)), offline=True, deadline_s=600)
    assert exported.cuts == Cuts(special=True, words=True)
    tokenizer = Tokenizer.from_str(exported.tokenizer_json)
    added = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    rng = random.Random(name)
    splitters = [Splitter(exported.cuts, exported.borders, piece_chars=n) for n in (1, 20, 100)]
    cut = 0
    for _ in range(DOCUMENTS_EACH // 500):
        batch = [text(rng, words=40) for _ in range(250)] + list(documents(rng, added, 250))
        split = [rng.choice(splitters).split(document) for document in batch]
        whole = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        parts = iter(tokenizer.encode_batch_fast([p for pieces in split for p in pieces], add_special_tokens=False))
        for document, pieces, encoding in zip(batch, split, whole, strict=True):
            assert "".join(pieces) == document
            assert [i for _ in pieces for i in next(parts).ids] == encoding.ids, repr(document)
            cut += len(pieces) > 1
    assert cut > DOCUMENTS_EACH // 2


@pytest.mark.parametrize("name", CHAT_FAMILIES)
@pytest.mark.vllm
def test_the_engine_sees_the_same_ids(name: str) -> None:
    tally = compare(str(VLLM_PYTHON), family(name), seed=7, count=600, flags=TOOLS)
    assert tally.differences == []
    assert tally.total("equal") > 450


@pytest.mark.vllm
@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_broken_bodies_that_the_engine_still_takes_give_its_ids(name: str) -> None:
    tally = compare(str(VLLM_PYTHON), family(name), seed=11, count=1500, flags=TOOLS, mutate=True)
    assert tally.differences == []
    assert tally.total("equal") > 300
    assert tally.total("refused") > 300


@pytest.mark.vllm
def test_llama_2_has_completions_and_gpt_oss_is_a_counted_fallback() -> None:
    llama = compare(str(VLLM_PYTHON), family("llama2"), seed=7, count=600, flags=TOOLS)
    assert llama.different == 0
    assert llama.total("equal") >= 60
    harmony = compare(str(VLLM_PYTHON), family("gptoss"), seed=7, count=600, flags=[])
    assert harmony.different == 0
    assert harmony.total("equal") >= 60
    assert harmony.total("not claimed: unrenderable") > 200


def test_minijinja_is_used_for_many_real_templates_and_refused_to_some() -> None:
    compiled = {path.name: ChatTemplate(path.read_text()) for path in sorted(templates().glob("*.jinja"))}
    alike = {
        name
        for name, template in compiled.items()
        if renders_alike(template, {"bos_token": "<s>", "eos_token": "</s>"})
    }
    assert len(compiled) > 60
    assert 20 < len(alike) < len(compiled)
    assert {"Qwen-Qwen3-0.6B.jinja", "Qwen-Qwen2.5-7B-Instruct.jinja"} <= alike
    assert "meetkai-functionary-medium-v3.1.jinja" not in alike  # prints quotes of arguments escaped
