"""A fleet of engines under the real policy and bookings, in virtual time: no sockets, no clock, deterministic by seed.

    Simulation(Setup(...), workload, policy, seed).run() -> Outcome

One heap holds arrivals, the engines' steps, scrapes, exchanges and what happens to the fleet.
May import: the standard library, msgspec, router.core, router.policy, router.fleet.bookings, loadtest.*.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any

import msgspec

from loadtest.engine import Engine, Gauges, Request, StepResult
from loadtest.profile import Profile
from loadtest.sim_view import Prediction, ReportedIndex, RouterView, Scrape
from loadtest.workload import Segment, Session, Stage, Turn, Workload, block_hashes
from router.core.hashing import usable_blocks
from router.core.types import WorkerAddress
from router.fleet.bookings import Booking
from router.policy.overload import Line, Ticket, least_work_s, overloaded
from router.policy.pick import Candidate, Chosen, Costs, Policy, RoutingRequest, best_of, prefill_tokens, price

SCRAPE_VALID_S = 10.0  # as the router's scrape_stale_after_s


class FleetEvent(msgspec.Struct, frozen=True):
    """Something that happens to a pod `at_s` after the first measured stage begins."""

    at_s: float
    action: str  # "slow" (factor), "restart" (down for down_s), "remove", "add"
    pod: int = 0
    factor: float = 1.0
    down_s: float = 30.0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The world around the policy."""

    profile: Profile
    pods: int = 8
    routers: int = 1
    event_lag_s: float = 0.05
    scrape_interval_s: float = 1.0
    scrape_lag_s: float = 0.0
    exchange_interval_s: float | None = 0.1  # None: routers do not know of each other
    settle_s: float = 6.0  # after first token the events have said it all, late ones too
    predict: bool = True  # count blocks just routed as held
    rate_tokens_per_s: float = 20_000.0  # what the router believes of every pod at first
    learn_rates: bool = True  # False: and for ever
    knowledge: str = "router"  # or "oracle": true caches, true remaining work, no lag
    slow_pods: dict[int, float] = {}  # pod -> how many times slower
    events: tuple[FleetEvent, ...] = ()
    shortlist: int | None = None  # None: score every pod
    overload_prefill_s: float = 0.0  # routers hold requests while every pod has more booked; 0: never


class Sample(msgspec.Struct, gc=False):
    """One request as its client saw it."""

    stage: int
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    group: str
    pod: int = -1
    first_s: float = -1.0
    finished_s: float = -1.0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    failed: bool = False


class StageOutcome(msgspec.Struct):
    """One stage: its samples, and what the pods did meanwhile."""

    name: str
    measured: bool
    rate_per_s: float
    begun_s: float
    ended_s: float = 0.0
    samples: list[Sample] = []
    itl_steps: Counter[int] = msgspec.field(default_factory=Counter)  # milliseconds of a step -> tokens that waited it
    preemptions: int = 0
    waiting: list[int] = []  # requests waiting on a pod, sampled with the scrapes
    kv_used: list[float] = []


class Outcome(msgspec.Struct):
    """A whole run. `explained` holds decisions spelt out."""

    stages: list[StageOutcome]
    explained: list[dict[str, Any]]
    steps: int = 0
    decisions: Counter[str] = msgspec.field(default_factory=Counter)


class _Flight(msgspec.Struct, gc=False):
    """A request under way."""

    sample: Sample
    turn: Turn
    rest: Sequence[Turn]
    hashes: Sequence[int]
    router: int = 0
    booking: Booking | None = None
    prediction: Prediction | None = None
    leave_adapter: Callable[[], None] | None = None


class _Look(msgspec.Struct, frozen=True, gc=False):
    """What a router sees when it looks for a pod."""

    candidates: list[Candidate]
    request: RoutingRequest
    found: dict[int, int]  # pod -> blocks of the prompt it is thought to hold
    key: int | None  # the deepest of them


