"""Unfit? What does it cost? Which? The only question the shell asks of this room is `pick()`. Pure.

May import: the standard library, msgspec, xxhash, router.core.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

import msgspec
import xxhash

from router.core.types import WorkerAddress

ATTENTION_EQUAL_CONTEXT_TOKENS = 32_768.0  # where attention costs as much as all else: Llama 8B 30,600, 70B 53,000


class Candidate(msgspec.Struct, frozen=True):
    """One worker as the router knows it now. Tokens are this request's, loads are everybody's."""

    worker: WorkerAddress
    matched_tokens: int  # of this prompt, held by the worker (whole blocks, at most prompt - 1), predictions included
    booked_prefill_tokens: int = 0  # Q: work (see `prefill_tokens`) sent there and not yet at first token
    inflight_requests: int = 0  # n
    waiting_requests: int = 0  # of them, not yet admitted by the engine, as last scraped; only published rules read it
    kv_held_ratio: float = 0.0  # share of the worker's KV cache held by running requests, 0..1
    prefill_tokens_per_s: float = 20_000.0  # R, learnt or configured
    placed_tokens: int = 0  # of prompts that nobody held, sent there lately
    adapter_s: float = 0.0  # until the request's LoRA adapter could run there: waiting for a slot, loading
    ready: bool = True
    max_model_len_tokens: int | None = None


class RoutingRequest(msgspec.Struct, frozen=True):
    """What a policy may know of a request. `prompt_tokens` is 0 when the ids are not known."""

    prompt_tokens: int = 0
    crowd_requests: int = 0  # in flight whose deepest known block is this request's
    sequence: int = 0  # counts requests, for round-robin
    affinity: bytes = b""  # its beginning (first block key or session): an order of workers of its own; b"" = none


class Costs(msgspec.Struct, frozen=True):
    """Weights of the default policy (docs/adr/0003). Each has a unit."""

    alpha: float = 3.0
    beta_per_request: float = 0.3
    crowd_half_requests: float = 2.0  # c0, on each copy of what is shared
    n0_requests: float = 4.0
    w_kv_prompts: float = 0.85  # a full cache weighs as much as computing so many of this prompt
    w_adapter: float = 3.0  # like alpha: loading again what another worker has spends capacity and evicts somebody
    placement_miss_ratio: float = 0.95  # above this share missing everywhere, place where least was placed
    placement_slack_ratio: float = 1.5
    home_miss_ratio: float = 0.1  # up to this share missing at its holders, the quiet ones are taken in a fixed order
    home_slack_requests: float = 8.0  # quiet: so many more in flight than on the quietest


class Refused(msgspec.Struct, frozen=True, omit_defaults=True):
    reason: Literal["no_worker", "overloaded", "too_long"]  # closed: it is a metric label
    retry_after_s: int = 0  # when there may be room; 0: not estimated


class Chosen(msgspec.Struct, frozen=True):
    """`reason` is a metric label from a closed set; `price` is the winner's own, 0 for rules without one."""

    worker: WorkerAddress
    matched_tokens: int
    reason: str
    price: float = 0.0


Decision = Chosen | Refused
Policy = Callable[[Sequence[Candidate], RoutingRequest, Costs, Random], Decision]


class Terms(msgspec.Struct, frozen=True):
    """One candidate's price by part, for explain: J = (queue_s + own_s + regret_s + kv_s + adapter_s) * company."""

    queue_s: float
    own_s: float
    regret_s: float
    kv_s: float
    adapter_s: float
    company: float

    @property
    def price(self) -> float:
        return (self.queue_s + self.own_s + self.regret_s + self.kv_s + self.adapter_s) * self.company


def uncached_tokens(candidate: Candidate, request: RoutingRequest) -> int:
    """M: the part of the prompt this worker would have to compute; an engine always computes the last token."""
    return max(request.prompt_tokens - candidate.matched_tokens, 1)


def prefill_tokens(prompt_tokens: int, uncached_tokens: int) -> float:
    """The work of computing the last `uncached_tokens` of a prompt, in tokens at a prompt's beginning.

    A token's linear layers cost 2 FLOPs a parameter, its attention 4 a layer, hidden unit and token before it. So the
    last 10,000 tokens of a prompt of 60,000 cost 2.7 times the first 10,000.
    """
    return uncached_tokens * (1.0 + (prompt_tokens - 0.5 * uncached_tokens) / ATTENTION_EQUAL_CONTEXT_TOKENS)


def own_tokens(candidate: Candidate, request: RoutingRequest) -> float:
    """The request's own work there, see `prefill_tokens`."""
    return prefill_tokens(request.prompt_tokens, uncached_tokens(candidate, request))


def ahead_tokens(candidate: Candidate, request: RoutingRequest) -> float:
    """Work there before the request's first token, its own part included."""
    return candidate.booked_prefill_tokens + own_tokens(candidate, request)


def ahead_s(candidate: Candidate, request: RoutingRequest) -> float:
    """Seconds of prefill there before the request's first token, its own part included."""
    return ahead_tokens(candidate, request) / candidate.prefill_tokens_per_s


