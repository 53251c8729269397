"""Cut a prompt into pieces whose ids do not depend on each other, and remember the ids of each piece.

A fast tokenizer first takes its added tokens out of the text and then treats the parts one by one; so a text may be cut
in front of an added token. Inside a part, the usual pre-tokenizers begin a new word at a blank between two letters; so
it may be cut there too, if no entry of the vocabulary could reach across. Both are claims about one tokenizer: each is
admitted by a static check here and by the corpus of proof.py, or not used at all.

Two prompts that begin alike are cut alike, so what was encoded once costs a dictionary look-up.
May import: the standard library.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

# Letters that every version of Unicode and both regex engines agree on; scripts whose words end in marks are left out.
_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏΑ-Ρα-ωА-Яа-яЁёא-תء-غف-ي가-힣"
_BETWEEN_LETTERS = f"(?<=[{_LETTERS}]) (?=[{_LETTERS}])"
_LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_KNOWN_PRETOKENIZERS = frozenset({"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation"})


class Cuts(msgspec.Struct, frozen=True):
    """Where this tokenizer's texts may be cut."""

    special: bool  # in front of an added token
    words: bool  # between a letter and a blank that a letter follows


NO_CUTS = Cuts(special=False, words=False)


class Splitter:
    """Cuts after at least `piece_chars`, at the next allowed place."""

    def __init__(self, cuts: Cuts, borders: Iterable[str], *, piece_chars: int = 512) -> None:
        allowed = [_BETWEEN_LETTERS] * cuts.words
        if cuts.special and (tokens := list(borders)):
            allowed.append(any_of(tokens))
        self.cuts = cuts
        self._piece_chars = piece_chars
        self._next = re.compile("|".join(allowed)).search if allowed else None

    def split(self, text: str) -> list[str]:
        """The pieces, in order; joined they are the text."""
        if self._next is None:
            return [text]
        pieces: list[str] = []
        append, find, step = pieces.append, self._next, self._piece_chars
        start = 0
        while match := find(text, start + step):
            end = match.start()
            append(text[start:end])
            start = end
        append(text[start:])
        return pieces


class PieceCache:
    """Piece -> packed ids, bounded in bytes. Two generations: what is used moves to the young one; the old is dropped.

    Safe from several threads: a lost race loses an entry, never mixes two.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._half_bytes = max_bytes // 2
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Of keys, values and a rough share of the table."""
        return self._young_bytes + self._old_bytes

    def get(self, piece: str) -> bytes | None:
        ids = self._young.get(piece)
        if ids is None and (ids := self._old.get(piece)) is not None:
            self.put(piece, ids)
        return ids

    def put(self, piece: str, ids: bytes) -> None:
        """An entry alone above half the bound is not kept."""
        cost = sys.getsizeof(piece) + sys.getsizeof(ids) + 100
        if cost > self._half_bytes:
            return
        if self._young_bytes + cost > self._half_bytes:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[piece] = ids
        self._young_bytes += cost


def plausible_cuts(tokenizer_json: str) -> tuple[Cuts, list[str]]:
    """What the tokenizer's own description allows, and the added tokens in front of which a text may be cut."""
    spec = json.loads(tokenizer_json)
    added = spec.get("added_tokens") or []
    if any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in added) or spec["model"].get("dropout"):
        return NO_CUTS, []
    if not _is_local(spec.get("normalizer")) or not _is_known(spec.get("pre_tokenizer")):
        return NO_CUTS, []
    contents = [t["content"] for t in added]
    borders = list(_clean([t["content"] for t in added if not t["normalized"]], contents))
    spans = re.compile(f"[{_LETTERS}] ")
    words = not any(spans.search(c) for c in contents) and not _reaches_across(spec)
    return Cuts(special=bool(borders), words=words), borders


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A component and, if it is a sequence, what it is made of."""
    if component is None:
        return
    inner = component.get("normalizers") or component.get("pretokenizers")
    if component["type"] == "Sequence":
        for part in inner or []:
            yield from _parts(part)
    else:
        yield component


def _is_local(normalizer: dict[str, Any] | None) -> bool:
    """Does it change a text piece by piece alike? One blank may become a mark; composition does not cross a blank."""
    for part in _parts(normalizer):
        blank = part["type"] == "Replace" and part["pattern"] == {"String": " "}
        if part["type"] not in _LOCAL_NORMALIZERS and not blank:
            return False
    return True


def _is_known(pre_tokenizer: dict[str, Any] | None) -> bool:
    return all(part["type"] in _KNOWN_PRETOKENIZERS for part in _parts(pre_tokenizer))


def _reaches_across(spec: dict[str, Any]) -> bool:
    """Could one vocabulary entry hold the end of a word and the blank after it?"""
    model = spec["model"]
    if model["type"] not in ("BPE", "Unigram"):
        return True
    vocab = model.get("vocab") or {}
    entries = vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab)
    added = {
        t["content"] for t in spec.get("added_tokens") or []
    }  # taken out of the text before; checked by themselves
    kinds = {part["type"] for part in _parts(spec.get("pre_tokenizer"))}
    if "ByteLevel" in kinds:
        suspects = (_byte_text(e) for e in entries if "\u0120" in e.lstrip("\u0120") and e not in added)
    else:
        suspects = (e.replace("\u2581", " ") for e in entries if e not in added)
    after_word = re.compile(r"[^\W_] |\ufffd ")
    return any(after_word.search(text) for text in suspects)


def _byte_text(entry: str) -> str:
    """A byte-level entry as the text it stands for; pieces of a character become U+FFFD."""
    return bytes(_BYTE_OF.get(char, 0xFF) for char in entry).decode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _clean(borders: list[str], all_tokens: list[str]) -> Iterator[str]:
    """Tokens that no other added token can overlap from the left, so that finding one means it is there."""
    inner: set[str] = set()  # every proper beginning of a border, to look up the ends of other tokens in
    by_first = {b[0] for b in borders}
    for token in all_tokens:
        for i in range(1, len(token)):
            if token[i] in by_first:
                inner.add(token[i:])
    longest = sorted(inner, key=len)
    for border in borders:
        if not any(tail.startswith(border) or border.startswith(tail) for tail in longest if tail[0] == border[0]):
            yield border


def any_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of `words` at a place, as a trie: thousands of them cost like a few."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _trie(root)


def _trie(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _trie(child) for char, child in node.items() if char]
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 else "(?:" + "|".join(branches) + ")"
    return f"(?:{body})?" if "" in node else body
