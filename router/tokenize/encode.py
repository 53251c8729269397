"""Prompt text to packed token ids: one fast tokenizer, its pieces and their cache.

`draft` (cheap, any thread) cuts a text and looks its pieces up; `complete` encodes what is missing. Short gaps are
filled where the caller stands, long ones in the pool: the library releases the interpreter's lock while it encodes.
May import: the standard library, msgspec, tokenizers, router.core.hashing, router.tokenize.pieces.
"""

import logging
import os
import re
from typing import Literal

import msgspec
from tokenizers import Tokenizer

from router.core.hashing import pack_tokens
from router.tokenize.pieces import NO_CUTS, Cuts, PieceCache, Splitter, any_of

log = logging.getLogger("warmroute.tokenize")

Side = Literal["left", "right"]
SAMPLE_EVERY = 512  # texts; one whole encoding beside that many cached ones costs well under a tenth of them
SAMPLE_MAX_CHARS = 200_000


class Draft(msgspec.Struct):
    """A text cut into pieces, with the ids of those that were known."""

    pieces: list[str]
    ids: list[bytes | None]
    missing_chars: int  # what is left to encode


class PieceCounts(msgspec.Struct):
    """Since the start. `texts_differed` above 0 means that cutting was found inexact and is off."""

    chars_known: int = 0
    chars_encoded: int = 0
    texts_checked: int = 0
    texts_differed: int = 0


class Encoder:
    """Thread-safe: the Rust tokenizer is only read. Raises ValueError for a tokenizer file it cannot read."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        cuts: Cuts = NO_CUTS,
        borders: list[str] | None = None,
        cache_max_bytes: int = 128 * 1024 * 1024,
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our own pool bounds the cores; not the library's
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as exc:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer: {exc}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._borders = re.compile(any_of(borders) if borders else "(?!)")
        self._splitter = Splitter(cuts, borders or ())
        self.cache = PieceCache(cache_max_bytes)
        self.counts = PieceCounts()
        self._until_sample = SAMPLE_EVERY
        self._sample: str | None = None
        self._before, self._after = self._wrapping()

    @property
    def cuts(self) -> Cuts:
        return self._splitter.cuts

    def _wrapping(self) -> tuple[bytes, bytes]:
        """The special tokens that this tokenizer puts before and after a text (BOS, EOS), packed."""
        bare, wrapped = self._whole("a"), self._whole("a", special=True)
        at = wrapped.find(bare)
        if at < 0:
            raise ValueError("adding special tokens changes the ids of the text itself")
        return wrapped[:at], wrapped[at + len(bare) :]

    def _whole(self, text: str, *, special: bool = False) -> bytes:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return pack_tokens(encoding.ids)

    def draft(self, text: str) -> Draft:
        """Cut `text` and look its pieces up."""
        pieces = self._splitter.split(text)
        ids = [self.cache.get(piece) for piece in pieces]
        missing = sum(len(piece) for piece, known in zip(pieces, ids, strict=True) if known is None)
        counts = self.counts
        counts.chars_known += len(text) - missing
        counts.chars_encoded += missing
        self._until_sample -= 1
        if self._until_sample <= 0 and len(pieces) > 1 and len(text) <= SAMPLE_MAX_CHARS:
            self._until_sample, self._sample = SAMPLE_EVERY, text
        return Draft(pieces=pieces, ids=ids, missing_chars=missing)

    def complete(self, draft: Draft) -> bytes:
        """Packed ids of the draft's text, without special tokens around it."""
        pieces, ids = draft.pieces, draft.ids
        gaps = [i for i, known in enumerate(ids) if known is None]
        if gaps:
            encodings = self._tokenizer.encode_batch_fast([pieces[i] for i in gaps], add_special_tokens=False)
            for i, encoding in zip(gaps, encodings, strict=True):
                ids[i] = packed = pack_tokens(encoding.ids)
                self.cache.put(pieces[i], packed)
        return b"".join(ids)  # type: ignore[arg-type]  # no gap is left

    def wrap(self, ids: bytes, *, limit_tokens: int | None = None) -> bytes:
        """`ids` between the tokenizer's special tokens; with a limit, cut on the left so that all fit into it."""
        if limit_tokens is not None:
            ids = truncate(ids, max(limit_tokens - (len(self._before) + len(self._after)) // 4, 0), "left")
        return self._before + ids + self._after

    def settled_chars(self, text: str) -> int:
        """How many leading characters of `text` have ids that stay true whatever follows: up to its last border."""
        end = 0
        for match in self._borders.finditer(text):
            end = match.start()
        return end

    def open_beginning(self, ids: bytes) -> bytes:
        """`ids` after the special tokens that begin a text, for a text that goes on."""
        return self._before + ids

    def take_sample(self) -> str | None:
        """A text to be checked by `check`, now and then; it is given out once."""
        sample, self._sample = self._sample, None
        return sample

    def check(self, text: str) -> bool:
        """Encode `text` whole and in pieces. On a difference cutting goes off for good: slower, but right."""
        self.counts.texts_checked += 1
        parts = self._tokenizer.encode_batch_fast(self._splitter.split(text), add_special_tokens=False)
        if pack_tokens(i for part in parts for i in part.ids) == self._whole(text):
            return True
        self.counts.texts_differed += 1
        log.error("cutting a prompt into pieces changed its token ids: no longer done for this tokenizer")
        self._splitter = Splitter(NO_CUTS, ())
        self.cache = PieceCache(self.cache.max_bytes)
        return False


def truncate(packed: bytes, limit_tokens: int, side: Side) -> bytes:
    """Keep the last (`left`: the left is cut off) or the first `limit_tokens`."""
    if len(packed) <= 4 * limit_tokens:
        return packed
    return packed[len(packed) - 4 * limit_tokens :] if side == "left" else packed[: 4 * limit_tokens]
