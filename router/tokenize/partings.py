"""Prompts that part early from a near-identical one: found in a sample of live requests, with the likely cause.

A timestamp at the front of a system prompt costs every cache hit behind it, and looks like nothing at all. No text of a
prompt is kept beyond a small ring in memory, and none is shown.
May import: the standard library, msgspec, router.tokenize.parting.
"""

import re
import threading
from collections import Counter, deque
from typing import Any

import msgspec

from router.tokenize.parting import Cause, Parting, Render, common_length, diff

KEPT_PROMPTS = 32
KEPT_MAX_BYTES = 256 * 1024  # of one body
SHOWN = 20
_SENTENCES_MIN, _SENTENCES_MAX = 8, 400
_ALIKE_RATIO = 0.6  # of the shorter prompt's sentences
_EARLY_RATIO = 0.5  # of the shorter prompt's length
_SENTENCE = re.compile(r"(?<=[.!?\n])\s*")


class _Kept(msgspec.Struct, frozen=True):
    body: dict[str, Any]
    text: str
    sentences: frozenset[int]


class PartingWatch:
    """One model's. `take` on the event loop, `examine` in a thread."""

    def __init__(self, *, one_in: int) -> None:
        self._one_in = one_in
        self._until_next = one_in
        self._kept: deque[_Kept] = deque(maxlen=KEPT_PROMPTS)
        self._lock = threading.Lock()
        self.examined_requests = 0
        self.causes: Counter[Cause] = Counter()
        self.lost_tokens = 0
        self._recent: deque[Parting] = deque(maxlen=SHOWN)

    def take(self, body_bytes: int) -> bool:
        """Shall this request be looked at? `one_in` 0: none is."""
        if not self._one_in or body_bytes > KEPT_MAX_BYTES:
            return False
        self._until_next -= 1
        if self._until_next > 0:
            return False
        self._until_next = self._one_in
        return True

    def examine(self, raw: bytes, text: str, render_prompt: Render) -> Cause | None:
        """Compare with the prompts kept; the cause if it parts early from one much like it. Raises ValueError."""
        body = msgspec.json.decode(raw)
        new = _Kept(body=body, text=text, sentences=_sentences(text))
        with self._lock:
            like = next((old for old in reversed(self._kept) if _parts_early(old, new)), None)
            self._kept.append(new)
            self.examined_requests += 1
        if like is None:
            return None
        found = diff(like.body, body, render_prompt)
        if found.cause in ("none", "continuation"):
            return None
        with self._lock:
            self.causes[found.cause] += 1
            self.lost_tokens += found.b_tokens - found.shared_tokens
            self._recent.append(found)
        return found.cause

    def details(self) -> dict[str, Any]:
        """For /debug/prefixes, JSON-able; no text."""
        with self._lock:
            recent = [
                {
                    "cause": p.cause,
                    "advice": p.advice,
                    "shared_tokens": p.shared_tokens,
                    "lost_tokens": p.b_tokens - p.shared_tokens,
                }
                for p in reversed(self._recent)
            ]
            return {
                "examined": self.examined_requests,
                "causes": dict(self.causes),
                "lost_tokens": self.lost_tokens,
                "recent": recent,
            }


def _sentences(text: str) -> frozenset[int]:
    return frozenset(hash(s) for s in _SENTENCE.split(text, maxsplit=_SENTENCES_MAX)[:_SENTENCES_MAX] if len(s) > 8)


def _parts_early(old: _Kept, new: _Kept) -> bool:
    """Much the same sentences, but little in common at the front? Tenants' salts and other models do not count."""
    if any(old.body.get(name) != new.body.get(name) for name in ("model", "cache_salt")):
        return False
    least = min(len(old.sentences), len(new.sentences))
    if least < _SENTENCES_MIN or len(old.sentences & new.sentences) < _ALIKE_RATIO * least:
        return False
    return common_length(old.text, new.text) < _EARLY_RATIO * min(len(old.text), len(new.text))
