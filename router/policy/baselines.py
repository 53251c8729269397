"""The rules `prefix` is compared with, each with the signature of `pick()`. Pure.

The simple ones (random, round-robin, least-loaded) ignore the cache on purpose.
May import: the standard library, msgspec, router.core, router.policy.pick.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from router.policy.pick import Candidate, Chosen, Costs, Decision, Policy, RoutingRequest, fit, pick, refuse


def random(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Any fit worker, each as likely."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    return _chosen(rng.choice(able), "random")


def round_robin(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """In turn by address, counted by `request.sequence`; an unfit worker's turn goes to the next."""
    able = fit(candidates, request)
    if not able:
        return refuse(candidates)
    order = sorted(candidates, key=lambda c: c.worker)
    start = request.sequence % len(order)
    fit_workers = {c.worker for c in able}
    for c in order[start:] + order[:start]:
        if c.worker in fit_workers:
            return _chosen(c, "round_robin")
    raise AssertionError("a fit worker is among the candidates")


def least_loaded(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
    """Fewest requests in flight, then fewest booked prefill tokens; ties at random."""
    return _least(candidates, request, rng, "load", lambda c: (c.inflight_requests, c.booked_prefill_tokens))


def _least(
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
    "random": random,
    "round-robin": round_robin,
    "least-loaded": least_loaded,
}
"""Every rule by the name that `--policy` takes."""
