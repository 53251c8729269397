"""When to stop asking a store that does not answer. Pure but for the clock handed in.

May import: router.core.
"""

import math
from typing import Literal

from router.core.types import Clock

FAILURES = 3
OPEN_FIRST_S, OPEN_MAX_S = 0.25, 2.0


class Breaker:
    """Opens after three failures in a row, of calls that were made one after the other: those that waited at the same
    time saw one and the same stall. Requests do not probe it: a background task does, and closes it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._failed_s = -math.inf
        self._open = False
        self._since_s = 0.0
        self._rest_s = OPEN_FIRST_S

    @property
    def state(self) -> Literal["closed", "open"]:
        return "open" if self._open else "closed"

    def allows(self) -> bool:
        """May a request ask?"""
        return not self._open

    def failed(self, *, began_s: float = math.inf) -> None:
        """A call, made at `began_s`, gave no answer in time."""
        if began_s < self._failed_s:
            return
        self._failed_s = self._clock()
        self._failures += 1
        if not self._open and self._failures >= FAILURES:
            self._open, self._since_s = True, self._clock()
        elif self._open:
            self._since_s = self._clock()
            self._rest_s = min(2 * self._rest_s, OPEN_MAX_S)

    def succeeded(self) -> None:
        """A request got its answer."""
        self._failures = 0

    def probed(self) -> None:
        """The background task got an answer within a request's deadline."""
        if self._open and self._clock() - self._since_s < self._rest_s:
            return  # one quick answer right after many slow ones proves little
        self._open, self._failures, self._rest_s = False, 0, OPEN_FIRST_S
