"""The index in Redis or Valkey, as the router reads it. The schema is in lua.py, the writer in redis_writer.py.

Redis may never hurt a request: one deadline for the whole lookup, a breaker, connections that survive cancellation, and
a background task that brings everything back by itself. Losing Redis is IndexUnavailable; losing its content is an
empty answer until the indexers have filled it again. May import: router.core, router.index, router.ops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from redis.exceptions import RedisError

from router.core.matching import depths
from router.core.types import BlockKey, Clock, IndexUnavailable, Tier, WorkerAddress
from router.index.breaker import Breaker
from router.index.link import Link, words
from router.index.lua import SCHEMA, block_prefixes, fingerprint
from router.index.near import NearCache
from router.index.port import Held, RemovalListener, held_by_address
from router.index.redis_writer import RedisIndexWriter
from router.index.registry import EMPTY, Attendance, Registry, parse_registry
from router.ops import Metrics

log = logging.getLogger("warmroute.index")

__all__ = ["RedisIndexReader", "RedisIndexWriter"]

_FIRST_STEP_BLOCKS = 128
REFRESH_S = 0.25


class RedisIndexReader:
    """IndexReader over Redis. `start` never fails because Redis is away."""

    def __init__(
        self,
        url: str,
        *,
        seed: str,
        metrics: Metrics,
        deadline_s: float = 0.020,
        clock: Clock = time.monotonic,
        max_connections: int = 8,
        near_cache_s: float = 1.0,
    ) -> None:
        self._link = Link(url, max_connections=max_connections)
        fp = fingerprint(seed)
        self._fp = fp
        self._reg, self._ver, self._feed = (f"warmroute:{SCHEMA}:{fp}:{x}".encode() for x in ("reg", "ver", "feed"))
        self._deadline_s, self._clock, self._metrics = deadline_s, clock, metrics
        self._breaker = Breaker(clock)
        self._registry: Registry = EMPTY
        self._sizes: dict[WorkerAddress, int] = {}  # outlives the registry: an emptied Redis changes no block size
        self._prefixes: dict[Tier, bytes] = {}
        self._near = NearCache(near_cache_s, clock)
        self._listeners: list[RemovalListener] = []
        self._feed_up, self._feed_missed = False, True  # what was remembered before the feed is up went unheard
        self._said_up = True
        self._attendance, self._unattended = Attendance(), 0
        self._expected: Callable[[], Iterable[WorkerAddress]] = tuple
        self._refreshed_s: float | None = None
        self._last_error: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._hurry = asyncio.Event()

    def expect(self, workers: Callable[[], Iterable[WorkerAddress]]) -> None:
        """`workers()` have events now, so an indexer should keep them: a seed of its own or none at all shows so."""
        self._expected = workers

    async def start(self) -> None:
        """Read the registry if Redis is there, and keep reading it."""
        with contextlib.suppress(IndexUnavailable):
            await self._refresh(1.0)
        self._tasks = [
            asyncio.create_task(self._keep_fresh(), name="index-registry"),
            asyncio.create_task(self._listen_to_feed(), name="index-feed"),
        ]

    async def close(self) -> None:
        """Stop and disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    # -- what the router asks ---------------------------------------------------------------------------------

    async def holders(self, keys: Sequence[BlockKey]) -> Mapping[WorkerAddress, Held]:
        """See IndexReader."""
        if not keys:
            return {}
        if not self._breaker.allows():
            raise IndexUnavailable("breaker_open")
        started_s = self._clock()
        try:
            answer = await self._holders(keys, started_s + self._deadline_s)
        except IndexUnavailable as exc:
            self._last_error = f"lookup: {exc}"
            if exc.reason != "busy":
                self._breaker.failed(began_s=started_s)
            raise
        finally:
            self._metrics.index_lookup_seconds.observe(self._clock() - started_s)
        self._breaker.succeeded()
        return answer

    def block_sizes(self) -> Mapping[WorkerAddress, int]:
        """Block size in tokens per worker, as the indexers learnt it."""
        return self._sizes

    def listen(self, listener: RemovalListener) -> None:
        """Tell this listener of every removal and clear from now on."""
        self._listeners.append(listener)

    def status(self) -> dict[str, Any]:
        """For /debug/pods and /ready."""
        registry = self._registry
        return {
            "store": "redis",
            "breaker": self._breaker.state,
            "registry_age_s": None if self._refreshed_s is None else round(self._clock() - self._refreshed_s, 3),
            "epoch": registry.epoch,
            "live_slots": len(registry.names),
            "retired_slots": registry.retired_slots,
            "unattended_workers": self._unattended,
            "feed_connected": self._feed_up,
            "near_cache_blocks": len(self._near),
            "last_error": self._last_error,
        }

    async def dump(self, address: WorkerAddress) -> set[BlockKey]:
        """Every block on the worker's GPU tier, by a scan of the whole index: for checks, never for requests."""
        await self._refresh(5.0)
        registry = self._registry
        slots = sum(1 << slot for slot, name in registry.names.items() if name == address)
        prefix = self._prefixes.get("gpu")
        held: set[BlockKey] = set()
        cursor: bytes | str = "0"
        while prefix and slots:
            command = ("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", 2000)
            cursor, names = (await self._link.call(command, deadline_s=10.0))[0]
            names = [n for n in names if len(n) == len(prefix) + 8]
            values = (await self._link.call(("MGET", self._ver, *names), deadline_s=10.0))[0][1:] if names else []
            held |= {
                BlockKey(n[len(prefix) :])
                for n, v in zip(names, values, strict=True)
                if v and int.from_bytes(v, "little") & slots
            }
            if cursor == b"0":
                break
        return held

    # -- lookup -----------------------------------------------------------------------------------------------

    async def _holders(self, keys: Sequence[BlockKey], ends_s: float) -> Mapping[WorkerAddress, Held]:
        for _ in range(3):
            registry = self._registry
            walks: list[Mapping[int, int]] = []
            columns: list[list[int]] = []
            current = True
            for tier in registry.tiers:
                column, current = await self._column(registry, tier, keys, ends_s)
                if not current:
                    break
                columns.append(column)
                walks.append(depths(_or(columns), registry.live_mask))
            if current:
                walks = _all_tiers(walks, registry.tiers)
                return held_by_address(walks, registry.names)
            await self._refresh(ends_s - self._clock())
            if self._registry is EMPTY:
                return {}
        raise IndexUnavailable("reply")  # it changes faster than we can read it

    async def _column(
        self, registry: Registry, tier: Tier, keys: Sequence[BlockKey], ends_s: float
    ) -> tuple[list[int], bool]:
        """Bitmaps of the chain's blocks on one tier; False if the registry is old.

        With one tier in use it ends at the first block that nobody holds; with several, holes may be filled by others.
        """
        whole = len(registry.tiers) > 1
        column = self._near.head(tier, keys)
        self._metrics.near_cache_hits.inc(len(column))
        alive = registry.live_mask
        for bitmap in column:
            alive &= bitmap
        prefix = self._prefixes.get(tier, b"none")
        limit = len(column) + (len(keys) if whole else _FIRST_STEP_BLOCKS)
        while len(column) < len(keys) and (alive or whole or not column):  # asked once at least: is the registry old?
            some = keys[len(column) : limit]
            reply = await self._mget([prefix + k for k in some], ends_s)
            if reply[0] != registry.version:
                return [], False
            found = [int.from_bytes(v, "little") if v else 0 for v in reply[1:]]
            if tier == "gpu":
                self._near.saw(some, found)
            column += found
            for bitmap in found:
                alive &= bitmap
            limit = len(keys)
        return column, True

    async def _mget(self, names: list[bytes], ends_s: float) -> list[Any]:
        # Something is always left: it may have been us who stood still while the first step's reply lay there.
        left_s = max(ends_s - self._clock(), self._deadline_s / 4)
        reply = (await self._link.call(("MGET", self._ver, *names), deadline_s=left_s))[0]
        if not isinstance(reply, list) or len(reply) != len(names) + 1:
            raise IndexUnavailable("reply")
        return [r if isinstance(r, bytes) else None for r in reply]

    # -- registry ---------------------------------------------------------------------------------------------

    async def _refresh(self, deadline_s: float) -> None:
        if deadline_s <= 0:
            raise IndexUnavailable("deadline")
        flat, version = await self._link.call(("HGETALL", self._reg), ("GET", self._ver), deadline_s=deadline_s)
        if not isinstance(flat, list):
            raise IndexUnavailable("reply")
        registry = parse_registry(flat) if version else EMPTY
        self._refreshed_s = self._clock()
        self._tell_unattended(self._attendance.unattended(registry, self._refreshed_s, self._expected()))
        self._take(registry)

    def _take(self, registry: Registry) -> None:
        before, self._registry = self._registry, registry
        if registry.version == before.version:
            self._registry = before
        elif registry.epoch != before.epoch:
            self._prefixes = block_prefixes(self._fp, registry.epoch)
            self._near.clear()
        if registry.version != before.version and registry is not EMPTY:
            known = {a: n for a, n in self._sizes.items() if len(self._sizes) < 4096 or a in registry.lives}
            self._sizes = {**known, **registry.sizes}
        again = self._feed_up and self._feed_missed  # removals went unheard for a while
        self._feed_missed &= not again
        for address, life in registry.lives.items():
            life_before = before.lives.get(address)
            if (life_before is not None and life_before != life) or again:
                self._tell_cleared(address)
        for address in before.lives.keys() - registry.lives.keys() if registry is not EMPTY else ():
            self._tell_cleared(address)

    def _tell_cleared(self, address: WorkerAddress) -> None:
        for listener in self._listeners:
            listener.cleared(address)

    async def _keep_fresh(self) -> None:
        """Read the registry again and again; while the breaker is open this is also what closes it."""
        while True:
            self._hurry.clear()
            started_s = self._clock()
            try:
                await self._refresh(1.0)
            except IndexUnavailable as exc:
                self._last_error = f"registry: {exc}"
                self._breaker.failed()
            else:
                if self._clock() - started_s <= self._deadline_s:
                    self._breaker.probed()
            self._tell_whether_up(self._breaker.allows())
            self._metrics.near_cache_blocks.set(len(self._near))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._hurry.wait()

    def _tell_whether_up(self, up: bool) -> None:
        self._metrics.index_up.set(up)
        if self._said_up and not up:
            says = "the shared index does not answer: requests go by what this router routed itself until it does"
            log.warning(says, extra={"fields": {"error": self._last_error}})
        elif up and not self._said_up:
            log.info("the shared index answers again")
        self._said_up = up

    def _tell_unattended(self, workers: int) -> None:
        """What they hold is believed all the same (ADR 11)."""
        if workers and not self._unattended:
            says = "no indexer keeps the shared index for some workers: what it says of them grows old"
            log.warning(says, extra={"fields": {"workers": workers}})
        self._unattended = workers
        self._metrics.index_unattended_workers.set(workers)

    # -- feed -------------------------------------------------------------------------------------------------

    async def _listen_to_feed(self) -> None:
        """Removals as they happen: for the near cache, and for whoever listens."""
        while True:
            conn = None
            try:
                conn = await self._link.connection()
                await conn.send_command("SUBSCRIBE", self._feed)
                await conn.read_response(timeout=5.0)
                self._feed_up = True
                self._near.enable()
                self._hurry.set()
                while True:
                    message = await conn.read_response(timeout=math.inf)
                    if isinstance(message, list) and len(message) == 3:
                        self._heard(message[2])
            except (RedisError, OSError, TimeoutError, IndexUnavailable) as exc:
                self._last_error = f"feed: {words(exc)}"
                await asyncio.sleep(0.5)
            finally:
                self._near.disable()
                self._feed_missed |= self._feed_up
                self._feed_up = False
                if conn is not None:
                    await self._link.drop(conn)

    def _heard(self, message: bytes) -> None:
        if message[:1] == b"v":
            self._hurry.set()
            return
        head, _, blob = message[1:].partition(b"\n")
        pod, _, rank = head.decode().rpartition("#")
        address = WorkerAddress(pod, int(rank))
        keys = [BlockKey(blob[i : i + 8]) for i in range(0, len(blob), 8)]
        self._near.forget(keys)
        for listener in self._listeners:
            listener.removed(address, keys)


def _or(columns: list[list[int]]) -> Iterable[int]:
    return columns[0] if len(columns) == 1 else (reduce(or_, bits) for bits in zip(*columns, strict=True))


def _all_tiers(walks: list[Mapping[int, int]], tiers: tuple[Tier, ...]) -> list[Mapping[int, int]]:
    """One walk for each of gpu, cpu, storage; a tier that is not in use adds nothing to the one before it."""
    by_tier = dict(zip(tiers, walks, strict=True))
    gpu = by_tier["gpu"]
    cpu = by_tier.get("cpu", gpu)
    return [gpu, cpu, by_tier.get("storage", cpu)]
