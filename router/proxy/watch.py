"""One deadline for one exchange with a pod: what we wait for now, since when, for how long at most.

A timer per phase would cost a heap entry per chunk; here a chunk only notes the time, and the timer, when it fires,
looks whether anything came meanwhile. A pod that is known to be gone gets a short limit on all its streams at once.
May import: the standard library, asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

Waiting = Literal["first_byte", "idle", "client", "gone", "shutdown"]
"""What we wait for: the pod's first byte, its next one, the client to read, a pod that is gone, nothing: we stop."""


class Watch:
    """Bounds the waiting inside one `asyncio.timeout(None)` block, which ends with TimeoutError when time is up."""

    __slots__ = (
        "_armed_for_s",
        "_gone_limit_s",
        "_limit_s",
        "_loop",
        "_since_s",
        "_timeout",
        "_timer",
        "expired",
        "on",
    )

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_s = float("inf")
        self._since_s = 0.0
        self._limit_s = float("inf")
        self._gone_limit_s: float | None = None
        self.on: Waiting = "first_byte"
        self.expired: Waiting | None = None

    def wait_for(self, on: Waiting, limit_s: float) -> None:
        """From now on we wait for `on`, at most `limit_s`."""
        self.on = on
        self._limit_s = limit_s
        self._since_s = now_s = self._loop.time()
        if on != "client" and self._gone_limit_s is not None:
            limit_s = min(limit_s, self._gone_limit_s)
        if now_s + limit_s < self._armed_for_s:
            self._arm(now_s + limit_s)

    def pod_is_gone(self, limit_s: float) -> None:
        """The pod will not come back: silence longer than `limit_s` from now on ends the exchange."""
        self._gone_limit_s = limit_s
        now_s = self._loop.time()
        self._since_s = max(self._since_s, now_s)
        if now_s + limit_s < self._armed_for_s:
            self._arm(now_s + limit_s)

    def shut_down(self) -> None:
        """End the exchange now: the router's own time is up."""
        self.expired = "shutdown"
        self._timeout.reschedule(self._loop.time())

    def stop(self) -> None:
        """Nothing is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for_s = at_s
        self._timer = self._loop.call_at(at_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._armed_for_s = float("inf")
        limit_s, cause = self._limit_s, self.on
        if self._gone_limit_s is not None and self.on != "client" and self._gone_limit_s < limit_s:
            limit_s, cause = self._gone_limit_s, "gone"
        now_s = self._loop.time()
        if now_s < self._since_s + limit_s:
            self._arm(self._since_s + limit_s)
            return
        self.expired = cause
        self._timeout.reschedule(now_s)


class GoneWatch:
    """Who is reading from which pod, so that all of them learn at once when that life of the pod is over."""

    def __init__(self, gone: Callable[[str], asyncio.Event], *, limit_s: float) -> None:
        self._gone = gone
        self._limit_s = limit_s
        self._readers: dict[asyncio.Event, set[Watch]] = {}
        self._all: set[Watch] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, pod: str, watch: Watch) -> asyncio.Event:
        """Begin; give the event back to `remove`."""
        self._all.add(watch)
        event = self._gone(pod)
        if event.is_set():
            watch.pod_is_gone(self._limit_s)
            return event
        readers = self._readers.get(event)
        if readers is None:
            readers = self._readers[event] = set()
            task = asyncio.create_task(self._tell(event), name=f"gone-watch {pod}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        readers.add(watch)
        return event

    def remove(self, event: asyncio.Event, watch: Watch) -> None:
        """The exchange is over."""
        self._all.discard(watch)
        readers = self._readers.get(event)
        if readers is not None:
            readers.discard(watch)

    def shut_down(self) -> None:
        """End every exchange now, visibly."""
        for watch in list(self._all):
            watch.shut_down()

    async def _tell(self, event: asyncio.Event) -> None:
        try:
            await event.wait()
            for watch in self._readers.get(event, ()):
                watch.pod_is_gone(self._limit_s)
        finally:
            self._readers.pop(event, None)

    async def close(self) -> None:
        """Stop watching."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
