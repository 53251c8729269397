"""Routers tell each other what they have under way, through a channel of the Redis that holds the index.

Lossy on purpose: a message that does not arrive is out of date a tenth of a second later. Redis away: everybody counts
alone, by scrapes. May import: router.peers, router.index, router.fleet, router.core, router.ops, msgspec, redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from router.core.types import IndexUnavailable
from router.fleet.bookings import Bookings
from router.index.link import Link
from router.index.local import LocalView
from router.index.lua import SCHEMA, fingerprint
from router.ops import Metrics
from router.peers import HEARD_TTL_S, Peers

ALONE_INTERVAL_S = 1.0  # while nobody else listens
TELL_DEADLINE_S = 0.5
RETRY_S = 0.5
WHATS = ("told", "not_told", "not_understood")
log = logging.getLogger("warmroute.exchange")


class Exchange:
    """Two tasks: one tells, one hears. `peers` is what came of it."""

    def __init__(
        self,
        url: str,
        *,
        seed: str,
        bookings: Bookings,
        local: LocalView,
        metrics: Metrics,
        interval_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peers = Peers(secrets.token_bytes(8), interval_s=interval_s)
        self._interval_s = interval_s
        self._link = Link(url, max_connections=1)
        self._channel = f"warmroute:{SCHEMA}:{fingerprint(seed)}:peers".encode()
        self._bookings, self._local, self._clock = bookings, local, clock
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics = metrics
        metrics.peers.set_function(lambda: self.peers.count(self._clock()))
        metrics.peers_age_seconds.set_function(lambda: self.peers.age_s(self._clock()))
        self._listening = False

    async def start(self) -> None:
        """Never fails: Redis may come later."""
        self._tasks = [
            asyncio.create_task(self._tell_for_ever(), name="exchange-tell"),
            asyncio.create_task(self._hear_for_ever(), name="exchange-hear"),
        ]

    async def close(self) -> None:
        """Stop and disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    def status(self) -> dict[str, Any]:
        """For /debug/pods."""
        return {
            "peers": self.peers.count(self._clock()),
            "oldest_age_s": round(self.peers.age_s(self._clock()), 3),
            "listening": self._listening,
            "interval_ms": round(self._interval_s * 1000, 3),
            **{what: int(self._metrics.value("warmroute_peer_messages_total", what=what)) for what in WHATS},
        }

    async def _tell_for_ever(self) -> None:
        while True:
            interval_s = max(ALONE_INTERVAL_S, self._interval_s)
            message = self.peers.tell(self._bookings)
            try:
                listeners = await self._link.call(("PUBLISH", self._channel, message), deadline_s=TELL_DEADLINE_S)
                self._metrics.peer_messages.labels("told").inc()
                if int(listeners[0]) > int(self._listening):
                    interval_s = self._interval_s
            except (IndexUnavailable, TypeError, ValueError):  # away, or not allowed to publish
                self._metrics.peer_messages.labels("not_told").inc()
            await asyncio.sleep(interval_s)

    async def _hear_for_ever(self) -> None:
        while True:
            conn = None
            try:
                conn = await self._link.connection()
                await conn.send_command("SUBSCRIBE", self._channel)
                await conn.read_response(timeout=5.0)
                self._listening = True
                while True:
                    message = await conn.read_response(timeout=math.inf)
                    if isinstance(message, list) and len(message) == 3:
                        self._hear(message[2])
            except (RedisError, OSError, TimeoutError, IndexUnavailable):
                await asyncio.sleep(RETRY_S)
            finally:
                self._listening = False
                if conn is not None:
                    await self._link.drop(conn)

    def _hear(self, message: bytes) -> None:
        try:
            heard = self.peers.hear(message, self._clock())
        except msgspec.DecodeError:  # another version's; our own schema is part of the channel's name
            self._metrics.peer_messages.labels("not_understood").inc()
            return
        for choice in heard:
            self._local.heard(choice.worker, choice.keys, ttl_s=HEARD_TTL_S)
