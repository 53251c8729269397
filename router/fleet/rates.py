"""How fast each worker computes prompts, learnt from its own first tokens. Pure.

What a policy needs is seconds, and only tokens are booked. Each first token gives a speed: tokens that were ahead of it
over the seconds it took. Whatever else delays a first token (a full KV cache, a stalled client) only makes that speed
smaller, so a high quantile of the latest ones is kept, not their mean; and a worker with few pairs is taken for a
typical one of its fleet. May import: the standard library.
"""

from collections import deque
from collections.abc import Hashable
from statistics import median

AHEAD_MIN_TOKENS = 1000  # below, the constant part of a first token's time says more than its tokens
KEEP_PAIRS = 48
QUANTILE = 0.75
TRUST_PAIRS = 4  # with so many pairs a worker's own figure and the fleet's count alike
BOUND_RATIO = 64.0  # a learnt rate stays within this factor of the configured one


class PrefillRates:
    """All workers of a fleet. Equal workers get nearly equal rates, which is what makes choices between them fair."""

    def __init__(self, prior_tokens_per_s: float) -> None:
        self._prior_tokens_per_s = prior_tokens_per_s
        self._typical_tokens_per_s = prior_tokens_per_s
        self._speeds: dict[Hashable, deque[float]] = {}
        self._rates: dict[Hashable, float] = {}
        self._until_typical = 0

    def observe(self, worker: Hashable, ahead_tokens: int, seconds: float) -> None:
        """A first token came `seconds` after its request, which had `ahead_tokens` before it, its own included."""
        if ahead_tokens < AHEAD_MIN_TOKENS or seconds <= 0.0:
            return
        speeds = self._speeds.get(worker)
        if speeds is None:
            speeds = self._speeds[worker] = deque(maxlen=KEEP_PAIRS)
        low, high = self._prior_tokens_per_s / BOUND_RATIO, self._prior_tokens_per_s * BOUND_RATIO
        speeds.append(min(max(ahead_tokens / seconds, low), high))
        self._rates[worker] = sorted(speeds)[int(QUANTILE * len(speeds))]
        self._until_typical -= 1
        if self._until_typical < 0:
            self._until_typical = len(self._speeds)
            known = [self._rates[w] for w, s in self._speeds.items() if len(s) >= TRUST_PAIRS]
            self._typical_tokens_per_s = median(known) if known else self._prior_tokens_per_s

    def tokens_per_s(self, worker: Hashable) -> float:
        """The worker's rate; of one that has shown nothing yet, what is typical here, else what was configured."""
        own = self._rates.get(worker)
        if own is None:
            return self._typical_tokens_per_s
        pairs = len(self._speeds[worker])
        return (pairs * own + TRUST_PAIRS * self._typical_tokens_per_s) / (pairs + TRUST_PAIRS)

    def retire(self, worker: Hashable) -> None:
        """This life of the worker is over."""
        self._speeds.pop(worker, None)
        self._rates.pop(worker, None)
