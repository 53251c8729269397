"""Prompt text to packed token ids, around one fast tokenizer. CPU only: call it in the pool when the text is long.

May import: the standard library, tokenizers, router.core.hashing.
"""

import re
from typing import Literal

from tokenizers import Tokenizer

from router.core.hashing import pack_tokens

Side = Literal["left", "right"]


class Encoder:
    """Thread-safe: the Rust tokenizer is only read. Raises ValueError for a tokenizer file it cannot read."""

    def __init__(self, tokenizer_json: str) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as exc:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer: {exc}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._before, self._after = self._wrapping()
        added = self._tokenizer.get_added_tokens_decoder().values()
        # A token that eats blanks on its left, or matches only whole words, depends on the text before it.
        borders = [t.content for t in added if not (t.lstrip or t.single_word or t.normalized)]
        self._borders = re.compile("|".join(re.escape(b) for b in sorted(borders, key=len, reverse=True)) or "(?!)")

    def _wrapping(self) -> tuple[bytes, bytes]:
        """The special tokens that this tokenizer puts before and after a text (BOS, EOS), packed."""
        bare, wrapped = self._ids("a", special=False), self._ids("a", special=True)
        at = wrapped.find(bare)
        if at < 0:
            raise ValueError("adding special tokens changes the ids of the text itself")
        return wrapped[:at], wrapped[at + len(bare) :]

    def _ids(self, text: str, *, special: bool) -> bytes:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return pack_tokens(encoding.ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Packed ids of `text`, as the engine's tokenizer gives them."""
        ids = self._ids(text, special=False)
        return self._before + ids + self._after if add_special_tokens else ids

    def encode_truncated(self, text: str, *, add_special_tokens: bool, limit_tokens: int) -> bytes:
        """At most `limit_tokens`, cut on the left before special tokens are added: vLLM's default for generation."""
        ids = self._ids(text, special=False)
        if not add_special_tokens:
            return truncate(ids, limit_tokens, "left")
        room = limit_tokens - (len(self._before) + len(self._after)) // 4
        return self._before + truncate(ids, max(room, 0), "left") + self._after

    def encode_beginning(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Ids that stay true whatever follows `text`: up to the last special token in it, which ends a piece."""
        end = 0
        for match in self._borders.finditer(text):
            end = match.start()
        ids = self._ids(text[:end], special=False) if end else b""
        return self._before + ids if add_special_tokens else ids


def truncate(packed: bytes, limit_tokens: int, side: Side) -> bytes:
    """Keep the last (`left`: the left is cut off) or the first `limit_tokens`."""
    if len(packed) <= 4 * limit_tokens:
        return packed
    return packed[len(packed) - 4 * limit_tokens :] if side == "left" else packed[: 4 * limit_tokens]
