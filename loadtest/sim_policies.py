"""Rules that need a memory of their own, for comparison in simulation only: a fresh one for each run. Pure.

May import: the standard library, router.core, router.policy.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from router.core.types import WorkerAddress
from router.policy.baselines import POLICIES, least_cost, precise_score
from router.policy.pick import Candidate, Chosen, Costs, Decision, Policy, RoutingRequest, fit, refuse

NO_HIT_LRU_WEIGHT = 2.0


def static_partition() -> Policy:
    """Every new beginning of a prompt to the next worker in turn, and there for ever: an even split, blind to load."""
    home: dict[bytes, int] = {}

    def rule(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
        able = fit(candidates, request)
        if not able:
            return refuse(candidates)
        turn = home.setdefault(request.affinity, len(home))
        c = able[turn % len(able)]
        return Chosen(worker=c.worker, matched_tokens=c.matched_tokens, reason="static")

    return rule


def precise_3_2_2_2() -> Policy:
    """The published arm of spring 2026: prefix 3, queue 2, KV 2, and for prompts that nobody holds any of, weight 2 on
    how long ago a worker last got such a one."""
    last_cold: dict[WorkerAddress, int] = {}

    def rule(candidates: Sequence[Candidate], request: RoutingRequest, costs: Costs, rng: Random) -> Decision:
        able = fit(candidates, request)
        score = precise_score(able)
        cold = not any(c.matched_tokens for c in able)
        rest = dict.fromkeys((c.worker for c in able), 0.5)
        if cold:
            order = sorted(able, key=lambda c: last_cold.get(c.worker, -1))
            fresh = sum(1 for c in able if c.worker not in last_cold)
            for i, c in enumerate(order):
                rest[c.worker] = 1.0 if i < fresh or len(able) == 1 else 1.0 - i / (len(able) - 1)
        decision = least_cost(
            candidates, request, rng, "weights", lambda c: (-score(c) - NO_HIT_LRU_WEIGHT * rest[c.worker],)
        )
        if cold and isinstance(decision, Chosen):
            last_cold[decision.worker] = max(last_cold.values(), default=0) + 1
        return decision

    return rule


FACTORIES: Mapping[str, Callable[[], Policy]] = {
    "static-partition": static_partition,
    "precise-3-2-2-2": precise_3_2_2_2,
    **{name: (lambda p=policy: p) for name, policy in POLICIES.items()},  # type: ignore[misc]
}
"""Name -> a maker of the rule: POLICIES and the ones with a memory."""
