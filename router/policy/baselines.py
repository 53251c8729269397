"""The rules `prefix` is compared with, each with the signature of `pick()`. Pure.

The simple ones (random, round-robin, least-loaded) ignore the cache on purpose. The published ones are written from
their descriptions, with their own normalisation and constants, so that like is compared with like; what they lack is
theirs. `weights` and `consistent-hash` are offered for use. May import: the standard library, xxhash, router.core.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from random import Random

import xxhash

from router.policy.pick import (
    Candidate,
    Chosen,
    Costs,
    Decision,
    Policy,
    RoutingRequest,
    ahead_s,
    ahead_tokens,
    fit,
    pick,
    refuse,
)

BOUNDED_LOAD_RATIO = 1.25  # of the mean load, consistent hashing with bounded loads
STICKY_CACHED_RATIO = 0.8  # sticky-until-saturated: who counts as holding the prompt
STICKY_PATIENCE_S = 14.0  # ... and how much longer its queue may be
CACHE_AWARE_MATCH_RATIO = 0.3  # cache-aware thresholds
CACHE_AWARE_ABS_REQUESTS = 64
CACHE_AWARE_REL_RATIO = 1.5
WEIGHTS_QUEUE_HALF_REQUESTS = 16.0  # in flight at which an idle worker's queue score has halved


def random(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Any fit worker, each as likely."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    return _chosen(rng.choice(able), "random")


def round_robin(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """In turn by address, counted by `request.sequence`; an unfit worker's turn goes to the next."""
    able = {c.worker for c in fit(candidates, request)}
    if not able:
        return refuse(candidates)
    order = sorted(candidates, key=lambda c: c.worker)
    start = request.sequence % len(order)
    turn = next(c for c in order[start:] + order[:start] if c.worker in able)
    return _chosen(turn, "round_robin")


