"""What every way of finding pods has in common: it tells the whole list, again and again. Pure.

The fleet diffs the lists; a discovery never says "added" or "removed", so nothing can be forgotten between two of
its words. May import: the standard library, msgspec, router.fleet.state.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from router.fleet.state import PodSpec

DiscoveredPod = PodSpec
"""A found pod is described like a configured one.

`identity` is the UID; `incarnation` changes exactly when the container that serves has started anew or the address is
another one. Pods that are not `ready` or are `terminating` are in the list: they take no new request, but
their streams in flight and their events still count. A pod that is not in the list is gone.
"""

OnPods = Callable[[Sequence[PodSpec]], None]
"""Gets the full list each time it differs from the last one. Quick, and on the event loop."""

RestartReason = Literal["gone", "unauthorized", "forbidden", "http", "connect", "timeout", "ended", "decode", "bug"]
"""Why a watch was begun anew. Closed: it is a metric label. `ended` is the normal end of a watch, once a minute."""


class DiscoveryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """For /ready, /debug/pods and doctor."""

    kind: str
    synced: bool  # a full list was read at least once
    last_sync_age_s: float | None  # since the last full list or the last word of the watch
    restarts: int  # loops begun anew for any other reason than a watch's normal end
    last_error: str | None  # what to tell the operator; None once a later list has worked
    problems: tuple[str, ...] = ()  # pods that could not be used as they are, and why


class Observer(Protocol):
    """Where a discovery counts."""

    def synced(self, kind: str) -> None:
        """The list is as the source has it now."""

    def restarted(self, kind: str, reason: RestartReason) -> None:
        """One loop ended and begins anew."""


class Discovery(Protocol):
    """Finds pods until it is cancelled."""

    async def run(self) -> None:
        """Never returns and survives every error; ends only by cancellation."""

    def status(self) -> DiscoveryStatus:
        """How it is doing."""


class Unobserved:
    """The Observer of those who do not count."""

    def synced(self, kind: str) -> None:
        """Nothing."""

    def restarted(self, kind: str, reason: RestartReason) -> None:
        """Nothing."""
