"""Where requests wait while every worker has enough to do, so that the choice is made when there is room for it.

Off unless --overload-prefill-s is set. Whose turn it is, `router.policy.overload` says. One of a lane chooses at a
time: what it books decides whether there is room for the next. Whoever was sent once never waits again, so that a retry
cannot stand behind those that came after it.
May import: the standard library, msgspec, xxhash, router.route, router.policy, router.fleet.bookings, router.ops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import xxhash

from router.core.types import Clock, WorkerAddress
from router.fleet.bookings import Bookings
from router.ops import Metrics
from router.policy.overload import Line, Ticket, WaitRules, least_work_s, overloaded, retry_after_s
from router.policy.pick import Candidate, Refused, RoutingRequest
from router.route import Choice, Prepared

LOOK_S = 0.05  # how late an end of a wait, or room that no booking tells of (scrapes, new pods, peers), may be noticed
FRESH_S = 0.1  # what the index said is good for so long
TurnedAway = Literal["wait_over", "queue_full", "no_wait"]


class Stopping(Exception):
    """The router's own time is up."""


class Chooses(Protocol):
    """What is needed of router.route.Conductor."""

    @property
    def bookings(self) -> Bookings: ...
    def weigh(self, prepared: Prepared) -> tuple[Sequence[Candidate], RoutingRequest]: ...
    def choose(self, prepared: Prepared) -> Choice | Refused: ...
    async def look_again(self, prepared: Prepared) -> Prepared: ...
    def prefill_due_s(self, worker: WorkerAddress) -> float: ...


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, as far as it decides about a place in line."""

    priority: int = 0
    tenant: bytes | None = None
    in_one_piece: bool = False  # the reply is not streamed: no first token will be seen


class _Waiter:
    """One that waits. `turn` is done when it may choose (None) or must go."""

    __slots__ = ("has_turn", "prepared", "ticket", "turn")

    def __init__(self, ticket: Ticket, prepared: Prepared, turn: asyncio.Future[Refused | Stopping | None]) -> None:
        self.has_turn = False
        self.ticket = ticket
        self.prepared = prepared
        self.turn = turn


class Waiting:
    """The line of one process."""

    def __init__(
        self, conductor: Chooses, rules: WaitRules, metrics: Metrics, *, clock: Clock = time.monotonic
    ) -> None:
        self._conductor = conductor
        self._rules = rules
        self._metrics = metrics
        self._clock = clock
        self._line = Line()
        self._waiters: dict[Ticket, _Waiter] = {}  # as they came: the first is the next to give up
        self._choosing: set[Hashable] = set()  # lanes of which one has its turn now
        self._timer: asyncio.TimerHandle | None = None
        self._round_due = False
        self._stopping = False
        conductor.bookings.eased = self._eased
        metrics.waiting.set_function(lambda: len(self._line))

    async def choose(self, prepared: Prepared, asking: Asking) -> tuple[Choice | Refused, float | None]:
        """The worker, booked, and the seconds waited for it (None: not at all). Raises Stopping."""
        waited_s: float | None = None
        found: Choice | Refused
        candidates, request = self._conductor.weigh(prepared)
        full = overloaded(candidates, request, self._rules.prefill_s)
        if not full and not self._line and prepared.request.model not in self._choosing:
            found = self._conductor.choose(prepared)
        elif full and self._rules.wait_s <= 0:
            found = self._turned_away(prepared, "no_wait")
        else:
            found, waited_s = await self._wait(prepared, asking, least_work_s(candidates, request), full=full)
        if asking.in_one_piece and isinstance(found, Choice):
            due_s = self._conductor.prefill_due_s(found.worker)
            asyncio.get_running_loop().call_later(due_s, found.booking.assume_prefilled)
        return found, waited_s

    async def _wait(
        self, prepared: Prepared, asking: Asking, work_s: float, *, full: bool
    ) -> tuple[Choice | Refused, float]:
        if self._stopping:
            raise Stopping
        waiter = self._enter(prepared, asking, work_s)
        began_s = waiter.ticket.since_s
        outcome = "left"
        try:
            if not full:
                self._round()
            end = await waiter.turn
            if isinstance(end, Stopping):
                outcome = "stopped"
                raise end
            if end is not None:
                outcome = "turned_away"
                return end, self._clock() - began_s
            if self._clock() - began_s > FRESH_S:
                prepared = await self._conductor.look_again(prepared)
            outcome = "admitted"
            return self._conductor.choose(prepared), self._clock() - began_s
        finally:
            self._metrics.waited_seconds.labels(outcome).observe(self._clock() - began_s)
            self._done(waiter)

    def _enter(self, prepared: Prepared, asking: Asking, work_s: float) -> _Waiter:
        ticket = Ticket(
            work_s=work_s,
            since_s=self._clock(),
            priority=asking.priority,
            tenant=b"" if asking.tenant is None else xxhash.xxh3_64_digest(asking.tenant),  # no key is kept as it is
            lane=prepared.request.model,
        )
        waiter = self._waiters[ticket] = _Waiter(ticket, prepared, asyncio.get_running_loop().create_future())
        self._line.enter(ticket)
        if len(self._line) > self._rules.queue_requests:
            self._send_away(self._waiters[self._line.last()], "queue_full")
        self._set_timer()
        return waiter

    def _done(self, waiter: _Waiter) -> None:
        """Its wait is over, however: the place is free, or the lane for the next one's turn."""
        if waiter.ticket in self._line:
            self._leave(waiter.ticket)
        elif waiter.has_turn:
            self._choosing.discard(waiter.ticket.lane)
            self._eased()

    # -- turns ------------------------------------------------------------------------------------------------------

    def _eased(self) -> None:
        """Some worker may have less to do: see whose turn it is, once for all that happens in this step of the loop."""
        if self._line and not self._round_due:
            self._round_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        """Give turns, one a lane, where there is room."""
        self._round_due = False
        blocked = set(self._choosing)
        while (ticket := self._line.first(blocked)) is not None:
            waiter = self._waiters[ticket]
            if waiter.turn.done():  # its client has just left
                self._leave(ticket)
                continue
            blocked.add(ticket.lane)
            candidates, request = self._conductor.weigh(waiter.prepared)
            if not overloaded(candidates, request, self._rules.prefill_s):
                self._line.serve(ticket)
                del self._waiters[ticket]
                self._choosing.add(ticket.lane)
                waiter.has_turn = True
                waiter.turn.set_result(None)

    def _look(self) -> None:
        """What comes with time alone: waits that are over, and room that no booking tells of."""
        self._timer = None
        over_s = self._clock() - self._rules.wait_s
        try:
            while self._waiters and (waiter := next(iter(self._waiters.values()))).ticket.since_s <= over_s:
                self._send_away(waiter, "wait_over")
            self._round()
        finally:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._line and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    # -- going ------------------------------------------------------------------------------------------------------

    def _leave(self, ticket: Ticket) -> None:
        self._line.leave(ticket)
        del self._waiters[ticket]

    def _send_away(self, waiter: _Waiter, reason: TurnedAway) -> None:
        self._leave(waiter.ticket)
        if not waiter.turn.done():
            waiter.turn.set_result(self._turned_away(waiter.prepared, reason))

    def _turned_away(self, prepared: Prepared, reason: TurnedAway) -> Refused:
        self._metrics.turned_away.labels(reason).inc()
        self._metrics.refusals.labels("overloaded").inc()
        candidates, _ = self._conductor.weigh(prepared)
        after_s = retry_after_s(candidates, self._rules.prefill_s, self._line.work_s, least_s=self._rules.retry_after_s)
        return Refused("overloaded", retry_after_s=after_s)

    def shut_down(self) -> None:
        """End every wait now."""
        self._stopping = True
        for waiter in list(self._waiters.values()):
            self._leave(waiter.ticket)
            if not waiter.turn.done():
                waiter.turn.set_result(Stopping())

    def status(self) -> dict[str, Any]:
        """For /debug/pods: who waits, by what decides; no tenant by name."""
        now_s = self._clock()
        oldest = next(iter(self._waiters), None)
        return {
            "requests": len(self._line),
            "by_priority": {str(p): n for p, n in self._line.by_priority().items()},
            "tenants": self._line.tenants,
            "work_s": round(self._line.work_s, 3),
            "oldest_s": round(now_s - oldest.since_s, 3) if oldest is not None else None,
            "rules": msgspec.structs.asdict(self._rules),
        }
