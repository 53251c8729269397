"""May we try again, and at whose cost? Pure.

A request is repeated only before the first byte of a reply went to the client, and only when the pod provably did not
run it (or, once and counted, when that cannot be known: a reset on a reused idle connection). Other workers each time.
May import: the standard library, msgspec.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FailureKind = Literal[
    "connect",  # no connection: nothing was sent
    "ambiguous",  # a reused idle connection was reset before any byte of a reply: the pod may have read the request
    "reset",  # the connection broke after the request went out on a fresh one: it may have run
    "shutting_down",  # vLLM's 500 "cannot schedule new futures after shutdown": it did not run
    "backpressure",  # 429 or 503: it did not run, and nobody is at fault
    "status_5xx",  # any other 5xx: it may have run
    "timeout",  # no first byte, or silence, for longer than the limit
    "malformed",  # not HTTP, or not HTTP that we pass on
]
"""What went wrong with one attempt. Closed: it is a metric label."""

SAFE: frozenset[FailureKind] = frozenset({"connect", "shutting_down", "backpressure"})
"""The pod provably did not run the request."""
FREE: frozenset[FailureKind] = frozenset({"connect"})
"""Trying again costs the fleet no work, so the budget does not count it: dead pods must not use up the share."""

Denied = Literal["unsafe", "attempts", "ambiguous_again", "ambiguous_off", "budget"]


class RetryRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of trying again."""

    attempts: int = 4  # in all, connects to dead pods apart: a request visits few pods, whatever happens
    connect_attempts: int = 16  # refused connections in all: as many dead pods as a fleet loses at once
    retry_ambiguous: bool = True


class Again(msgspec.Struct, frozen=True):
    """Try again. `same_worker`: on a fresh connection to the same pod, whose cache is warm and which is likely well."""

    same_worker: bool = False


class Enough(msgspec.Struct, frozen=True):
    """Do not. `reason` is a metric label."""

    reason: Denied


Verdict = Again | Enough


class RetryBudget:
    """Retries are a share of requests, plus a reserve, so that a sick fleet does not get its load multiplied."""

    __slots__ = ("_credit", "_ratio", "_reserve")

    def __init__(self, *, ratio: float = 0.2, reserve_retries: float = 20.0) -> None:
        self._ratio = ratio
        self._reserve = reserve_retries
        self._credit = reserve_retries

    def request(self) -> None:
        """A new request came in: it earns `ratio` of a retry."""
        self._credit = min(self._credit + self._ratio, self._reserve)

    def spend(self) -> bool:
        """Take one retry; False when the share is used up."""
        if self._credit < 1.0 - 1e-9:  # ten tenths are one
            return False
        self._credit -= 1.0
        return True


class Attempts:
    """What one request has tried so far."""

    __slots__ = ("ambiguous", "connects", "made")

    def __init__(self) -> None:
        self.made = 0  # that reached a pod
        self.connects = 0  # that did not
        self.ambiguous = 0

    def failed(self, kind: FailureKind) -> None:
        """Count one failed attempt."""
        if kind == "connect":
            self.connects += 1
        else:
            self.made += 1
        if kind == "ambiguous":
            self.ambiguous += 1


def may_retry(kind: FailureKind, attempts: Attempts, budget: RetryBudget, rules: RetryRules) -> Verdict:
    """After an attempt that failed with `kind` (already counted in `attempts`) and before any byte of a reply."""
    if kind not in SAFE and kind != "ambiguous":
        return Enough("unsafe")
    if kind == "ambiguous":
        if not rules.retry_ambiguous:
            return Enough("ambiguous_off")
        if attempts.ambiguous > 1:
            return Enough("ambiguous_again")
    if attempts.made >= rules.attempts or attempts.connects >= rules.connect_attempts:
        return Enough("attempts")
    if kind not in FREE and not budget.spend():
        return Enough("budget")
    return Again(same_worker=kind == "ambiguous")
