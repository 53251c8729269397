"""Composition root of the scribe: one consumer a worker, the store's housekeeping, and what an operator sees of both.

The same object runs inside the router (memory store) and as `warmroute index` (Redis).
May import: everything in indexer, router.core, router.index, router.fleet, router.ops, router.settings.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import zmq.asyncio

from indexer.consumer import Consumer, Limits
from indexer.plan import Ledger
from indexer.source import Inbox, Source, SourceSpec, SourceTimes
from router.core.types import Clock, IndexUnavailable, Tier, WorkerAddress
from router.index.port import IndexWriter, SnapshotStore
from router.ops import Metrics

log = logging.getLogger("warmroute.index")

NO_EVENTS_AFTER_S = 30.0

Activity = Literal["away", "idle", "busy"]
"""What a worker is doing: it takes no requests; it had none that would make an event; it had some, or nobody knows."""


class Indexer:
    """Keeps the index true for a set of workers. `set_pods` may be called at any time after `start`."""

    def __init__(
        self,
        writer: IndexWriter,
        *,
        seed: str,
        metrics: Metrics,
        clock: Clock = time.monotonic,
        mint: Callable[[], str] = lambda: secrets.token_hex(6),
        limits: Limits = Limits(),  # noqa: B008  frozen
        times: SourceTimes = SourceTimes(),  # noqa: B008  frozen
    ) -> None:
        self._writer, self._seed, self._metrics, self._clock, self._mint = writer, seed, metrics, clock, mint
        self._limits, self._times = limits, times
        self._context: zmq.asyncio.Context | None = None
        self._consumers: dict[WorkerAddress, Consumer] = {}
        self._since_s: dict[WorkerAddress, float] = {}
        self._up_s: dict[WorkerAddress, float] = {}  # when it was seen connected last
        self.activity: Callable[[WorkerAddress], Activity] = lambda _: "busy"  # whoever knows more sets it
        self._tasks: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._drops: dict[WorkerAddress, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._housekeeping: asyncio.Task[None] | None = None
        self._warned: set[WorkerAddress] = set()

    async def start(self) -> None:
        """Begin; pods may be set from now on."""
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 16_384)
        await self._writer.start()
        self._housekeeping = asyncio.create_task(self._keep_house(), name="index-housekeeping")

    async def close(self) -> None:
        """Stop every subscription. The index keeps what it was told."""
        tasks = [*self._tasks.values(), *self._drops.values(), *self._ending]
        tasks += [self._housekeeping] if self._housekeeping else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._consumers.clear()
        await self._writer.close()
        if self._context is not None:
            self._context.destroy(linger=0)

    def set_pods(self, specs: Sequence[SourceSpec]) -> None:
        """These and no others: new ones are subscribed to, those that are gone are dropped, the rest stay untouched."""
        wanted = {spec.address: spec for spec in specs}
        for address, consumer in list(self._consumers.items()):
            spec = wanted.get(address)
            if spec != consumer.source.spec:
                self._stop(address)
                if spec is None:
                    self._drops[address] = asyncio.create_task(self._drop(address))
        for address, spec in wanted.items():
            if address not in self._consumers:
                dropping = self._drops.pop(address, None)
                if dropping is not None:
                    dropping.cancel()
                self._follow(spec)

    def restarted(self, pod: str) -> None:
        """The pod's process is a new one: what it held is gone, for every rank."""
        for address, consumer in self._consumers.items():
            if address.pod == pod:
                consumer.restarted()

    def block_size(self, address: WorkerAddress) -> int | None:
        """Block size in tokens as the worker's events say; None before the first."""
        consumer = self._consumers.get(address)
        return consumer.ledger.block_size_tokens if consumer else None

    def status(self) -> dict[str, dict[str, Any]]:
        """Per worker, JSON-able, for /debug/pods."""
        return {str(a): {**c.status(), "problem": self.problem(a)} for a, c in self._consumers.items()}

    def problem(self, address: WorkerAddress) -> str | None:
        """Why a worker gives no events for 30 s, in words for the operator; None while all is well."""
        consumer, activity, now_s = self._consumers[address], self.activity(address), self._clock()
        endpoint = consumer.source.spec.events
        if activity == "away":
            return None
        if not consumer.source.connected:
            if now_s - self._up_s[address] < NO_EVENTS_AFTER_S:
                return None
            if consumer.last_event_s is not None:
                return f"the connection to {endpoint} was lost and does not come back, though the pod takes requests"
            return (
                f"nobody publishes KV events at {endpoint}: check the port, and that the engine was started with "
                '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
                '"endpoint": "tcp://*:PORT"}\' '
                "(an endpoint without * makes the engine connect instead of bind)"
            )
        heard = consumer.last_event_s is not None or activity == "idle"
        if heard or now_s - self._since_s[address] < NO_EVENTS_AFTER_S:
            return None
        return (
            f"connected to {endpoint}, but no KV event came: no request was served yet, prefix caching is off, "
            "or events are off (enable_kv_cache_events)"
        )

    # -- inside -----------------------------------------------------------------------------------------------

    def _follow(self, spec: SourceSpec) -> None:
        assert self._context is not None, "start() comes first"
        inbox = Inbox()
        source = Source(spec, inbox, self._context, self._times, on_malformed=lambda: self.count("malformed"))
        consumer = Consumer(
            source,
            inbox,
            Ledger(seed=self._seed, model=spec.model),
            self._writer,
            mint=self._mint,
            clock=self._clock,
            observer=self,
            snapshots=self._writer if isinstance(self._writer, SnapshotStore) else None,
            limits=self._limits,
        )
        self._consumers[spec.address] = consumer
        self._since_s[spec.address] = self._up_s[spec.address] = self._clock()
        self._tasks[spec.address] = asyncio.create_task(self._run(consumer), name=f"kv-events {spec.address}")

    async def _run(self, consumer: Consumer) -> None:
        """A bug in one worker's events must not end the others'; it is told, and the worker is begun anew."""
        while True:
            try:
                await consumer.run()
            except* Exception as group:
                self.count("crashes")
                consumer.last_error = f"bug: {group.exceptions[0]!r}"
                log.error("consumer failed", exc_info=group, extra={"fields": {"worker": str(consumer.address)}})
            consumer.restarted()
            await asyncio.sleep(1.0)

    def _stop(self, address: WorkerAddress) -> None:
        task = self._tasks.pop(address)
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        del self._consumers[address], self._since_s[address], self._up_s[address]
        self._warned.discard(address)

    async def _drop(self, address: WorkerAddress) -> None:
        pause_s = 0.1
        while True:
            try:
                await self._writer.drop(address)
                break
            except IndexUnavailable:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
        self._drops.pop(address, None)

    async def _keep_house(self) -> None:
        observed_s = -math.inf
        while True:
            more = False
            try:
                more = await self._writer.maintain()
                for address in self._writer.lost():
                    if address in self._consumers:
                        self._consumers[address].store_lost()
                if self._clock() - observed_s >= 1.0:
                    observed_s = self._clock()
                    self._observe()
            except IndexUnavailable:
                pass  # the consumers' own writes say so
            except Exception:
                self.count("crashes")
                log.exception("index housekeeping failed")
            await asyncio.sleep(0.005 if more else 0.5)

    def _observe(self) -> None:
        connected = silent = 0
        totals: dict[Tier, int] = {}
        for address, consumer in self._consumers.items():
            if consumer.source.connected:
                connected += 1
                self._up_s[address] = self._clock()
            for tier, blocks in consumer.ledger.claimed.items():
                totals[tier] = totals.get(tier, 0) + blocks
            problem = self.problem(address)
            silent += problem is not None
            if problem is None:
                self._warned.discard(address)
            elif address not in self._warned:
                self._warned.add(address)
                log.warning("no KV events", extra={"fields": {"worker": str(address), "problem": problem}})
        self._metrics.kv_sources.labels(state="connected").set(connected)
        self._metrics.kv_sources.labels(state="not_connected").set(len(self._consumers) - connected)
        for tier, blocks in totals.items():
            self._metrics.kv_blocks.labels(tier=tier).set(blocks)
        self._metrics.kv_sources.labels(state="silent").set(silent)

    def count(self, what: str, n: int = 1) -> None:
        """See consumer.Observer."""
        self._metrics.kv_events.labels(what=what).inc(n)