def least_loaded(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Fewest requests in flight, then fewest booked prefill tokens."""
    return least_cost(candidates, request, rng, "load", lambda c: (c.inflight_requests, c.booked_prefill_tokens))


def longest_match(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Whoever holds most of the prompt, however busy; then fewest in flight. A shared beginning draws all to one."""
    return least_cost(candidates, request, rng, "match", lambda c: (-c.matched_tokens, c.inflight_requests))


def greedy_ttft(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """The least time to this request's first token: (Q + M) / R."""
    return least_cost(
        candidates,
        request,
        rng,
        "ttft",
        lambda c: (ahead_s(c, request),),
    )


def lmetric(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Two indicators multiplied: prefill tokens ahead of the first token times the batch (arXiv 2603.15202)."""
    return least_cost(
        candidates,
        request,
        rng,
        "lmetric",
        lambda c: (
            ahead_tokens(c, request) * (c.inflight_requests + 1),
            c.inflight_requests,
        ),
    )


def weights(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """3 x share of the prompt held + 2 x free KV + 2 x shortness of the queue, each on an absolute scale of 0..1."""
    tokens = max(request.prompt_tokens, 1)

    def cost(c: Candidate) -> tuple[float]:
        queue = WEIGHTS_QUEUE_HALF_REQUESTS / (WEIGHTS_QUEUE_HALF_REQUESTS + c.inflight_requests)
        return (-3 * c.matched_tokens / tokens - 2 * (1 - c.kv_held_ratio) - 2 * queue,)

    return least_cost(candidates, request, rng, "weights", cost)


def precise_3_2_2(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """The published `precise` arm: prefix 3, queue 2, KV 2, prefix and queue each scaled by the fleet's own spread.

    Matches are scaled between the least and the most of those that match at all (all alike: 1; no match: 0), waiting
    requests between the shortest and the longest queue (all alike: 1).
    """
    score = precise_score(fit(candidates, request))
    return least_cost(candidates, request, rng, "weights", lambda c: (-score(c),))


def precise_score(able: Sequence[Candidate]) -> Callable[[Candidate], float]:
    """The published weighted sum, 0..7; the most wins."""
    matches = [c.matched_tokens for c in able if c.matched_tokens] or [0]
    low, high = min(matches), max(matches)
    waits = [c.waiting_requests for c in able] or [0]
    short, long = min(waits), max(waits)

    def score(c: Candidate) -> float:
        prefix = 0.0
        if c.matched_tokens:
            prefix = 1.0 if low == high else (c.matched_tokens - low) / (high - low)
        queue = 1.0 if short == long else (long - c.waiting_requests) / (long - short)
        return 3 * prefix + 2 * queue + 2 * (1 - c.kv_held_ratio)

    return score


def sticky_until_saturated(
    candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random
) -> Decision:
    """The published default of August 2026: among those holding at least 80 % the least prefill ahead, itself included,
    until the best of all would be more than 14 s earlier."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    seconds = {c.worker: ahead_s(c, request) for c in able}
    sticky = [c for c in able if c.matched_tokens >= STICKY_CACHED_RATIO * request.prompt_tokens > 0]
    if sticky and min(seconds[c.worker] for c in sticky) <= min(seconds.values()) + STICKY_PATIENCE_S:
        able = sticky
    return least_cost(able, request, rng, "sticky" if able is sticky else "ttft", lambda c: (seconds[c.worker],))


def cache_aware(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Thresholds as in the SGLang family: the shortest queue while loads are uneven, else the best match if it is good
    enough, else the worker that was given least so far."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    loads = [c.inflight_requests for c in able]
    if max(loads) - min(loads) > CACHE_AWARE_ABS_REQUESTS and max(loads) > CACHE_AWARE_REL_RATIO * min(loads):
        return least_cost(able, request, rng, "load", lambda c: (c.inflight_requests,))
    if max(c.matched_tokens for c in able) > CACHE_AWARE_MATCH_RATIO * request.prompt_tokens:
        return least_cost(able, request, rng, "match", lambda c: (-c.matched_tokens,))
    return least_cost(able, request, rng, "placement", lambda c: (c.placed_tokens,))


def consistent_hash(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Rendezvous hashing of `request.affinity` with bounded load: the first in the request's own order of workers that
    carries less than 1.25 times its share. Without affinity: least loaded."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    if not request.affinity:
        return least_loaded(candidates, request, costs, rng)
    bound = ceil(BOUNDED_LOAD_RATIO * (sum(c.inflight_requests for c in able) + 1) / len(able))
    order = sorted(able, key=lambda c: xxhash.xxh3_64_intdigest(request.affinity + str(c.worker).encode()))
    return _chosen(next(c for c in order if c.inflight_requests < bound), "hash")


def least_cost(
    candidates: Sequence[Candidate],
    request: RoutingRequest,
    rng: Random,
    reason: str,
    cost: Callable[[Candidate], tuple[float, ...]],
) -> Decision:
    """The fit worker of least cost; ties at random."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    priced = [(cost(c), c) for c in able]
    least = min(p for p, _ in priced)
    return _chosen(rng.choice([c for p, c in priced if p == least]), reason, price=least[0])


def _chosen(c: Candidate, reason: str, price: float = 0.0) -> Chosen:
    return Chosen(worker=c.worker, matched_tokens=c.matched_tokens, reason=reason, price=price)


POLICIES: Mapping[str, Policy] = {
    "prefix": pick,
    "weights": weights,
    "consistent-hash": consistent_hash,
    "least-loaded": least_loaded,
    "round-robin": round_robin,
    "random": random,
    "precise-3-2-2": precise_3_2_2,
    "sticky-until-saturated": sticky_until_saturated,
    "lmetric": lmetric,
    "longest-match": longest_match,
    "cache-aware": cache_aware,
    "greedy-ttft": greedy_ttft,
}
"""Every rule by the name that `--policy` takes."""
