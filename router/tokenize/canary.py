"""Do our ids equal the engine's? Comparing and counting; which requests to compare. Pure.

A router that tokenizes otherwise than the engine loses every cache hit without any error, so this is asked for ever: of
the first requests of a model always, then of a small share.
May import: the standard library, msgspec.
"""

from collections import deque
from typing import Any

import msgspec

ALWAYS_FIRST_REQUESTS = 20
WINDOW_REQUESTS = 20
SUSPECT_FROM = 2  # one difference may be a race with a pod that is being replaced


class Difference(msgspec.Struct, frozen=True):
    """Where two prompts part. `index` counts tokens from 0."""

    index: int
    ours: int | None  # the token there; None: our prompt ends
    theirs: int | None
    our_tokens: int
    their_tokens: int


def first_difference(ours: bytes, theirs: bytes) -> Difference | None:
    """Of packed ids (router.core.hashing.pack_tokens); None: equal."""
    if ours == theirs:
        return None
    a, b = memoryview(ours).cast("I"), memoryview(theirs).cast("I")
    low, high = 0, min(len(a), len(b))
    while low < high:  # the longest common beginning, by halving: slices compare in C
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return Difference(
        index=low,
        ours=a[low] if low < len(a) else None,
        theirs=b[low] if low < len(b) else None,
        our_tokens=len(a),
        their_tokens=len(b),
    )


class Parity:
    """One model's record."""

    def __init__(self, *, one_in: int) -> None:
        self._one_in = one_in
        self._until_next = 0
        self._taken = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW_REQUESTS)
        self.compared_requests = 0
        self.differed_requests = 0
        self.last: Difference | None = None

    def take(self) -> bool:
        """Shall this request be compared? `one_in` 0: never."""
        if not self._one_in:
            return False
        if self._taken >= ALWAYS_FIRST_REQUESTS:
            self._until_next -= 1
            if self._until_next > 0:
                return False
            self._until_next = self._one_in
        self._taken += 1
        return True

    def record(self, difference: Difference | None) -> bool:
        """Count one comparison. True when the model has just become suspect: the moment to say it loudly."""
        was_suspect = self.is_suspect
        self.compared_requests += 1
        self._recent.append(difference is not None)
        if difference is not None:
            self.differed_requests += 1
            self.last = difference
        return self.is_suspect and not was_suspect

    @property
    def is_suspect(self) -> bool:
        """Several of the last comparisons differed."""
        return sum(self._recent) >= SUSPECT_FROM

    def details(self) -> dict[str, Any]:
        """For /ready details, JSON-able; no text of any prompt."""
        return {
            "compared": self.compared_requests,
            "differed": self.differed_requests,
            "suspect": self.is_suspect,
            **({"last_difference": msgspec.to_builtins(self.last)} if self.last is not None else {}),
        }
