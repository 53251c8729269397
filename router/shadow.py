"""A policy that decides too, on the same facts as the one that serves, and is only counted.

May import: the standard library, router.policy, router.ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.ops import Metrics
from router.policy.pick import Candidate, Costs, Decision, Policy, RoutingRequest


class Shadow:
    """What `name` would have done. It has dice of its own: with it or without, the serving policy decides alike."""

    def __init__(self, name: str, policy: Policy, costs: Costs, metrics: Metrics, *, rng: Random | None = None) -> None:
        self.name = name
        self._policy, self._costs, self._metrics = policy, costs, metrics
        self._rng = rng or Random()

    def decide(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Decision:
        """Its decision now."""
        return self._policy(candidates, request, self._costs, self._rng)

    def count(self, *, agrees: bool) -> None:
        """It had to choose where the serving policy chose."""
        self._metrics.shadow_decisions.labels(policy=self.name, agrees="yes" if agrees else "no").inc()

    def count_tokens(self, *, serving: str, prompt_tokens: int, served_tokens: int, shadow_tokens: int) -> None:
        """Of a prompt of known length: how much of it each of the two choices is predicted to find cached."""
        self._metrics.shadow_prompt_tokens.inc(prompt_tokens)
        self._metrics.shadow_matched_tokens.labels(policy=serving).inc(served_tokens)
        self._metrics.shadow_matched_tokens.labels(policy=self.name).inc(shadow_tokens)
