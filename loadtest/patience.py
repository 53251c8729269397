"""Wait, up to a limit, for a router and its pods that are still coming up.

A Job is installed together with pods that load for minutes, or runs while an older router is being replaced: what is
not there yet may come, and what is there may be the old router's last answers, so it must be well several times.
May import: the standard library, aiohttp, loadtest.pods, loadtest.run (its errors).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import aiohttp

from loadtest.pods import TIMEOUT
from loadtest.run import NotYet

PAUSE_S = 2.0
TIMES_IN_A_ROW = 3  # over connections of their own, which a Service may give to any router

_T = TypeVar("_T")


async def patiently(
    check: Callable[[], Awaitable[_T]],
    *,
    wait_s: float,
    tell: Callable[[str], object],
    pause_s: float | None = None,
) -> _T:
    """What `check` gives once it has been well several times in a row. Raises what it raised last, after `wait_s`."""
    if wait_s <= 0:
        return await check()
    ends_s = time.monotonic() + wait_s
    told, well = "", 0
    while True:
        try:
            found = await check()
            well += 1
            if well >= TIMES_IN_A_ROW:
                return found
        except NotYet as exc:
            if time.monotonic() >= ends_s:
                raise
            well = 0
            if str(exc) != told:
                told = str(exc)
                tell(f"waiting, {max(ends_s - time.monotonic(), 0):.0f} s at most: {told}")
        await asyncio.sleep(PAUSE_S if pause_s is None else pause_s)


async def all_pods_ready(urls: Sequence[str], headers: Mapping[str, str]) -> None:
    """Raises NotYet while a router knows of pods that take no requests yet; a pod of its own has no such page."""
    async with aiohttp.ClientSession(timeout=TIMEOUT, headers=dict(headers)) as http:
        for url in dict.fromkeys(urls):
            try:
                async with http.get(url + "/ready") as reply:
                    if reply.status == 404:
                        continue
                    told = await reply.json()
                    known, ready = int(told["pods_known"]), int(told["pods_ready"])
                    reasons = ", ".join(told["reasons"])
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as exc:
                raise NotYet(f"{url}/ready does not answer ({type(exc).__name__}); is it up?") from exc
            if reasons or ready < known:
                raise NotYet(f"{url} has {ready} of {known} pods ready{': ' + reasons if reasons else ''}")
