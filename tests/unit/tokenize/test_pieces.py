"""Cutting, remembering, and the proof that decides whether it may be done."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from router.tokenize.encode import Encoder
from router.tokenize.pieces import NO_CUTS, Cuts, PieceCache, Splitter, any_of, plausible_cuts
from router.tokenize.proof import documents, proven_cuts
from tests.unit.tokenize.exported import tiny_exported

BOTH = Cuts(special=True, words=True)


@given(st.text(alphabet="ab <|>é\n", max_size=300), st.integers(1, 20))
def test_pieces_joined_are_the_text(text: str, piece_chars: int) -> None:
    pieces = Splitter(BOTH, ["<|a|>", "<b>"], piece_chars=piece_chars).split(text)
    assert "".join(pieces) == text
    assert all(len(p) >= piece_chars for p in pieces[:-1])


def test_texts_that_begin_alike_are_cut_alike() -> None:
    rng = random.Random(5)
    splitter = Splitter(BOTH, ["<|im_start|>"], piece_chars=40)
    for document in documents(rng, ["<|im_start|>"], 50):
        longer = document + " and something more <|im_start|> follows here"
        assert splitter.split(longer)[: max(len(splitter.split(document)) - 1, 0)] == splitter.split(document)[:-1]


@given(st.sets(st.text(alphabet="ab<|", min_size=1, max_size=5), min_size=1), st.text(alphabet="ab<|", max_size=30))
def test_the_trie_finds_the_longest_word_at_the_first_place(words: set[str], text: str) -> None:
    import re

    match = re.search(any_of(sorted(words)), text)
    places = [(i, -len(w), w) for i in range(len(text)) for w in words if text.startswith(w, i)]
    assert (match is None) == (not places)
    if match is not None:
        start, _, word = min(places)
        assert (match.start(), match.group()) == (start, word)


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    cache = PieceCache(20_000)
    cache.put("kept", b"ids!")
    for n in range(500):
        cache.put(f"piece {n}", bytes(40))
        assert cache.get("kept") == b"ids!"
        assert cache.size_bytes <= 20_000
    assert cache.get("piece 0") is None
    cache.put("huge", bytes(50_000))
    assert cache.get("huge") is None


def _bpe(**changes: Any) -> str:
    """A small byte-level BPE without merges, like Qwen's but for `changes`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = changes.get("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    if "normalizer" in changes:
        tokenizer.normalizer = changes["normalizer"]
    tokenizer.add_special_tokens(changes.get("added", [AddedToken("<|s|>", special=True, normalized=False)]))
    return tokenizer.to_str()


def _with_entry(entry: str) -> str:
    spec = json.loads(_bpe())
    spec["model"]["vocab"][entry] = 9_999
    return json.dumps(spec)


@pytest.mark.parametrize(
    ("tokenizer_json", "cuts"),
    [
        pytest.param(_bpe(), BOTH, id="like Qwen"),
        pytest.param(_with_entry("eĠthe"), Cuts(special=True, words=False), id="an entry spans word, blank, word"),
        pytest.param(_with_entry("eĠ"), Cuts(special=True, words=False), id="an entry spans word and blank"),
        pytest.param(_with_entry("ĠĠ"), BOTH, id="blanks alone are harmless"),
        pytest.param(_bpe(added=[AddedToken("<s>", lstrip=True)]), NO_CUTS, id="a token that eats blanks"),
        pytest.param(_bpe(added=[AddedToken("<s>", rstrip=True)]), NO_CUTS, id="a token that eats blanks after it"),
        pytest.param(_bpe(added=[AddedToken("<s>", single_word=True)]), NO_CUTS, id="a token only as a whole word"),
        pytest.param(
            _bpe(added=[AddedToken("of the", normalized=False)]), Cuts(special=True, words=False), id="a token across"
        ),
        pytest.param(_bpe(normalizer=normalizers.Strip()), NO_CUTS, id="blanks are stripped off each text"),
        pytest.param(_bpe(normalizer=normalizers.Prepend("▁")), NO_CUTS, id="something is put before each text"),
        pytest.param(_bpe(normalizer=normalizers.NFKC()), BOTH, id="composition does not cross a blank"),
        pytest.param(_bpe(pre_tokenizer=pre_tokenizers.BertPreTokenizer()), NO_CUTS, id="an unknown pre-tokenizer"),
    ],
)
def test_what_a_tokenizers_description_allows(tokenizer_json: str, cuts: Cuts) -> None:
    found, borders = plausible_cuts(tokenizer_json)
    assert found == cuts
    assert bool(borders) or cuts in (NO_CUTS, Cuts(special=False, words=True))


def test_a_token_that_another_may_overlap_is_no_border() -> None:
    added = [AddedToken(t, normalized=False) for t in ("\n\n", "\n\n\n", "<|s|>", "x<|", "<b>")]
    _, borders = plausible_cuts(_bpe(added=added))
    assert borders == ["x<|", "<b>"]


def test_the_corpus_refutes_what_the_description_allows() -> None:
    """A splitter that drops a blank at the beginning: of the text once, of every piece if it is cut."""
    drops = pre_tokenizers.Split(Regex("^ "), behavior="removed")
    described = _bpe(pre_tokenizer=pre_tokenizers.Sequence([drops, pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    assert plausible_cuts(described)[0] == BOTH
    assert proven_cuts(described)[0] == Cuts(special=True, words=False)


def test_cached_pieces_give_the_same_ids_as_the_plain_tokenizer() -> None:
    exported = tiny_exported()
    assert exported.cuts == BOTH
    encoder = Encoder(exported.tokenizer_json, cuts=exported.cuts, borders=exported.borders)
    plain = Encoder(exported.tokenizer_json)
    corpus = list(documents(random.Random(11), exported.borders, 100))
    for document in corpus * 2:  # cold, then known
        assert encoder.complete(encoder.draft(document)) == plain.complete(plain.draft(document))
    assert encoder.counts.chars_known >= sum(map(len, corpus))


def test_a_wrong_cut_is_noticed_and_switched_off() -> None:
    """As if the proof had been wrong: cutting inside words."""
    exported = tiny_exported()
    encoder = Encoder(exported.tokenizer_json, cuts=BOTH, borders=["e"])
    text = "somewhere there were several sheep " * 60
    assert len(encoder.draft(text).pieces) > 1
    assert not encoder.check(text)
    assert encoder.cuts == NO_CUTS
    assert encoder.counts.texts_differed == 1
    assert encoder.draft(text).pieces == [text]
