"""Is a worker worth another request? One breaker per life of a worker. Pure: the time is handed in.

Closed: requests go. Open: none, for a while that doubles. Half-open: one trial at a time decides.
4xx, 429 and 503 are no faults; a single 5xx is not one either, since one client's poisonous request must not take pod
after pod out of service.
May import: the standard library, router.policy.retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from router.policy.retry import FailureKind

BreakerState = Literal["closed", "open", "half_open"]

FAULTS_TO_OPEN: Mapping[FailureKind, int] = {
    "connect": 1,
    "shutting_down": 1,
    "reset": 3,
    "malformed": 3,
    "timeout": 3,
    "status_5xx": 5,
}
"""Faults in a row, of this kind or mixed, after which the breaker opens. Kinds that are absent are no faults."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
TRIAL_LIMIT_S = 10.0  # a trial whose outcome nobody tells (its client left) does not block the next for longer


class Breaker:
    """Counts faults in a row; any proper answer closes it."""

    __slots__ = ("_faults", "_open", "_pause_s", "_trial_until_s", "_until_s", "answers")

    def __init__(self) -> None:
        self._faults = 0
        self._open = False
        self._until_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._trial_until_s = 0.0
        self.answers = True  # its last fault was an answer, a 5xx: it may be the request that is ill

    def allows(self, *, now_s: float) -> bool:
        """A request may be sent to the worker now."""
        return not self._open or (now_s >= self._until_s and now_s >= self._trial_until_s)

    def sent(self, *, now_s: float) -> None:
        """A request was sent: while the breaker is half-open it is the trial, and no other goes along."""
        if self._open and now_s >= self._until_s:
            self._trial_until_s = now_s + TRIAL_LIMIT_S

    def succeeded(self, *, now_s: float) -> None:
        """The worker gave a proper answer. Late answers from before it opened do not count as the trial's."""
        if self._open and now_s < self._until_s:
            return
        self._faults = 0
        self._open = False
        self._pause_s = FIRST_PAUSE_S
        self._trial_until_s = 0.0

    def failed(self, kind: FailureKind, *, now_s: float) -> None:
        """A request to the worker went wrong."""
        needed = FAULTS_TO_OPEN.get(kind)
        if needed is None:
            if self._open:
                self.succeeded(now_s=now_s)  # it answers, and says that it is busy: that is not ill
            return
        self.answers = kind == "status_5xx"
        if self._open:
            if now_s >= self._until_s:  # the trial failed; what else comes late changes nothing
                self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
                self._until_s = now_s + self._pause_s
                self._trial_until_s = 0.0
            return
        self._faults += 1
        if self._faults >= needed:
            self._open = True
            self._until_s = now_s + self._pause_s

    def state(self, *, now_s: float) -> BreakerState:
        """For people and metrics."""
        if not self._open:
            return "closed"
        return "half_open" if now_s >= self._until_s else "open"
