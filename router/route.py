"""START READING HERE: one request's way to a pod, on one page: tokens -> keys -> holders -> depths -> pick -> book.

`prepare` may wait (tokenizer, index); `choose` never does: between looking at the bookings and adding to them nothing
else runs, so that a burst of siblings sees each other.
May import: router.tokenize, router.index, router.fleet, router.policy, router.core, router.ops, router.shadow. No HTTP.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import msgspec

from router.core.hashing import chain_keys, root_key, usable_blocks
from router.core.types import BlockKey, Clock, IndexUnavailable, WorkerAddress
from router.fleet.bookings import Booking, Bookings
from router.fleet.fleet import Fleet
from router.fleet.rates import PrefillRates
from router.fleet.state import Pod
from router.index.local import LocalView
from router.index.port import Held, IndexReader
from router.ops import Metrics
from router.peers import Peers
from router.policy.overload import overloaded
from router.policy.pick import (
    Best,
    Candidate,
    Chosen,
    Costs,
    Decision,
    Policy,
    Refused,
    RoutingRequest,
    best_of,
    prefill_tokens,
    price,
    uncached_tokens,
)
from router.policy.trial import Arm, Control
from router.prefixes import PrefixTable
from router.roster import Entry, KeySpace, Listing, Roster
from router.shadow import Shadow
from router.tokenize.approximate import BLOCK_BYTES, canonical_prompt
from router.tokenize.port import NoTokens, PromptTokens, Tokens

EXACT_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Endpoints whose prompt becomes tokens here; everything else goes by model and load."""
RANKED_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions"})
"""Where vLLM honours X-data-parallel-rank (0.32: entrypoints/generate/base/serving.py); elsewhere it picks itself."""
BYTES_PER_TOKEN = 4  # the field's rule of thumb, for work that is only guessed at
CPU_TIER_WEIGHT, STORAGE_TIER_WEIGHT = 0.8, 0.5  # a block that must be loaded back saves less than one on the GPU


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What routing needs of a request. `body` is the JSON text, inflated if it came compressed; b"" if not JSON."""

    endpoint: str  # path without query: "/v1/chat/completions"
    model: str | None  # as the client named it; None: the body names none (multipart, unknown shape)
    body: bytes = b""
    cache_salt: str | None = None
    skips_cache: bool = False  # prompt_logprobs, echo + logprobs: the engine reads nothing from its cache
    policy: str | None = None  # x-warmroute-policy, when allowed
    body_bytes: int = 0  # length as received, for an estimate when there are no tokens


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """One request's keys in one key space and who the index says holds them. `exact` is False for canonical bytes."""

    keys: Sequence[BlockKey]
    usable: int  # how many of them an engine could take from its cache
    block_size_tokens: int
    held: Mapping[WorkerAddress, Held]
    exact: bool
    index_away: bool = False  # it was asked and could not say


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a request that does not change while it looks for a worker."""

    request: RouteRequest
    tokens: PromptTokens | NoTokens | None
    chains: Mapping[KeySpace, Chain]
    sequence: int
    policy: str | None = None  # another than the router's own: asked for, or drawn into the control group
    arm: Arm | None = None  # None: no control group, or the request chose its policy itself

    @property
    def prompt_tokens(self) -> int | None:
        """Length of the prompt; None when the exact ids are not known."""
        return self.tokens.count if isinstance(self.tokens, PromptTokens) and not self.tokens.partial else None

    @property
    def work_tokens(self) -> int:
        """Length of the prompt, guessed from its bytes when there is nothing better."""
        known = self.prompt_tokens
        return known if known is not None else max(self.request.body_bytes // BYTES_PER_TOKEN, 1)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Where to send it, already booked: enter `booking` (or release it) whatever happens next."""

    worker: WorkerAddress
    url: str  # base URL of the pod
    name: str  # what x-warmroute-pod says
    data_parallel_rank: int | None  # header X-data-parallel-rank to set; None: pod has one rank
    booking: Booking
    policy: str
    reason: str
    prompt_tokens: int | None  # None: token ids are not known
    matched_tokens: int | None  # prediction for this worker; None: token ids are not known
    indexed_tokens: int | None  # the part of it that the index alone has reported
    arm: Arm | None = None  # with --control: served by the router's own policy, or by the control's


