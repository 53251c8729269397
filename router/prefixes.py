"""Which prefixes are worth having: how often each was found in a cache, and the tokens it saved. Pure.

A prefix is named by the key of its last block: a system prompt that many requests share shows up as one row.
May import: the standard library, router.core.
"""

from typing import Any

from router.core.types import BlockKey


class PrefixTable:
    """Bounded; when full, the half that saved least is forgotten."""

    def __init__(self, rows_max: int = 1024) -> None:
        self._rows_max = rows_max
        self._rows: dict[BlockKey, list[int]] = {}  # requests, tokens saved, tokens of the prefix

    def note(self, key: BlockKey | None, *, depth_tokens: int, saved_tokens: int) -> None:
        """A request began with this prefix (None: with nothing known); its pod had `saved_tokens` of the prompt."""
        if key is None:
            return
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._rows_max:
                best = sorted(self._rows.items(), key=lambda item: item[1][1], reverse=True)
                self._rows = dict(best[: self._rows_max // 2])
            self._rows[key] = [1, saved_tokens, depth_tokens]
            return
        row[0] += 1
        row[1] += saved_tokens

    def top(self, count: int = 20) -> list[dict[str, Any]]:
        """The prefixes that saved most, JSON-able."""
        best = sorted(self._rows.items(), key=lambda item: item[1][1], reverse=True)[:count]
        return [
            {"prefix": key.hex(), "prefix_tokens": depth, "requests": requests, "saved_tokens": saved}
            for key, (requests, saved, depth) in best
        ]
