"""Looking again because somebody asked for what nobody is known to have: shared, limited in rate and in time.

May import: the standard library, router.core.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from router.core.types import Clock


class Reread:
    """Runs `look`, one at a time and at most one in `interval_s`. Who asks meanwhile waits for the one under way."""

    def __init__(
        self, look: Callable[[], Awaitable[None]], *, interval_s: float, limit_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._look, self._interval_s, self._limit_s, self._clock = look, interval_s, limit_s, clock
        self._task: asyncio.Task[None] | None = None
        self._begun_s = float("-inf")

    async def now(self) -> bool:
        """Wait for a look, at most `limit_s`. False: there was one a moment ago, so none was made."""
        if self._task is None or self._task.done():
            if self._clock() - self._begun_s < self._interval_s:
                return False
            self._begun_s = self._clock()
            self._task = asyncio.create_task(self._bounded(), name="reread")
        await asyncio.shield(self._task)  # one client that leaves does not end it for the others
        return True

    async def _bounded(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                await self._look()

    async def close(self) -> None:
        """End the look that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