class _View(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as this request sees it."""

    pod: Pod
    candidate: Candidate
    chain: Chain | None
    gpu_tokens: int
    indexed_tokens: int


class RouteLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Lifetimes of what this router remembers of its own choices."""

    local_ttl_s: float = 30.0  # until first token, at most
    confirm_grace_s: float = 6.0  # after first token the events have said it all, late ones too (ADR 4)
    local_ttl_no_events_s: float = 600.0
    prefill_tokens_per_s: float = 20_000.0
    lora_load_s: float = 0.5
    overload_prefill_s: float = 0.0  # only to say what `Waiting` would do; 0: nobody waits


class Conductor:
    """Alone knows the order of the steps."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        tokens: Tokens,
        index: IndexReader,
        local: LocalView,
        metrics: Metrics,
        policies: Mapping[str, Policy],
        policy: str,
        seed: str,
        costs: Costs | None = None,
        limits: RouteLimits | None = None,
        rng: random.Random | None = None,
        peers: Peers | None = None,
        control: Control | None = None,
        shadow: str | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._tokens = tokens
        self._index = index
        self._local = local
        self._metrics = metrics
        self._policies = policies
        self._policy = policy
        self._seed = seed
        self._costs = costs or Costs()
        self._limits = limits or RouteLimits()
        self._rates = fleet.bookings.rates = PrefillRates(self._limits.prefill_tokens_per_s)
        fleet.adapters.load_s = self._limits.lora_load_s
        self._rng = rng or random.Random()
        self._peers = peers or Peers(b"")
        self._clock = clock
        self._control = control
        self._shadow = Shadow(shadow, policies[shadow], self._costs, metrics) if shadow is not None else None
        self._sequence = itertools.count()
        self._roots: dict[tuple[str, str | None], BlockKey] = {}
        self._roster = Roster(fleet)
        self.prefixes = PrefixTable()

    @property
    def bookings(self) -> Bookings:
        return self._fleet.bookings

    def has_policy(self, name: str) -> bool:
        """`name` can be asked for with x-warmroute-policy."""
        return name in self._policies

    async def prepare(self, request: RouteRequest) -> Prepared:
        """Tokens, keys and the index's answer. Never raises for a request's content: it degrades, counted."""
        prepared = await self._prepare(request)
        if isinstance(prepared.tokens, NoTokens):
            self._metrics.token_fallbacks.labels(reason=prepared.tokens.reason).inc()
        return prepared

    async def _prepare(self, request: RouteRequest) -> Prepared:
        tokens: PromptTokens | NoTokens | None = None
        chains: dict[KeySpace, Chain] = {}
        listed = self._roster.of(request.model).entries
        if request.endpoint in EXACT_ENDPOINTS and request.body and listed:
            base = listed[0].pod.base_model(request.model) or request.model or ""
            tokens = await self._tokens.prompt(model=base, endpoint=request.endpoint, body=request.body)
            for space in self._roster.of(request.model).spaces:
                chains[space] = await self._chain(space, request, tokens)
        policy, arm = self._draw(request)
        return Prepared(
            request=request, tokens=tokens, chains=chains, sequence=next(self._sequence), policy=policy, arm=arm
        )

    def _draw(self, request: RouteRequest) -> tuple[str | None, Arm | None]:
        """Which policy serves it, and in which arm. Drawn once a request: a retry stays in its arm."""
        if self._control is None or request.policy is not None:
            return request.policy, None
        if self._rng.random() < self._control.share_ratio:
            return self._control.policy, "control"
        return None, "main"

    async def _chain(self, space: KeySpace, request: RouteRequest, tokens: PromptTokens | NoTokens) -> Chain:
        if isinstance(tokens, NoTokens):
            return self._approximate(space, request)
        root = self._root(space, request.cache_salt)
        keys = chain_keys(root, tokens.packed, space.block_size_tokens)
        usable = len(keys) if tokens.partial else usable_blocks(tokens.count, space.block_size_tokens)
        held = await self._holders(keys[:usable]) if not request.skips_cache else {}
        return Chain(
            keys=keys,
            usable=usable,
            block_size_tokens=space.block_size_tokens,
            held=held or {},
            exact=True,
            index_away=held is None,
        )

    async def _holders(self, keys: Sequence[BlockKey]) -> Mapping[WorkerAddress, Held] | None:
        """What the index says; None when it cannot."""
        if not keys:
            return {}
        try:
            return await self._index.holders(keys)
        except IndexUnavailable as exc:  # what we routed ourselves, then load: a slow answer beats none
            self._metrics.index_fallbacks.labels(reason=exc.reason).inc()
            return None

    def _approximate(self, space: KeySpace, request: RouteRequest) -> Chain:
        """No ids: a chain over canonical bytes, known to the local view only."""
        root = root_key(seed="approximate" + self._seed, model=space.model, lora_name=space.lora_name)
        packed = canonical_prompt(request.endpoint, request.body, request.cache_salt)
        keys = chain_keys(root, packed, BLOCK_BYTES // 4)
        tokens = BLOCK_BYTES // BYTES_PER_TOKEN
        return Chain(keys=keys, usable=len(keys), block_size_tokens=tokens, held={}, exact=False)

    def _root(self, space: KeySpace, cache_salt: str | None) -> BlockKey:
        if cache_salt is not None:
            return root_key(seed=self._seed, model=space.model, lora_name=space.lora_name, cache_salt=cache_salt)
        name = (space.model, space.lora_name)
        root = self._roots.get(name)
        if root is None:
            if len(self._roots) >= 1024:
                self._roots.clear()
            root = self._roots[name] = root_key(seed=self._seed, model=space.model, lora_name=space.lora_name)
        return root

    async def look_again(self, prepared: Prepared) -> Prepared:
        """The same with what the index says now, for a request that has waited: its siblings may have been computed."""
        chains: dict[KeySpace, Chain] = {}
        for space, chain in prepared.chains.items():
            chains[space] = chain
            if chain.exact and not prepared.request.skips_cache:
                held = await self._holders(chain.keys[: chain.usable])
                if held is not None:
                    chains[space] = msgspec.structs.replace(chain, held=held, index_away=False)
        return msgspec.structs.replace(prepared, chains=chains)

    # -- choosing: no await from here on ----------------------------------------------------------------------------

    def choose(self, prepared: Prepared, *, exclude: Set[WorkerAddress] = frozenset()) -> Choice | Refused:
        """The worker, booked in the same step. `exclude`: tried before and failed."""
        name = prepared.policy or self._policy
        shadow = self._shadow if name == self._policy else None
        views = self._views(prepared, exclude, everybody=name != "prefix" or shadow is not None)
        if not views:  # those worth a look have all been tried, or are left alone
            views = self._views(prepared, exclude, everybody=True)
        if not views and not exclude:  # all are left alone: one client's poison must not close the fleet to the others
            views = self._views(prepared, exclude, everybody=True, ill=True)
        by_worker = {v.candidate.worker: v for v in views}
        crowd_key = _deepest(views)
        request = self._routing_request(prepared, crowd_key)
        candidates = [v.candidate for v in views]
        decision = self._policies[name](candidates, request, self._costs, self._rng)
        if isinstance(decision, Refused):
            self._metrics.refusals.labels(reason=decision.reason).inc()
            return decision
        view = by_worker[decision.worker]
        if shadow is not None:
            self._count_shadow(shadow, shadow.decide(candidates, request), prepared, view, by_worker)
        booking = self._book(prepared, view, crowd_key)
        if decision.reason == "placement":
            self.bookings.place(decision.worker, prepared.work_tokens)
        self._metrics.decisions.labels(policy=name, reason=_reason(prepared, decision)).inc()
        if prepared.prompt_tokens is not None:
            self._metrics.prompt_tokens.labels(policy=name).inc(prepared.prompt_tokens)
            self._metrics.matched_tokens.labels(policy=name).inc(view.gpu_tokens)
            deepest = max(v.gpu_tokens for v in views)
            self.prefixes.note(crowd_key, depth_tokens=deepest, saved_tokens=view.gpu_tokens)
        return self._choice(prepared, view, decision, name, booking)

    def _count_shadow(
        self,
        shadow: Shadow,
        decision: Decision,
        prepared: Prepared,
        served: _View,
        views: Mapping[WorkerAddress, _View],
    ) -> None:
        if isinstance(decision, Refused):  # the serving policy found a worker among the same candidates
            shadow.count(agrees=False)
            return
        shadow.count(agrees=decision.worker == served.candidate.worker)
        if prepared.prompt_tokens is not None:
            shadow.count_tokens(
                serving=self._policy,
                prompt_tokens=prepared.prompt_tokens,
                served_tokens=served.gpu_tokens,
                shadow_tokens=views[decision.worker].gpu_tokens,
            )

    def weigh(self, prepared: Prepared) -> tuple[Sequence[Candidate], RoutingRequest]:
        """Who may get it, as it is now, to say whether it should wait. Books nothing."""
        views = self._views(prepared, frozenset(), everybody=False)
        return [v.candidate for v in views], RoutingRequest(prompt_tokens=prepared.work_tokens)

    def prefill_due_s(self, worker: WorkerAddress) -> float:
        """Seconds until the worker should have computed all that is booked on it."""
        return self.bookings.of(worker).prefill_tokens / self._rates.tokens_per_s(worker)

    def _choice(self, prepared: Prepared, view: _View, decision: Chosen, policy: str, booking: Booking) -> Choice:
        known = prepared.prompt_tokens
        spec = view.pod.spec
        ranked = view.pod.ranks > 1 and prepared.request.endpoint in RANKED_ENDPOINTS
        return Choice(
            worker=decision.worker,
            url=spec.url,
            name=spec.name,
            data_parallel_rank=decision.worker.rank if ranked else None,
            booking=booking,
            policy=policy,
            reason=_reason(prepared, decision),
            prompt_tokens=known,
            matched_tokens=view.gpu_tokens if known is not None else None,
            indexed_tokens=view.indexed_tokens if known is not None else None,
            arm=prepared.arm,
        )

    def _routing_request(self, prepared: Prepared, crowd_key: BlockKey | None) -> RoutingRequest:
        first = next((c.keys[0] for c in prepared.chains.values() if c.keys), b"")
        return RoutingRequest(
            prompt_tokens=prepared.work_tokens,
            crowd_requests=self.bookings.crowd(crowd_key) + self._peers.crowd(crowd_key, self._clock()),
            sequence=prepared.sequence,
            affinity=first,
        )

    def _views(
        self, prepared: Prepared, exclude: Set[WorkerAddress], *, everybody: bool, ill: bool = False
    ) -> list[_View]:
        """Who may get it. `ill`: those whose breaker is open, as long as they answer at all."""
        may = self._fleet.answers if ill else self._fleet.allows
        local: dict[KeySpace, Mapping[WorkerAddress, int]] = {
            space: self._local.holders(chain.keys[: chain.usable]) for space, chain in prepared.chains.items()
        }
        holders = [w for space, chain in prepared.chains.items() for w in (*chain.held, *local[space])]
        listing = self._roster.of(prepared.request.model)
        adapter = self._adapter(listing)
        return [
            self._view(prepared, entry, local, adapter)
            for entry in self._roster.worth_a_look(listing, holders, everybody=everybody)
            if entry.worker not in exclude and may(entry.worker)
        ]

    def _adapter(self, listing: Listing) -> str | None:
        return listing.adapter if self._limits.lora_load_s else None

    def _view(
        self,
        prepared: Prepared,
        entry: Entry,
        local: Mapping[KeySpace, Mapping[WorkerAddress, int]],
        adapter: str | None,
    ) -> _View:
        worker, space = entry.worker, entry.space
        chain = prepared.chains.get(space) if space is not None else None
        gpu = indexed = matched = 0
        if chain is not None and space is not None and not prepared.request.skips_cache:
            held = chain.held.get(worker)
            size = chain.block_size_tokens
            indexed = held.gpu * size if held else 0
            gpu = max(indexed, local[space].get(worker, 0) * size)
            matched = max(gpu, int(_weighted_blocks(held) * size) if held else 0)
        facts, own = self._fleet.facts(worker), self.bookings.of(worker)
        theirs = self._peers.load(worker, self._clock())  # told, and fresher than what scrapes see of it
        candidate = Candidate(
            worker=worker,
            matched_tokens=matched,
            booked_prefill_tokens=max(facts.prefill_tokens, own.prefill_tokens + theirs.prefill_tokens),
            inflight_requests=max(facts.inflight_requests, own.inflight_requests + theirs.inflight_requests),
            kv_held_ratio=facts.kv_held_ratio,
            prefill_tokens_per_s=self._rates.tokens_per_s(worker),
            placed_tokens=self.bookings.placed_tokens(worker) + theirs.placed_tokens,
            adapter_s=0.0 if adapter is None else self._fleet.adapters.delay_s(worker, adapter),
            max_model_len_tokens=entry.max_model_len_tokens if prepared.prompt_tokens is not None else None,
        )
        return _View(pod=entry.pod, candidate=candidate, chain=chain, gpu_tokens=gpu, indexed_tokens=indexed)

    def _book(self, prepared: Prepared, view: _View, crowd_key: BlockKey | None) -> Booking:
        worker, chain = view.candidate.worker, view.chain
        settle: Callable[[], None] | None = None
        unsay: Callable[[], None] | None = None
        if chain is not None and chain.keys:
            noted = self._local.note(worker, chain.keys, ttl_s=self._limits.local_ttl_s)
            if chain.exact:
                self._peers.chose(worker, chain.keys, view.gpu_tokens // chain.block_size_tokens)
            # A worker whose events never came (wrong port, endpoint without *) is as good as one without any; one of
            # which they came has them, even if only the indexer was told where.
            heard = chain.exact and self._fleet.tells(worker)
            told = heard or (chain.exact and view.pod.publishes)
            # With the index away nobody can ask it what the events said; its reader clears this when it is back.
            lasting = chain.index_away or not heard
            ttl_s = self._limits.local_ttl_no_events_s if lasting else self._limits.confirm_grace_s

            def settle() -> None:
                self._local.settle(noted, ttl_s=ttl_s, revive=not told)

            def unsay() -> None:
                self._local.unsay(noted)

        adapter = self._adapter(self._roster.of(prepared.request.model))
        uncached = max(prepared.work_tokens - view.gpu_tokens, 0)
        return self.bookings.hold(
            worker,
            prefill_tokens=round(prefill_tokens(prepared.work_tokens, uncached)),
            prompt_tokens=prepared.work_tokens,
            crowd_key=crowd_key,
            on_first_token=settle,
            on_void=unsay,
            on_release=None if adapter is None else self._fleet.adapters.hold(worker, adapter),
            exact=prepared.prompt_tokens is not None,
        )

    # -- explaining -------------------------------------------------------------------------------------------------

    async def explain(self, request: RouteRequest) -> dict[str, Any]:
        """What would be done with this request now, and why; nothing is booked, counted or sent."""
        prepared = await self._prepare(request)
        views = self._views(prepared, frozenset(), everybody=True)
        crowd_key = _deepest(views)
        routing = self._routing_request(prepared, crowd_key)
        name = request.policy or self._policy
        candidates = [v.candidate for v in views]
        decision = self._policies[name](candidates, routing, self._costs, self._rng)
        if isinstance(decision, Chosen):
            decision = msgspec.structs.replace(decision, reason=_reason(prepared, decision))
        best = best_of(candidates, routing) if candidates else Best(0, 1, 0.0)
        limit_s = self._limits.overload_prefill_s
        return {
            "model": request.model,
            "policy": name,
            "prompt_tokens": prepared.prompt_tokens,
            "tokens": _tokens_shown(prepared.tokens),
            "crowd_requests": routing.crowd_requests,
            "choice": msgspec.to_builtins(decision),
            "chosen_pod": _pod_name(views, decision),
            "would_wait": limit_s > 0 and overloaded(candidates, routing, limit_s),
            "control": msgspec.to_builtins(self._control),
            "shadow": self._shadow_shown(views, routing),
            "workers": [
                {**self._row(v, best, routing), "chosen": v.candidate.worker == getattr(decision, "worker", None)}
                for v in views
            ],
        }

    def _shadow_shown(self, views: Sequence[_View], routing: RoutingRequest) -> dict[str, Any] | None:
        if self._shadow is None:
            return None
        decision = self._shadow.decide([v.candidate for v in views], routing)
        return {
            "policy": self._shadow.name,
            "choice": msgspec.to_builtins(decision),
            "chosen_pod": _pod_name(views, decision),
        }

    def _row(self, view: _View, best: Best, routing: RoutingRequest) -> dict[str, Any]:
        c = view.candidate
        terms = price(c, best, routing, self._costs)
        return {
            "pod": view.pod.spec.name,
            "rank": c.worker.rank,
            "matched_tokens": view.gpu_tokens,
            "indexed_tokens": view.indexed_tokens,
            "block_size_tokens": view.chain.block_size_tokens if view.chain else None,
            "uncached_tokens": uncached_tokens(c, routing),
            "booked_prefill_tokens": c.booked_prefill_tokens,
            "inflight_requests": c.inflight_requests,
            "kv_held_ratio": c.kv_held_ratio,
            "placed_tokens": c.placed_tokens,
            "peers": msgspec.to_builtins(self._peers.load(c.worker, self._clock())),
            "adapter_s": c.adapter_s,
            "terms": {**msgspec.structs.asdict(terms), "price": terms.price},
        }


def _weighted_blocks(held: Held) -> float:
    return held.gpu + CPU_TIER_WEIGHT * (held.cpu - held.gpu) + STORAGE_TIER_WEIGHT * (held.storage - held.cpu)


def _deepest(views: Sequence[_View]) -> BlockKey | None:
    """The key of the deepest block of this prompt that anybody is known to hold."""
    best_depth, key = 0, None
    for view in views:
        if view.chain is not None:
            depth = view.gpu_tokens // view.chain.block_size_tokens
            if depth > best_depth:
                best_depth, key = depth, view.chain.keys[depth - 1]
    return key


def _reason(prepared: Prepared, decision: Chosen) -> str:
    """A policy takes what it is told for tokens; here it is known what they are."""
    if isinstance(prepared.tokens, PromptTokens):
        return decision.reason
    if prepared.tokens is None:
        return decision.reason if decision.reason not in ("prefix", "placement") else "load"
    return "approximate"


def _tokens_shown(tokens: PromptTokens | NoTokens | None) -> dict[str, Any]:
    match tokens:
        case PromptTokens():
            return {"exact": True, "partial": tokens.partial}
        case NoTokens():
            return {"exact": False, "reason": tokens.reason, "detail": tokens.detail}
        case None:
            return {"exact": False, "reason": "endpoint"}


def _pod_name(views: Sequence[_View], decision: Chosen | Refused) -> str | None:
    if isinstance(decision, Refused):
        return None
    return next(v.pod.spec.name for v in views if v.candidate.worker == decision.worker)


__all__ = ["Choice", "Conductor", "Prepared", "Refused", "RouteLimits", "RouteRequest"]