def fit(candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[Candidate]:
    """Those that may get this request. Per worker, never a fleet-wide gate."""
    return [
        c
        for c in candidates
        if c.ready and (c.max_model_len_tokens is None or request.prompt_tokens < c.max_model_len_tokens)
    ]


class Best(msgspec.Struct, frozen=True, gc=False):
    """What the warmest workers would have to compute of a prompt, and how many they are: the copies there are of it."""

    uncached_tokens: int
    workers: int
    own_tokens: float  # the work of it, see `prefill_tokens`


def best_of(candidates: Sequence[Candidate], request: RoutingRequest) -> Best:
    """Over workers that may get the request, at least one."""
    uncached = [uncached_tokens(c, request) for c in candidates]
    least = min(uncached)
    return Best(least, uncached.count(least), prefill_tokens(request.prompt_tokens, least))


def price(c: Candidate, best: Best, request: RoutingRequest, costs: Costs) -> Terms:
    """J of docs/adr/0003: seconds of prefill ahead, plus a surcharge for a miss that another worker would not have."""
    m = own_tokens(c, request)
    n = c.inflight_requests
    crowd = request.crowd_requests / best.workers  # on each copy there is
    a = (costs.alpha + costs.beta_per_request * n) / (1.0 + crowd / costs.crowd_half_requests)
    r = c.prefill_tokens_per_s
    return Terms(
        queue_s=c.booked_prefill_tokens / r,
        own_s=m / r,
        regret_s=a * (m - best.own_tokens) / r,
        kv_s=costs.w_kv_prompts * c.kv_held_ratio * request.prompt_tokens / r,
        adapter_s=costs.w_adapter * c.adapter_s,
        company=n + costs.n0_requests,
    )


def pick(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """The default, `prefix`: least J; a prompt nobody holds goes where least was placed lately, near the least J; one
    that is held whole goes home, see `_home`."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    best_known = best_of(able, request)
    m_min = best_known.uncached_tokens
    priced = [(price(c, best_known, request, costs).price, c) for c in able]
    least = min(p for p, _ in priced)
    reason = "prefix" if m_min < request.prompt_tokens else "load"
    if request.prompt_tokens and m_min > costs.placement_miss_ratio * request.prompt_tokens:
        best = _least_placed(priced, least, request, costs)
        reason = "placement"
    else:
        best = [c for p, c in priced if p == least]
        if request.affinity and m_min <= costs.home_miss_ratio * request.prompt_tokens:
            best = [_home(best, able, m_min, request, costs)]
    winner = best[0] if len(best) == 1 else rng.choice(best)
    its_price = next(p for p, c in priced if c is winner)
    return Chosen(worker=winner.worker, matched_tokens=winner.matched_tokens, reason=reason, price=its_price)


def _least_placed(
    priced: Sequence[tuple[float, Candidate]], least: float, request: RoutingRequest, costs: Costs
) -> list[Candidate]:
    """Of those near the cheapest, the ones where the fewest tokens of such prompts were placed lately.

    Near: at most half as much work ahead of the first token again, and no more of it booked than the cheapest has with
    this prompt; at most half as much company and held KV again; not much slower than is usual here. Or hardly more
    company and nothing ahead, for on an idle fleet ratios say little. Tokens, not seconds, so that the noise of learnt
    rates does not decide who gets more.
    """
    cheapest = next(c for p, c in priced if p == least)
    quiet = min(c.inflight_requests for _, c in priced) + costs.n0_requests
    soonest = ahead_tokens(cheapest, request)
    burden_max = costs.placement_slack_ratio * _burden(cheapest, request, costs)
    rates = sorted(c.prefill_tokens_per_s for _, c in priced)
    slowest_tokens_per_s = rates[len(rates) // 2] / costs.placement_slack_ratio
    near = [
        (c.placed_tokens, p, c)
        for p, c in priced
        if (
            c.prefill_tokens_per_s >= slowest_tokens_per_s
            and c.booked_prefill_tokens <= soonest
            and ahead_tokens(c, request) <= soonest * costs.placement_slack_ratio
            and _burden(c, request, costs) <= burden_max
        )
        or (c.booked_prefill_tokens == 0 and c.inflight_requests <= quiet and not c.adapter_s)
        or c is cheapest
    ]
    placed, price_, _ = min(near, key=lambda t: t[:2])
    return [c for w, p, c in near if w == placed and p == price_]


def _burden(c: Candidate, request: RoutingRequest, costs: Costs) -> float:
    """The price without what is ahead and without the worker's speed, for a prompt that nobody holds."""
    work = own_tokens(c, request) + costs.w_kv_prompts * c.kv_held_ratio * request.prompt_tokens
    return (work + costs.w_adapter * c.adapter_s * c.prefill_tokens_per_s) * (c.inflight_requests + costs.n0_requests)


def _home(
    best: Sequence[Candidate], able: Sequence[Candidate], m_min: int, request: RoutingRequest, costs: Costs
) -> Candidate:
    """Of the cheapest and the quiet that hold as much: the first in the prompt's own order of workers.

    Else a prefix that was hot once is kept warm everywhere by what is left of its load; so the copies that the load
    does not need see no use and make room. Every router has the same order.
    """
    quiet = min(c.inflight_requests for c in able) + costs.home_slack_requests
    holders = [
        c
        for c in able
        if c.inflight_requests <= quiet
        and uncached_tokens(c, request) == m_min
        and not c.booked_prefill_tokens
        and not c.adapter_s
    ]
    return min((*best, *holders), key=lambda c: xxhash.xxh3_64_intdigest(request.affinity + str(c.worker).encode()))


def refuse(candidates: Sequence[Candidate]) -> Refused:
    """Why nobody fits: too long a prompt only when somebody was ready."""
    return Refused("too_long" if any(c.ready for c in candidates) else "no_worker")
