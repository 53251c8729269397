"""The shell around FleetState: asks every pod whether it lives, what it serves and how busy it is.

Two tasks a pod, owned by one TaskGroup-like set: `probe` (/health, /v1/models) decides readiness, `scrape` (/metrics)
only informs. A slow scrape never takes a pod out of rotation (H66); a refused connection does at once (H22).
May import: router.fleet, router.core, router.ops, router.policy, aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from router.core.types import WorkerAddress
from router.fleet.adapters import Adapters
from router.fleet.bookings import Bookings
from router.fleet.breaker import Breaker
from router.fleet.discovery import Discovery
from router.fleet.load import LoadSample, RankLoad, is_stale, parse_metrics
from router.fleet.reread import Reread
from router.fleet.silence import may_stay
from router.fleet.state import (
    EventSource,
    FleetEvent,
    FleetState,
    Gone,
    ModelEntry,
    NotReady,
    Pod,
    PodSpec,
    Probed,
    Seen,
)
from router.policy.retry import FailureKind

PROBE_INTERVAL_S = 2.0  # ready pods; a dead one is found by the proxy's own connects before that
STARTING_INTERVAL_S = 0.5  # pods that may come up any moment
MODELS_EVERY_PROBES = 5
REFUSED_PROBES_UNTIL_GONE = 2
FOREIGN_UNCACHED_RATIO = 0.5  # of a usual prompt: what a request of somebody else, waiting in a pod, will have computed
IDLE_BELOW_TOKENS = 1000.0  # of prompts since its start: a few short ones fill no block and make no event
REREAD_INTERVAL_S = 1.0  # an adapter loaded a moment ago is asked for: at most so often, whatever clients ask for
REREAD_LIMIT_S = 2.0
REREAD_AT_ONCE_PODS = 32
MAX_MODELS_BYTES = 4 << 20
MAX_METRICS_BYTES = 16 << 20


class FleetTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and limits of asking pods."""

    scrape_interval_s: float = 1.0
    scrape_timeout_s: float = 5.0
    scrape_stale_after_s: float = 10.0
    probe_timeout_s: float = 5.0


class WorkerFacts(msgspec.Struct, frozen=True):
    """What the fleet can say of a worker's load now, own bookings included, foreign traffic added from the scrape."""

    inflight_requests: int
    prefill_tokens: int
    kv_held_ratio: float


class _Life:
    """One pod from Seen to Gone; a restart begins another life at the same identity."""

    __slots__ = (
        "generation",
        "gone",
        "heard_s",
        "kick",
        "own_at_scrape",
        "read",
        "refused",
        "sample",
        "slow",
        "tasks",
        "told",
    )

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.read: int | None = None  # the generation whose models were read
        self.told: int | None = None  # the generation that has told where its events are
        self.gone = asyncio.Event()
        self.kick = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.sample: LoadSample | None = None
        self.own_at_scrape: dict[int, int] = {}
        self.slow = 0
        self.refused = 0
        self.heard_s = float("-inf")  # when it last answered anything