class _Pod:
    """An engine, its place in the fleet, and the step that is running."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.busy: StepResult | None = None
        self.wake_s = -1.0  # a wake-up is queued for then
        self.ready = True
        self.life = 0


class Simulation:
    """One run. Construct, `run()`."""

    def __init__(
        self,
        setup: Setup,
        workload: Workload,
        policy: Policy,
        seed: int,
        *,
        costs: Costs | None = None,
        explain: int = 0,
    ) -> None:
        self.setup = setup
        self._workload = workload
        self._policy = policy
        self._costs = costs or Costs()
        self._rng = Random(seed ^ 0x5EED)
        self._seed = seed
        self._explain = explain
        self._pods = [_Pod(self._engine(i)) for i in range(setup.pods)]
        self._workers = [WorkerAddress(f"pod-{i:04d}") for i in range(setup.pods)]
        self._index_of = {w: i for i, w in enumerate(self._workers)}
        self._index = self._make_index()
        self._views = [self._make_view() for _ in range(setup.routers)]
        for view in self._views:
            view.exchanging = setup.routers > 1 and setup.exchange_interval_s is not None
        self._lines = [Line() for _ in self._views]
        self._held: dict[Ticket, _Flight] = {}
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._ticket = itertools.count()
        self._requests = itertools.count()
        self._flights: dict[str | int, _Flight] = {}
        self._hash_cache: dict[tuple[Segment, ...], list[int]] = {}
        self._memo: dict[Any, tuple[list[int], int, int]] = {}
        self._stage = StageOutcome("", False, 0.0, 0.0)
        self._queue: deque[Session] = deque()
        self._open_sessions = 0
        self.outcome = Outcome([], [])
        self.now_s = 0.0

    def _engine(self, pod: int, life: int = 0) -> Engine:
        slow = self.setup.slow_pods.get(pod, 1.0)
        return Engine(self.setup.profile, seed=self._seed * 4001 + pod + 1009 * life, slowdown=slow)

    def _make_index(self) -> ReportedIndex:
        return ReportedIndex()

    def _make_view(self) -> RouterView:
        return RouterView(
            self._index, predict=self.setup.predict, prior_tokens_per_s=self.setup.rate_tokens_per_s or 20_000.0
        )

    def run(self) -> Outcome:
        """All stages, each drained before the next."""
        self._at(0.0, self._scrape, None)
        if any(v.exchanging for v in self._views):
            self._at(0.0, self._exchange, None)
        measured_before = False
        for number, stage in enumerate(self._workload.stages):
            if stage.measured and not measured_before:
                measured_before = True
                for event in self.setup.events:
                    self._at(self.now_s + event.at_s, self._fleet_event, event)
            self._run_stage(number, stage)
        return self.outcome

    def _run_stage(self, number: int, stage: Stage) -> None:
        out = self._stage = StageOutcome(stage.name, stage.measured, stage.rate_per_s, self.now_s)
        self.outcome.stages.append(out)
        preempted_before = sum(p.engine.gauges().preemptions for p in self._pods)
        begun = self.now_s
        if stage.concurrency is None:
            for session in stage.sessions:
                self._at(begun + session.start_s, self._start_session, session)
            self._queue.clear()
        else:
            self._queue = deque(stage.sessions)
            for _ in range(min(stage.concurrency, len(self._queue))):
                self._at(begun, self._start_session, self._queue.popleft())
        self._open_sessions = len(stage.sessions)
        heap, pop = self._heap, heapq.heappop
        while self._open_sessions:
            at, _, act, what = pop(heap)
            self.now_s = at
            act(what)
        out.ended_s = self.now_s
        out.preemptions = sum(p.engine.gauges().preemptions for p in self._pods) - preempted_before

    def _at(self, at_s: float, act: Callable[..., None], what: Any) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ticket), act, what))

    # -- requests -------------------------------------------------------------------------------------------------

    def _start_session(self, session: Session) -> None:
        self._send((session.turns[0], session.turns[1:]))

    def _send(self, what: tuple[Turn, Sequence[Turn]]) -> None:
        turn, rest = what
        sample = Sample(len(self.outcome.stages) - 1, self.now_s, turn.prompt_tokens, turn.output_tokens, turn.group)
        self._stage.samples.append(sample)
        flight = _Flight(sample, turn, rest, self._hashes(turn, bool(rest)))
        flight.router = self._rng.randrange(self.setup.routers) if self.setup.routers > 1 else 0
        self._route(flight)

    def _hashes(self, turn: Turn, has_more: bool) -> list[int]:
        """Names of the prompt's blocks, and of the answer's where a later turn may find them."""
        size = self.setup.profile.block_size_tokens
        if has_more:
            return block_hashes((*turn.prompt, turn.answer), size, self._memo)
        cached = self._hash_cache.get(turn.prompt)
        if cached is None:
            cached = block_hashes(turn.prompt, size, self._memo)
            if len(self._hash_cache) < 20_000:
                self._hash_cache[turn.prompt] = cached
        return cached

    def _route(self, flight: _Flight) -> None:
        """To a pod; or in line, while every pod has too much to do or others wait already."""
        limit_s, line = self.setup.overload_prefill_s, self._lines[flight.router]
        look = self._look(flight)
        if limit_s and (line or overloaded(look.candidates, look.request, limit_s)):
            ticket = Ticket(work_s=least_work_s(look.candidates, look.request), since_s=self.now_s)
            line.enter(ticket)
            self._held[ticket] = flight
            self._admit(flight.router)
            return
        self._dispatch(flight, look)

    def _admit(self, router: int) -> None:
        """Those in line go, in their order, as many as there is room for."""
        line = self._lines[router]
        while (ticket := line.first()) is not None:
            flight = self._held[ticket]
            look = self._look(flight)
            if overloaded(look.candidates, look.request, self.setup.overload_prefill_s):
                return
            line.serve(ticket)
            del self._held[ticket]
            self._dispatch(flight, look)

    def _look(self, flight: _Flight) -> _Look:
        setup, view, sample = self.setup, self._views[flight.router], flight.sample
        size = setup.profile.block_size_tokens
        usable = flight.hashes[: usable_blocks(sample.prompt_tokens, size)]
        live = 0
        for i, p in enumerate(self._pods):
            if p.ready:
                live |= 1 << i
        if setup.knowledge == "oracle":
            found = {i: p.engine.match_blocks(usable) for i, p in enumerate(self._pods) if p.ready}
        else:
            found = view.matched_blocks(usable, live, self.now_s)
        deepest = max(found.values(), default=0)
        key = usable[deepest - 1] if deepest else None
        request = RoutingRequest(
            prompt_tokens=sample.prompt_tokens,
            crowd_requests=view.crowd(key),
            sequence=next(self._requests),
            affinity=usable[0].to_bytes(8, "big") if usable else b"",
        )
        return _Look(self._candidates(view, found, live, flight.turn.adapter), request, found, key)

    def _dispatch(self, flight: _Flight, look: _Look) -> None:
        """Decide, book and send."""
        view, sample, request = self._views[flight.router], flight.sample, look.request
        size = self.setup.profile.block_size_tokens
        decision = self._policy(look.candidates, request, self._costs, self._rng)
        if len(self.outcome.explained) < self._explain and self._stage.measured:
            self._explain_decision(look.candidates, request, decision)
        if not isinstance(decision, Chosen):
            self.outcome.decisions[decision.reason] += 1
            sample.failed = True
            self._session_step(flight)
            return
        self.outcome.decisions[decision.reason] += 1
        pod = self._index_of[decision.worker]
        blocks = look.found.get(pod, 0)
        if decision.reason == "placement":
            view.bookings.place(decision.worker, sample.prompt_tokens)
        flight.booking = view.book(
            decision.worker,
            prefill_tokens=round(prefill_tokens(sample.prompt_tokens, max(sample.prompt_tokens - blocks * size, 0))),
            prompt_tokens=sample.prompt_tokens,
            key=look.key,
        )
        if flight.turn.adapter:
            flight.leave_adapter = view.adapters.hold(decision.worker, flight.turn.adapter)
        flight.prediction = view.predict(pod, flight.hashes[: sample.prompt_tokens // size], self.now_s)
        sample.pod, sample.predicted_tokens = pod, blocks * size
        self._submit(flight, request.sequence)

    def _candidates(self, view: RouterView, found: dict[int, int], live: int, adapter: str) -> list[Candidate]:
        setup = self.setup
        size = setup.profile.block_size_tokens
        chosen: Sequence[int] = range(len(self._pods))
        if setup.shortlist is not None:
            chosen = self._shortlist(view, found)
        out = []
        for i in chosen:
            if not live >> i & 1:
                continue
            rate = setup.rate_tokens_per_s
            if setup.learn_rates:
                assert view.bookings.rates is not None
                rate = view.bookings.rates.tokens_per_s(self._workers[i])
            if rate <= 0:  # the truth
                rate = setup.profile.prefill_tokens_per_s / self._pods[i].engine.slowdown
            c = view.candidate(i, self._workers[i], found.get(i, 0) * size, rate, adapter)
            if setup.knowledge == "oracle":
                engine = self._pods[i].engine
                g = engine.gauges()
                c = msgspec.structs.replace(
                    c,
                    booked_prefill_tokens=engine.pending_prefill_tokens(),
                    inflight_requests=g.running + g.waiting,
                    waiting_requests=g.waiting,
                    kv_held_ratio=g.kv_usage_ratio,
                    prefill_tokens_per_s=setup.profile.prefill_tokens_per_s / engine.slowdown,
                )
            out.append(c)
        return out

    def _shortlist(self, view: RouterView, found: dict[int, int]) -> list[int]:
        """The deepest matches and the least loaded: the cost of a choice must not grow with the fleet."""
        n = self.setup.shortlist or 0
        deepest = heapq.nlargest(n, found, key=found.__getitem__)
        quiet = heapq.nsmallest(
            n, range(len(self._pods)), key=lambda i: view.bookings.of(self._workers[i]).inflight_requests
        )
        return sorted({*deepest, *quiet})

    def _submit(self, flight: _Flight, request_id: int) -> None:
        sample = flight.sample
        self._flights[request_id] = flight
        pod = self._pods[sample.pod]
        try:
            pod.engine.submit(self._request(request_id, flight), self.now_s)
        except ValueError:  # longer than the model or the pod takes: a 400
            del self._flights[request_id]
            sample.failed = True
            self._release(flight)
            self._session_step(flight)
            return
        if pod.busy is None:
            self._wake(sample.pod, pod)

    def _request(self, request_id: int, flight: _Flight) -> Request:
        """What the pod gets; tests with real token ids make their own."""
        sample, name = flight.sample, flight.turn.adapter or None
        return Request(request_id, sample.prompt_tokens, sample.output_tokens, flight.hashes, lora_name=name)

    def _release(self, flight: _Flight) -> None:
        if flight.booking is not None:
            flight.booking.release()
        if flight.leave_adapter is not None:
            self._views[flight.router].now_s = self.now_s
            flight.leave_adapter()
            flight.leave_adapter = None
        if flight.prediction is not None:
            self._views[flight.router].settle(flight.prediction, self.now_s + self.setup.settle_s)

    def _session_step(self, flight: _Flight) -> None:
        """The answer is complete (or will never be): the next turn, the next session, or one less."""
        if flight.rest and not flight.sample.failed:
            following = flight.rest[0]
            self._at(self.now_s + following.think_s, self._send, (following, flight.rest[1:]))
            return
        self._open_sessions -= 1
        if self._queue:
            self._at(self.now_s, self._start_session, self._queue.popleft())

    # -- pods -----------------------------------------------------------------------------------------------------

    def _wake(self, number: int, pod: _Pod) -> None:
        at = pod.engine.next_step_s(self.now_s)
        if at is None or pod.busy is not None or pod.wake_s == at:
            return
        pod.wake_s = at
        self._at(at, self._begin_step, (number, pod.life))

    def _begin_step(self, what: tuple[int, int]) -> None:
        number, life = what
        pod = self._pods[number]
        if pod.life != life or pod.busy is not None:
            return
        pod.wake_s = -1.0
        self._step(number, pod)

    def _step(self, number: int, pod: _Pod) -> None:
        result = pod.engine.step(self.now_s)
        if result is None:
            self._wake(number, pod)
            return
        pod.busy = result
        self.outcome.steps += 1
        heapq.heappush(self._heap, (result.ends_s, next(self._ticket), self._end_step, (number, pod.life)))

    def _end_step(self, what: tuple[int, int]) -> None:
        number, life = what
        pod = self._pods[number]
        if pod.life != life:
            return
        result = pod.busy
        assert result is not None
        pod.busy = None
        if result.decode_sequences:
            self._stage.itl_steps[round((result.ends_s - result.started_s) * 1000)] += result.decode_sequences
        if result.events:
            self._index.tell(number, result.events, self.now_s + self.setup.event_lag_s)
        for first in result.first:
            self._first_token(self._flights[first.id], first.cached_tokens)
        for router in {self._flights[first.id].router for first in result.first} if self._held else ():
            self._admit(router)
        for request_id in result.finished:
            flight = self._flights.pop(request_id)
            flight.sample.finished_s = self.now_s
            self._release(flight)
            self._session_step(flight)
        self._step(number, pod)

    def _first_token(self, flight: _Flight, cached_tokens: int) -> None:
        sample = flight.sample
        sample.first_s, sample.cached_tokens = self.now_s, cached_tokens
        assert flight.booking is not None
        assert flight.prediction is not None
        view = self._views[flight.router]
        view.now_s = self.now_s
        flight.booking.first_token()
        view.settle(flight.prediction, self.now_s + self.setup.settle_s)

    # -- the world around -----------------------------------------------------------------------------------------

    def _scrape(self, _: None) -> None:
        """Every pod's gauges, known to the routers `scrape_lag_s` later."""
        seen = []
        for i, pod in enumerate(self._pods):
            g = pod.engine.gauges()
            self._stage.waiting.append(g.waiting)
            self._stage.kv_used.append(g.kv_usage_ratio)
            worker = self._workers[i]
            own = [(v.bookings.of(worker).inflight_requests, v.adapters.in_flight(worker)) for v in self._views]
            seen.append((i, g, own))
        for router in range(len(self._views)) if self._held else ():
            self._admit(router)  # what lowers the load without a first token: pods that come, other routers
        if self.setup.scrape_lag_s:
            self._at(self.now_s + self.setup.scrape_lag_s, self._learn_scrape, seen)
        else:
            self._learn_scrape(seen)
        self._at(self.now_s + self.setup.scrape_interval_s, self._scrape, None)

    def _learn_scrape(self, seen: list[tuple[int, Gauges, list[tuple[int, Collection[str]]]]]) -> None:
        max_loras = self.setup.profile.max_loras
        for i, g, own in seen:
            for view, (mine, names) in zip(self._views, own, strict=True):
                view.scrapes[i] = Scrape(g.running + g.waiting, g.waiting, g.kv_usage_ratio, mine)
                if max_loras:
                    view.now_s = self.now_s
                    view.adapters.scraped(
                        self._workers[i],
                        max_loras=max_loras,
                        running=g.running_adapters,
                        waiting=(),  # vLLM does not tell
                        own=names,
                        valid_s=SCRAPE_VALID_S,
                    )

    def _exchange(self, _: None) -> None:
        """All routers tell each other, at once."""
        told = [v.shared(self._workers) for v in self._views]
        for i, view in enumerate(self._views):
            view.hear(told[:i] + told[i + 1 :], self.now_s)
        assert self.setup.exchange_interval_s is not None
        self._at(self.now_s + self.setup.exchange_interval_s, self._exchange, None)

    def _fleet_event(self, event: FleetEvent) -> None:
        if event.action == "add":
            self._pods.append(_Pod(self._engine(len(self._pods))))
            worker = WorkerAddress(f"pod-{len(self._workers):04d}")
            self._index_of[worker] = len(self._workers)
            self._workers.append(worker)
            return
        pod = self._pods[event.pod]
        match event.action:
            case "slow":
                pod.engine.slowdown = event.factor
            case "remove":
                pod.ready = False  # drains
            case "restart":
                self._restart(event.pod, pod)
                self._at(self.now_s + event.down_s, self._back, event.pod)
            case _:
                raise ValueError(f"unknown fleet event {event.action!r}; known: slow, restart, remove, add")

    def _restart(self, number: int, pod: _Pod) -> None:
        """The pod dies: streams break visibly, requests without a first byte are sent elsewhere."""
        pod.ready, pod.life, pod.busy, pod.wake_s = False, pod.life + 1, None, -1.0
        pod.engine = self._engine(number, pod.life)
        self._index.forget(number)
        lost = [(i, f) for i, f in self._flights.items() if f.sample.pod == number]
        for request_id, flight in lost:
            del self._flights[request_id]
            self._release(flight)
        for view in self._views:
            view.bookings.retire(self._workers[number])
            view.adapters.retire(self._workers[number])
        for _, flight in lost:
            if flight.sample.first_s < 0:
                self._dispatch(flight, self._look(flight))  # it has waited before
            else:
                flight.sample.failed = True
                self._session_step(flight)

    def _back(self, number: int) -> None:
        self._pods[number].ready = True

    def _explain_decision(self, candidates: Sequence[Candidate], request: RoutingRequest, decision: Any) -> None:
        rows = []
        for c in candidates:
            terms = price(c, best_of(candidates, request), request, self._costs)
            rows.append({**msgspec.to_builtins(c), **msgspec.to_builtins(terms), "price": terms.price})
        self.outcome.explained.append(
            {
                "at_s": self.now_s,
                "request": {"prompt_tokens": request.prompt_tokens, "crowd_requests": request.crowd_requests},
                "decision": msgspec.to_builtins(decision),
                "workers": rows,
            }
        )
