"""Stored responses live in one pod's memory: which pod holds which id. Pure.

Bounded and forgetful: an id that is not known here (another router stored it, or it is old) is looked for pod by pod.
May import: the standard library.
"""

from __future__ import annotations

import re
from collections import OrderedDict

HOMES_MAX = 100_000
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')


class ResponseHomes:
    """Least recently used first out."""

    def __init__(self, size: int = HOMES_MAX) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._size = size

    def remember(self, response_id: str, pod: str) -> None:
        """`pod` (its identity) stores this response."""
        self._homes[response_id] = pod
        self._homes.move_to_end(response_id)
        if len(self._homes) > self._size:
            self._homes.popitem(last=False)

    def home(self, response_id: str) -> str | None:
        """The pod's identity, or None."""
        pod = self._homes.get(response_id)
        if pod is not None:
            self._homes.move_to_end(response_id)
        return pod


def find_response_id(beginning: bytes) -> str | None:
    """The id in the beginning of a /v1/responses reply, streamed or not: it is the first `id` in both."""
    found = _ID.search(beginning)
    return found.group(1).decode("utf-8", "replace") if found is not None else None