class Fleet:
    """All pods. Read `state` for a snapshot; subscribe with `on_change` to follow."""

    def __init__(
        self,
        *,
        times: FleetTimes | None = None,
        bookings: Bookings | None = None,
        default_block_size_tokens: int | None = None,
        headers: Mapping[str, str] | None = None,
        ssl_context: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = FleetState()
        self.bookings = bookings or Bookings()
        self.adapters = Adapters(clock=clock)
        self._times = times or FleetTimes()
        self._default_block_size_tokens = default_block_size_tokens
        self._headers = dict(headers or {})
        self._ssl = ssl_context
        self._clock = clock
        self._lives: dict[str, _Life] = {}
        self._breakers: dict[WorkerAddress, Breaker] = {}
        self._generations = 0
        self._session: aiohttp.ClientSession | None = None
        self._listeners: list[Callable[[FleetState], None]] = []
        self._restart_listeners: list[Callable[[str], None]] = []
        self._learnt_block_size: Callable[[WorkerAddress], int | None] = lambda _: None
        self._reread = Reread(self._read_models_anew, interval_s=REREAD_INTERVAL_S, limit_s=REREAD_LIMIT_S, clock=clock)
        self.discovery: Discovery | None = None  # who calls set_pods, if not the settings

    # -- following ------------------------------------------------------------------------------------------------

    def on_change(self, listener: Callable[[FleetState], None]) -> None:
        """Call `listener` (quick, must not raise) after every change of state."""
        self._listeners.append(listener)

    def on_restart(self, listener: Callable[[str], None]) -> None:
        """Call `listener(identity)` when a pod's process is known to have been replaced at the same address."""
        self._restart_listeners.append(listener)

    def learn_block_sizes_from(self, source: Callable[[WorkerAddress], int | None]) -> None:
        """Block sizes seen in events win over those that /metrics gives."""
        self._learnt_block_size = source

    def tells(self, worker: WorkerAddress) -> bool:
        """Events of this worker have come: what it stores and removes is known soon after."""
        return self._learnt_block_size(worker) is not None

    # -- asking ---------------------------------------------------------------------------------------------------

    async def ask(self, base_model: str, path: str, body: bytes, *, reply_max_bytes: int) -> bytes | None:
        """POST a JSON `body` to any serving pod of `base_model`; the body of a 200, else None. No retry, no deadline.

        Raises OSError when the pod cannot be reached or breaks off.
        """
        pods = [p for p in self.state.pods.values() if p.serving and p.base_model(None) == base_model]
        if not pods or self._session is None:
            return None
        url = random.choice(pods).spec.url + path
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as reply:
                return await _bounded(reply, reply_max_bytes) if reply.status == 200 else None
        except (aiohttp.ClientError, ValueError) as exc:
            raise OSError(f"{path}: {type(exc).__name__}") from exc

    # -- membership -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the probing session. Pods are added by `set_pods`."""
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=10, ssl=self._ssl if self._ssl is not None else True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=65536,
            max_line_size=65536,
        )

    async def close(self) -> None:
        """Stop asking; ends every life."""
        await self._reread.close()
        tasks = [t for life in self._lives.values() for t in life.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def set_pods(self, specs: Sequence[PodSpec]) -> None:
        """The full list of pods now: adds, changes and removes. Idempotent."""
        wanted = {s.identity: s for s in specs}
        for identity in [i for i in self.state.pods if i not in wanted]:
            self._end_life(identity)
            self._apply(Gone(identity))
        for spec in specs:
            old = self.state.pods.get(spec.identity)
            if old is not None and (old.spec.incarnation != spec.incarnation or old.spec.url != spec.url):
                self._restarted(spec.identity)
            self._apply(Seen(spec))
            if spec.identity not in self._lives:
                self._begin_life(spec.identity)
            elif old is not None and old.spec != spec:
                self._lives[spec.identity].kick.set()

    def _begin_life(self, identity: str) -> None:
        self._generations += 1
        life = _Life(self._generations)
        self._lives[identity] = life
        if self._session is not None:
            life.tasks = [
                asyncio.create_task(self._probe_for_ever(identity, life), name=f"probe {identity}"),
                asyncio.create_task(self._scrape_for_ever(identity, life), name=f"scrape {identity}"),
            ]

    def _end_life(self, identity: str) -> None:
        life = self._lives.pop(identity, None)
        if life is None:
            return
        life.gone.set()
        for task in life.tasks:
            task.cancel()
        pod = self.state.pods.get(identity)
        for worker in pod.workers if pod else ():
            self.bookings.retire(worker)
            self.adapters.retire(worker)
            self._breakers.pop(worker, None)

    def _restarted(self, identity: str) -> None:
        self._end_life(identity)
        for listener in self._restart_listeners:
            listener(identity)

    def _apply(self, event: FleetEvent) -> None:
        after = self.state.apply(event)
        if after is not self.state:
            self.state = after
            for listener in self._listeners:
                listener(after)

    # -- what routing asks ----------------------------------------------------------------------------------------

    def pods(self) -> Sequence[Pod]:
        """All pods, ready or not, in the order in which they were first seen."""
        return tuple(self.state.pods.values())

    def serving(self, model: str | None) -> Sequence[Pod]:
        """Pods that may get requests for `model` (None: any model)."""
        return [
            p
            for p in self.state.pods.values()
            if p.serving and (model is None or p.entry(model) is not None or (p.spec.model == model))
        ]

    def serves(self, model: str | None) -> bool:
        """Some known pod, ready or not, lists this name."""
        return model is None or any(
            p.entry(model) is not None or p.spec.model == model for p in self.state.pods.values()
        )

    async def serves_by_now(self, model: str | None) -> bool:
        """As `serves`, after asking the pods again: an adapter may have been loaded since they were last asked."""
        return await self._reread.now() and self.serves(model)

    def heard_models(self) -> bool:
        """At least one pod has said what it serves."""
        return any(p.models or p.spec.model for p in self.state.pods.values())

    def model_list(self) -> list[dict[str, Any]]:
        """Union of /v1/models over pods that have reported: sorted by id, the pod seen first wins a clash (H76)."""
        found: dict[str, dict[str, Any]] = {}
        for pod in self.state.pods.values():
            for entry in pod.models:
                found.setdefault(entry.id, entry.raw or {"id": entry.id, "object": "model", "owned_by": "vllm"})
            if pod.spec.model is not None and not pod.models:
                found.setdefault(pod.spec.model, {"id": pod.spec.model, "object": "model", "owned_by": "vllm"})
        return [found[name] for name in sorted(found)]

    def block_size_tokens(self, worker: WorkerAddress) -> int | None:
        """Learnt from events, else from /metrics, else the configured default."""
        pod = self.state.pods.get(worker.pod)
        return (
            self._learnt_block_size(worker)
            or (pod.block_size_tokens if pod is not None else None)
            or self._default_block_size_tokens
        )

    def facts(self, worker: WorkerAddress) -> WorkerFacts:
        """Load of a worker: own bookings exactly, foreign requests as the last fresh scrape showed them."""
        own = self.bookings.of(worker)
        life = self._lives.get(worker.pod)
        rank = self._fresh_rank(life, worker.rank)
        if life is None or rank is None:
            return WorkerFacts(own.inflight_requests, own.prefill_tokens, 0.0)
        waiting = rank.waiting_requests or 0
        foreign = max((rank.running_requests or 0) + waiting - life.own_at_scrape.get(worker.rank, 0), 0)
        queued = min(foreign, waiting) * FOREIGN_UNCACHED_RATIO * self.bookings.usual_prompt_tokens
        return WorkerFacts(
            own.inflight_requests + foreign, own.prefill_tokens + round(queued), rank.kv_held_ratio or 0.0
        )

    def activity(self, worker: WorkerAddress) -> Literal["away", "idle", "busy"]:
        """Should it have KV events to tell? `away`: it takes no requests. `idle`: it says that it had next to none."""
        pod, life = self.state.pods.get(worker.pod), self._lives.get(worker.pod)
        if pod is None or not pod.serving:
            return "away"
        rank = self._fresh_rank(life, worker.rank)
        if life is None or life.sample is None or rank is None or life.sample.prefix_caching is False:
            return "busy"
        queries_tokens = rank.cache_queries_tokens
        return "idle" if queries_tokens is not None and queries_tokens < IDLE_BELOW_TOKENS else "busy"

    def _fresh_rank(self, life: _Life | None, rank: int) -> RankLoad | None:
        if life is None or life.sample is None:
            return None
        if is_stale(life.sample, now_s=self._clock(), stale_after_s=self._times.scrape_stale_after_s):
            return None
        return life.sample.ranks.get(rank)

    def allows(self, worker: WorkerAddress) -> bool:
        """The worker's breaker lets a request through."""
        breaker = self._breakers.get(worker)
        return breaker is None or breaker.allows(now_s=self._clock())

    def answers(self, worker: WorkerAddress) -> bool:
        """The worker is not known to be worse than one that answers with 5xx, whatever its breaker says."""
        breaker = self._breakers.get(worker)
        return breaker is None or breaker.answers

    def generation(self, pod: str) -> int | None:
        """A number for the pod's present life; None when it is gone."""
        life = self._lives.get(pod)
        return None if life is None else life.generation

    def gone(self, pod: str) -> asyncio.Event:
        """Set once the pod's present life is known to be over. For an unknown pod: set."""
        life = self._lives.get(pod)
        if life is None:
            over = asyncio.Event()
            over.set()
            return over
        return life.gone

    # -- what the proxy tells -------------------------------------------------------------------------------------

    def sent(self, worker: WorkerAddress) -> None:
        """A request goes to the worker: with its breaker half-open it is the trial, and no other goes along."""
        breaker = self._breakers.get(worker)
        if breaker is not None:
            breaker.sent(now_s=self._clock())

    def failed(self, worker: WorkerAddress, kind: FailureKind) -> None:
        """A request to the worker went wrong. A refused connection takes the whole pod out until it answers again."""
        life, pod = self._lives.get(worker.pod), self.state.pods.get(worker.pod)
        if life is None or pod is None:
            return
        if kind in ("connect", "shutting_down"):
            self._apply(
                Probed(
                    identity=worker.pod,
                    not_ready="connect" if kind == "connect" else "terminating",
                    detail="refused a request's connection" if kind == "connect" else "is shutting down",
                )
            )
            life.kick.set()
            return
        self._breakers.setdefault(worker, Breaker()).failed(kind, now_s=self._clock())

    def succeeded(self, worker: WorkerAddress) -> None:
        """The worker answered a request properly."""
        life = self._lives.get(worker.pod)
        if life is not None:
            life.heard_s = self._clock()
        breaker = self._breakers.get(worker)
        if breaker is not None:
            breaker.succeeded(now_s=self._clock())

    def doubted(self, worker: WorkerAddress) -> None:
        """The worker does not know a model that it listed: an adapter was unloaded. Its next probe asks again."""
        life = self._lives.get(worker.pod)
        if life is not None:
            life.read = None

    # -- asking ---------------------------------------------------------------------------------------------------

    async def _probe_for_ever(self, identity: str, life: _Life) -> None:
        count = 0
        while True:
            pod = self.state.pods.get(identity)
            if pod is None or self._lives.get(identity) is not life:
                return
            with_models = life.read != life.generation or not pod.serving or count % MODELS_EVERY_PROBES == 0
            outcome = await self._probe(pod, life, with_models=with_models)
            if self._lives.get(identity) is not life:
                return
            if outcome is not None:
                self._apply(outcome)
            count += 1
            now = self.state.pods.get(identity)
            well = now is not None and now.serving and not life.slow
            interval_s = PROBE_INTERVAL_S if well else STARTING_INTERVAL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):  # wait_for can swallow a cancellation in 3.11
                    await life.kick.wait()
            life.kick.clear()

    async def _probe(self, pod: Pod, life: _Life, *, with_models: bool) -> Probed | None:
        """One look at a pod; None: nothing is known that was not known before."""
        identity = pod.spec.identity
        try:
            async with asyncio.timeout(self._times.probe_timeout_s):
                status = await self._health(pod)
                life.slow = life.refused = 0
                life.heard_s = self._clock()
                if status not in (200, 404, 405):  # 404: an engine without this route says nothing bad by it
                    return Probed(identity=identity, not_ready="health", detail=f"/health answered {status}")
                if not with_models:
                    return Probed(identity=identity, not_ready=None)
                generation = life.generation  # a restarted process may serve another model, at other ports
                models = await self._models(pod)
                life.read = generation if models else None
                source = await self._new_source(pod, life)
        except TimeoutError:
            return self._slow(pod, life, "health", f"no answer to a probe in {self._times.probe_timeout_s:g} s")
        except aiohttp.ClientConnectorError as exc:
            life.refused += 1
            if life.refused == REFUSED_PROBES_UNTIL_GONE and pod.models:
                self._replaced(identity, life)
            return Probed(identity=identity, not_ready="connect", detail=type(exc.os_error).__name__)
        except (aiohttp.ClientError, OSError) as exc:
            return self._slow(pod, life, "connect", type(exc).__name__)
        except ValueError as exc:
            return Probed(identity=identity, not_ready="models", detail=str(exc)[:200])
        if not models and pod.spec.model is None:
            return Probed(identity=identity, not_ready="models", detail="/v1/models lists nothing")
        return Probed(identity=identity, not_ready=None, models=models, source=source)

    def _slow(self, pod: Pod, life: _Life, why: NotReady, detail: str) -> Probed | None:
        life.slow += 1
        now_s = self._clock()
        others = (
            self._lives[i].heard_s
            for i, p in self.state.pods.items()
            if p.serving and i != pod.spec.identity and i in self._lives and p.base_model(None) == pod.base_model(None)
        )
        if pod.serving and may_stay(
            slow_probes=life.slow,
            silent_s=now_s - life.heard_s,
            others_silent_s=(now_s - heard_s for heard_s in others),
        ):
            return None
        return Probed(identity=pod.spec.identity, not_ready=why, detail=detail)

    def _replaced(self, identity: str, life: _Life) -> None:
        """Nobody listens at the address any more: what this life was doing is over, and so is its cache."""
        life.gone.set()
        for listener in self._restart_listeners:
            listener(identity)
        fresh = asyncio.Event()
        life.gone = fresh
        self._generations += 1
        life.generation = self._generations
        life.kick.set()
        pod = self.state.pods.get(identity)
        for worker in pod.workers if pod else ():
            self.bookings.retire(worker)
            self.adapters.retire(worker)
            self._breakers.pop(worker, None)

    async def _health(self, pod: Pod) -> int:
        assert self._session is not None
        async with self._session.get(pod.spec.url + "/health", allow_redirects=False) as reply:
            return reply.status

    async def _read_models_anew(self) -> None:
        """What serving pods list now. One that does not answer keeps what was known of it."""
        slots = asyncio.Semaphore(REREAD_AT_ONCE_PODS)

        async def read(pod: Pod) -> None:
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError):
                async with slots:
                    models = await self._models(pod)
                known = self.state.pods.get(pod.spec.identity)
                if models and known is not None and known.serving:
                    self._apply(Probed(identity=pod.spec.identity, not_ready=None, detail=known.detail, models=models))

        await asyncio.gather(*(read(pod) for pod in self.pods() if pod.serving))

    async def _models(self, pod: Pod) -> tuple[ModelEntry, ...]:
        """Raises ValueError when the answer is not a model list."""
        assert self._session is not None
        async with self._session.get(pod.spec.url + "/v1/models", allow_redirects=False) as reply:
            if reply.status != 200:
                if pod.spec.model is not None:
                    return ()
                raise ValueError(f"/v1/models answered {reply.status}")
            raw = await _bounded(reply, MAX_MODELS_BYTES)
        return parse_models(raw)

    async def _new_source(self, pod: Pod, life: _Life) -> EventSource | None:
        """Where this process says its events are, once it has said so; None: as before. Served all the same."""
        generation = life.generation
        if pod.spec.events is not None or life.told == generation:
            return None
        source = await self._event_source(pod)
        if source is not None:  # else it may be busy: asked again with the next look at its models
            life.told = generation
        return source

    async def _event_source(self, pod: Pod) -> EventSource | None:
        """What the pod answers; None when that was no answer."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(self._times.probe_timeout_s / 2),
                self._session.get(pod.spec.url + "/kv_event_sources", allow_redirects=False) as reply,
            ):
                if reply.status in (404, 405):  # before 0.32
                    return EventSource()
                if reply.status != 200:
                    return None
                return parse_event_sources(await _bounded(reply, MAX_MODELS_BYTES), pod.spec.url)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None
        except ValueError:  # another engine's page of this name
            return EventSource()

    async def _scrape_for_ever(self, identity: str, life: _Life) -> None:
        while self._lives.get(identity) is life:
            pod = self.state.pods.get(identity)
            if pod is None:
                return
            if pod.serving:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
                    await self._scrape(pod, life)
            await asyncio.sleep(max(self._times.scrape_interval_s, len(self._lives) / 200))

    async def _scrape(self, pod: Pod, life: _Life) -> None:
        assert self._session is not None
        before = {w.rank: self.bookings.of(w).inflight_requests for w in pod.workers}
        own_adapters = {w: self.adapters.in_flight(w) for w in pod.workers}
        async with (
            asyncio.timeout(self._times.scrape_timeout_s),
            self._session.get(pod.spec.url + "/metrics", allow_redirects=False) as reply,
        ):
            if reply.status != 200:
                return
            text = await _bounded(reply, MAX_METRICS_BYTES)
        life.heard_s = self._clock()
        sample = parse_metrics(text, now_s=self._clock())
        known = self.state.pods.get(pod.spec.identity)
        if known is None:
            return
        if known.started_at_s and sample.started_at_s and sample.started_at_s != known.started_at_s:
            self._replaced(pod.spec.identity, life)
        life.sample = sample
        self._scraped_adapters(sample, own_adapters)
        after = {w.rank: self.bookings.of(w).inflight_requests for w in known.workers}
        life.own_at_scrape = {rank: max(own, before.get(rank, 0)) for rank, own in after.items()}
        self._apply(
            Probed(
                identity=pod.spec.identity,
                not_ready=known.not_ready,
                detail=known.detail,
                started_at_s=sample.started_at_s,
                block_size_tokens=sample.block_size_tokens,
            )
        )

    def _scraped_adapters(self, sample: LoadSample, own: Mapping[WorkerAddress, Collection[str]]) -> None:
        lora = sample.lora
        if lora is None:
            return
        alone = len(own) == 1  # else nobody can say which rank has them: its slots are known, others' use is not
        for worker, names in own.items():
            self.adapters.scraped(
                worker,
                max_loras=lora.max_loras,
                running=lora.running if alone else (),
                waiting=lora.waiting if alone else (),
                own=names,
                valid_s=self._times.scrape_stale_after_s,
            )

    # -- showing --------------------------------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """Per pod, JSON-able, for /debug/pods and /ready."""
        now_s = self._clock()
        rows = []
        for identity, pod in self.state.pods.items():
            life = self._lives.get(identity)
            sample = life.sample if life else None
            rows.append(
                {
                    "pod": pod.spec.name,
                    "identity": identity,
                    "url": pod.spec.url,
                    "ready": pod.serving,
                    "reason": pod.not_ready,
                    "detail": pod.detail,
                    "models": [m.id for m in pod.models],
                    "base_model": pod.base_model(None),
                    "scrape_age_s": None if sample is None else round(now_s - sample.taken_at_s, 3),
                    "prefix_caching": None if sample is None else sample.prefix_caching,
                    "kv_blocks": None if sample is None else sample.kv_blocks,
                    "workers": [self._worker_status(w, sample) for w in pod.workers],
                }
            )
        return rows

    def _worker_status(self, worker: WorkerAddress, sample: LoadSample | None) -> dict[str, Any]:
        own = self.bookings.of(worker)
        rank = sample.ranks.get(worker.rank) if sample else None
        return {
            "rank": worker.rank,
            "block_size_tokens": self.block_size_tokens(worker),
            "inflight_requests": own.inflight_requests,
            "booked_prefill_tokens": own.prefill_tokens,
            "requests_total": own.requests_total,
            "breaker": "closed" if worker not in self._breakers else self._breakers[worker].state(now_s=self._clock()),
            "running_requests": None if rank is None else rank.running_requests,
            "waiting_requests": None if rank is None else rank.waiting_requests,
            "kv_held_ratio": None if rank is None else rank.kv_held_ratio,
            "cache_queries_tokens": None if rank is None else rank.cache_queries_tokens,
            "cache_hits_tokens": None if rank is None else rank.cache_hits_tokens,
            "adapters": self.adapters.status(worker),
        }


async def _bounded(reply: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    parts = bytearray()
    async for chunk in reply.content.iter_any():
        parts += chunk
        if len(parts) > limit_bytes:
            raise ValueError(f"{reply.url.path} is longer than {limit_bytes} bytes")
    return bytes(parts)


def parse_models(raw: bytes) -> tuple[ModelEntry, ...]:
    """The entries of a /v1/models reply. Raises ValueError (msgspec's) when it is not one."""
    listing = msgspec.json.decode(raw)
    rows = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(rows, list):
        raise ValueError("/v1/models is not a model list")
    entries = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            continue
        length = row.get("max_model_len")
        entries.append(
            ModelEntry(
                id=row["id"],
                root=row["root"] if isinstance(row.get("root"), str) else None,
                parent=row["parent"] if isinstance(row.get("parent"), str) else None,
                max_model_len_tokens=length if isinstance(length, int) and length > 0 else None,
                raw=row,
            )
        )
    return tuple(entries)


def parse_event_sources(raw: bytes, pod_url: str) -> EventSource:
    """A /kv_event_sources reply. Endpoints bound to all addresses get the pod's own host. Raises ValueError."""
    host = urlsplit(pod_url).hostname or ""
    return EventSource(
        tuple(
            (_reachable(row.get("endpoint"), host), _reachable(row.get("replay_endpoint"), host))
            for row in source_rows(raw)
            if row.get("publisher") in ("zmq", None)
        )
    )


def source_rows(raw: bytes) -> list[dict[str, Any]]:
    """The publishers of a /kv_event_sources reply, by rank. Raises ValueError when it is none.

    0.32 gives {rank: KVEventsConfig}; others a list, bare or as `sources`, whose items name their rank. With a rank a
    pod (external load balancing) that rank may have any number, so here they count from 0 in their order.
    """
    said = msgspec.json.decode(raw)
    if isinstance(said, dict) and isinstance(said.get("sources"), list):
        said = said["sources"]
    if isinstance(said, list):
        said = {row.get("data_parallel_rank") or 0: row for row in said if isinstance(row, dict)}
    if not isinstance(said, dict):
        raise ValueError("/kv_event_sources is neither a map nor a list")
    return [row for _, row in sorted(said.items(), key=lambda item: int(item[0])) if isinstance(row, dict)]


def _reachable(endpoint: Any, host: str) -> str | None:
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal():
        return None
    if name in ("*", "0.0.0.0", "[::]", "::"):  # noqa: S104  what the pod bound, not what we bind
        name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port}"
