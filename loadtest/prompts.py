"""Segments to text: prompts of exact token length with a tokenizer, of estimated length without. Pure.

May import: the standard library, msgspec, loadtest.workload, loadtest.fleet.text (plain words of a tokenizer).
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import shake_128
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadtest.fleet.text import ModelText
from loadtest.workload import Segment, Turn

Api = Literal["chat", "completions"]
_CHUNK_TOKENS = 64
_encode = msgspec.json.Encoder().encode

# Common English words that are one token, leading space included, in the vocabularies of the large model families.
_COMMON = (
    "the of and to in is that it for was on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now people "
    "my made over did down only way find use may water long little very after words called just where most know"
)
COMMON_WORDS = tuple(f" {w}" for w in _COMMON.split())


def plain_words(tokenizer: Path | None) -> tuple[str, ...]:
    """Words that are one token each. Without a tokenizer: common words, which is an estimate."""
    if tokenizer is None:
        return COMMON_WORDS
    text = ModelText(tokenizer)
    return tuple(t for _, t in text.plain_words)


class Prompts:
    """Text of segments. `namespace` changes every text and no length: fresh prefixes for another arm."""

    def __init__(self, words: Sequence[str], *, namespace: str = "", cache_bytes: int = 64 << 20) -> None:
        self._words = tuple(words)
        self._namespace = namespace
        self._cache: OrderedDict[Segment, str] = OrderedDict()
        self._cache_left_bytes = cache_bytes

    def text(self, segment: Segment) -> str:
        """One word a token; equal slices of a stream are equal texts."""
        known = self._cache.get(segment)
        if known is not None:
            self._cache.move_to_end(segment)
            return known
        first, last = segment.start // _CHUNK_TOKENS, (segment.start + segment.tokens - 1) // _CHUNK_TOKENS
        words: list[str] = []
        for chunk in range(first, last + 1):
            words += self._chunk(f"{self._namespace}/{segment.content}/{chunk}")
        skip = segment.start - first * _CHUNK_TOKENS
        text = "".join(words[skip : skip + segment.tokens])
        self._cache[segment] = text
        self._cache_left_bytes -= len(text)
        while self._cache_left_bytes < 0:
            self._cache_left_bytes += len(self._cache.popitem(last=False)[1])
        return text

    def _chunk(self, name: str) -> list[str]:
        """The words of one chunk of a stream. A hash, because seeding a Random takes four times as long."""
        words, count = self._words, len(self._words)
        return [words[n % count] for n in array("H", shake_128(name.encode()).digest(2 * _CHUNK_TOKENS))]

    def body(self, turn: Turn, answers: Mapping[int, str], *, api: Api, model: str, extra: Mapping[str, Any]) -> bytes:
        """The request of one turn. `answers` has the real replies by the content that stands for them."""
        asked: dict[str, Any] = {"model": turn.adapter or model, "max_tokens": turn.output_tokens, "stream": True}
        asked |= {"stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0}
        asked |= extra
        if api == "completions":
            asked["prompt"] = "".join(answers.get(s.content, "") or self.text(s) for s in turn.prompt)
        else:
            asked["messages"] = self._messages(turn.prompt, answers)
        return _encode({k: v for k, v in asked.items() if v is not None})

    def _messages(self, prompt: Sequence[Segment], answers: Mapping[int, str]) -> list[dict[str, str]]:
        """The first of several segments is the system prompt; answers are the assistant's; the rest is the user's."""
        messages: list[dict[str, str]] = []
        for n, segment in enumerate(prompt):
            if segment.content in answers:
                messages.append({"role": "assistant", "content": answers[segment.content]})
            elif not n and len(prompt) > 1:
                messages.append({"role": "system", "content": self.text(segment)})
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += self.text(segment)
            else:
                messages.append({"role": "user", "content": self.text(segment)})
        return messages
