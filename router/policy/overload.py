"""When has every worker enough to do, and who of those that wait for one goes first? Pure.

First come first served gains nothing over the engines' own queues; what helps is the order: least uncached work first,
ageing so that long prompts get their turn, and before that what clients ask for (priority) and what they are owed (an
equal share of prefill for each tenant). May import: the standard library, msgspec, router.policy.pick.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from itertools import count
from math import ceil

import msgspec

from router.policy.pick import Candidate, RoutingRequest, fit, own_tokens

AGEING_S_PER_S = 0.1  # a second of waiting weighs as much as so many seconds of prefill less
FORMER_TENANTS_MAX = 1024  # remembered with nothing waiting
RETRY_AFTER_MAX_S = 60


def overloaded(candidates: Sequence[Candidate], request: RoutingRequest, limit_s: float) -> bool:
    """Every worker that may get the request has more than `limit_s` of prefill booked. False when none may get it."""
    able = fit(candidates, request)
    return bool(able) and min(map(booked_s, able)) > limit_s


def booked_s(candidate: Candidate) -> float:
    """Seconds until a new request's prefill would begin there."""
    return candidate.booked_prefill_tokens / candidate.prefill_tokens_per_s


def least_work_s(candidates: Sequence[Candidate], request: RoutingRequest) -> float:
    """Seconds of prefill the request needs where most of it is held; 0 when nobody may get it."""
    able = fit(candidates, request)
    return min((own_tokens(c, request) / c.prefill_tokens_per_s for c in able), default=0.0)


def retry_after_s(candidates: Sequence[Candidate], limit_s: float, waiting_work_s: float, *, least_s: int) -> int:
    """Whole seconds until there may be room: until the least booked worker has any, and all share what waits."""
    ready = [c for c in candidates if c.ready]
    if not ready:
        return least_s
    room_s = max(min(map(booked_s, ready)) - limit_s, 0.0) + waiting_work_s / len(ready)
    return min(max(ceil(room_s), least_s), max(RETRY_AFTER_MAX_S, least_s))


class WaitRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of waiting."""

    prefill_s: float  # a worker with more booked has enough to do
    wait_s: float = 10.0  # longest wait; 0: none
    queue_requests: int = 1000  # that wait at one time
    retry_after_s: int = 1  # least that is told to those turned away


class Ticket(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request's place among those that wait. Each is its own: two are never equal."""

    work_s: float  # prefill it needs where most of it is held, as seen when it came
    since_s: float
    priority: int = 0  # as in vLLM: the lower, the earlier
    tenant: Hashable = b""
    lane: Hashable = None  # requests of one lane can go to the same workers

    @property
    def rank_s(self) -> float:
        """Orders tickets of one priority and tenant: work less the credit for waiting, the same at any time."""
        return self.work_s + AGEING_S_PER_S * self.since_s


_Place = tuple[float, int, Ticket]
_Group = tuple[int, Hashable, Hashable]  # priority, lane, tenant


class Line:
    """Those that wait: by priority, then the tenant that got least, then least work with ageing.

    What a tenant got is counted in seconds of prefill while anybody waits. One that comes anew begins with no less
    than the least served that waits: nobody saves up a claim, nobody is held to what he got before the line formed.
    """

    def __init__(self) -> None:
        self._groups: dict[_Group, list[_Place]] = {}
        self._places: dict[Ticket, _Place] = {}
        self._numbers = count()
        self._of_tenant: Counter[Hashable] = Counter()
        self._served_s: dict[Hashable, float] = {}
        self.work_s = 0.0  # of all that wait

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._places

    def enter(self, ticket: Ticket) -> None:
        """Wait."""
        tenant = ticket.tenant
        if not self._of_tenant[tenant]:
            self._served_s[tenant] = max(self._served_s.get(tenant, 0.0), self._least_served_s())
        self._of_tenant[tenant] += 1
        place = self._places[ticket] = (ticket.rank_s, next(self._numbers), ticket)
        insort(self._groups.setdefault(_group(ticket), []), place)
        self.work_s += ticket.work_s

    def leave(self, ticket: Ticket) -> None:
        """Wait no longer, for whatever reason."""
        place = self._places.pop(ticket)
        group = self._groups[_group(ticket)]
        del group[bisect_left(group, place)]
        if not group:
            del self._groups[_group(ticket)]
        self.work_s = self.work_s - ticket.work_s if self._places else 0.0
        self._of_tenant[ticket.tenant] -= 1
        if not self._of_tenant[ticket.tenant]:
            del self._of_tenant[ticket.tenant]
            self._forget()

    def serve(self, ticket: Ticket) -> None:
        """Its turn has come: it leaves, and its tenant has got that much more."""
        self._served_s[ticket.tenant] += ticket.work_s
        self.leave(ticket)

    def first(self, blocked: Set[Hashable] = frozenset()) -> Ticket | None:
        """Whose turn it is, of the lanes that are not `blocked`."""
        best: tuple[int, float, _Place] | None = None
        for (priority, lane, tenant), group in self._groups.items():
            if lane not in blocked:
                mine = (priority, self._served_s[tenant], group[0])
                if best is None or mine < best:
                    best = mine
        return None if best is None else best[2][2]

    def last(self) -> Ticket:
        """Who gives way when too many wait: of the last priority, the tenant with most there, its last. Raises
        ValueError when nobody waits."""
        worst = max(priority for priority, _, _ in self._groups)
        crowd: Counter[Hashable] = Counter()
        for (priority, _, tenant), group in self._groups.items():
            if priority == worst:
                crowd[tenant] += len(group)
        most = max(crowd, key=lambda tenant: (crowd[tenant], self._served_s[tenant]))
        return max(g[-1] for (priority, _, tenant), g in self._groups.items() if (priority, tenant) == (worst, most))[2]

    def by_priority(self) -> dict[int, int]:
        """How many wait, by priority."""
        found: Counter[int] = Counter()
        for (priority, _, _), group in self._groups.items():
            found[priority] += len(group)
        return dict(sorted(found.items()))

    @property
    def tenants(self) -> int:
        """How many tenants wait."""
        return len(self._of_tenant)

    def _least_served_s(self) -> float:
        return min((self._served_s[t] for t in self._of_tenant), default=0.0)

    def _forget(self) -> None:
        """Tenants that do not wait and would come back with the same claim anyway; all of them once nobody waits."""
        if not self._of_tenant:
            self._served_s.clear()
            return
        if len(self._served_s) <= 2 * len(self._of_tenant) + 64:
            return
        least_s = self._least_served_s()
        former = [t for t, s in self._served_s.items() if t not in self._of_tenant and s > least_s]
        former = sorted(former, key=self._served_s.__getitem__)[-FORMER_TENANTS_MAX:]
        self._served_s = {t: self._served_s[t] for t in (*self._of_tenant, *former)}


def _group(ticket: Ticket) -> _Group:
    return ticket.priority, ticket.lane, ticket.tenant
