"""Faults that an emulated pod can be told to have, one at a time. Pure.

May import: the standard library, msgspec.
"""

from random import Random
from typing import Literal

import msgspec

FaultKind = Literal["none", "500", "503", "shutdown", "hang", "reset", "freeze", "slow"]
"""500, 503: answered so. shutdown: vLLM's 500 while it drains. hang: no reply at all. reset: the connection breaks
(in the middle of the answer if `after_tokens` is set). freeze: the answer stops, nothing closes. slow: longer steps."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What POST /emulated/fault takes. A request is hit with chance `share`, and at most `count` of them are."""

    kind: FaultKind
    share: float = 1.0
    count: int | None = None
    after_tokens: int = 0
    retry_after_s: float = 1.0
    factor: float = 1.0  # slow: how many times longer a step lasts
    health: bool = False  # /health fails with 503 as well

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError("share must be between 0 and 1")
        if self.factor <= 0 or self.after_tokens < 0 or (self.count is not None and self.count < 0):
            raise ValueError("factor must be above 0; after_tokens and count at least 0")


NO_FAULT = Fault(kind="none")


class FaultSwitch:
    """The fault in force, and whom it hits."""

    def __init__(self, seed: int = 0) -> None:
        self.fault = NO_FAULT
        self.hits = 0
        self._rng = Random(seed)

    def set(self, fault: Fault) -> None:
        self.fault = fault
        self.hits = 0

    def draw(self) -> Fault:
        """The fault that the next request meets."""
        f = self.fault
        if f.kind in ("none", "slow") or (f.count is not None and self.hits >= f.count):
            return NO_FAULT
        if f.share < 1 and self._rng.random() >= f.share:
            return NO_FAULT
        self.hits += 1
        return f
