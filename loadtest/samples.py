"""The nouns of a measured run: one sample a request, one outcome a stage, all of them JSON. Pure.

A saved run is a `Run`; every report is made from it alone.
May import: the standard library, msgspec.
"""

import math
from collections.abc import Iterable

import msgspec

FORMAT = 1
"""Of the saved JSON. A reader refuses another number."""


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One request as its client saw it. Times in seconds; `at_s` counts from the stage's begin."""

    at_s: float  # when it was sent
    late_s: float  # how much later than the plan
    ttft_s: float | None  # to the first event with text; None when none came
    e2e_s: float  # to the end of the answer, or to the failure
    prompt_tokens: int | None  # of usage
    output_tokens: int  # of usage, else the number of events with text
    cached_tokens: int | None  # of usage
    events: int  # SSE events with text
    reads: int  # network reads that brought events with text: far fewer than events means buffering
    failure: str | None  # None: answered whole
    pod: str | None  # x-warmroute-pod
    matched_tokens: int | None  # x-warmroute-matched-tokens
    group: str = ""


class Gaps(msgspec.Struct):
    """A histogram of inter-token gaps, buckets 2 % apart, so that a million gaps are a small JSON object."""

    buckets: dict[int, int] = {}

    def add(self, gap_s: float) -> None:
        bucket = round(math.log(max(gap_s, 1e-6)) / _STEP)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: "Gaps") -> None:
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def percentile_s(self, share: float) -> float | None:
        """The gap that `share` of the gaps do not exceed; None without gaps."""
        total = sum(self.buckets.values())
        if not total:
            return None
        left = share * total
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                break
        return math.exp(bucket * _STEP)

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    @staticmethod
    def scaled(gaps: "Gaps", factor: float) -> "Gaps":
        """The gaps times a factor, to the nearest bucket."""
        shift = round(math.log(factor) / _STEP)
        return Gaps({bucket + shift: count for bucket, count in gaps.buckets.items()})


_STEP = math.log(1.02)


class PodCounters(msgspec.Struct, frozen=True):
    """What one pod's own /metrics counted during a stage."""

    queried_tokens: float
    hit_tokens: float
    prompt_tokens: float
    generated_tokens: float
    preemptions: float
    requests: float


class StageOutcome(msgspec.Struct):
    """What a crowd did in one stage: sent for `seconds`, then drained."""

    name: str
    rate_per_s: float
    seconds: float
    measured: bool
    wall_s: float = 0.0  # from the stage's begin to the last answer
    planned_requests: int = 0
    samples: list[Sample] = []
    gaps: Gaps = msgspec.field(default_factory=Gaps)
    client_cpu_ratio: float = 0.0  # of the busiest client process: 1 = a whole core
    pods: dict[str, PodCounters] = {}
    fleet_late_s: float | None = None  # emulated pods: how far behind their own clock they fell at most

    def merge(self, other: "StageOutcome") -> None:
        """Join what another client process did in the same stage."""
        self.wall_s = max(self.wall_s, other.wall_s)
        self.planned_requests += other.planned_requests
        self.samples += other.samples
        self.gaps.merge(other.gaps)
        self.client_cpu_ratio = max(self.client_cpu_ratio, other.client_cpu_ratio)


class ArmRun(msgspec.Struct):
    """All stages once under one arm."""

    arm: str
    repeat: int
    stages: list[StageOutcome]
    cache_reset: bool  # the pods' caches were emptied before; else the prompts were new ones
    caveats: list[str] = []


class Run(msgspec.Struct):
    """A whole load test, as it is saved."""

    name: str
    workload: str
    seed: int
    started_unix_s: float
    command: str
    machine: str
    target: str
    model: str
    client_processes: int
    exact_lengths: bool  # prompts counted by a tokenizer; else estimated
    emulated: str | None  # profile of the emulated fleet and its speed; None for pods that do not say so
    slo_ttft_s: float
    slo_tpot_s: float
    late_limit_s: float
    runs: list[ArmRun]
    notes: list[str] = []
    format: int = FORMAT

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(r.arm for r in self.runs))


def percentile(values: Iterable[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least `share` of the values do not exceed. None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
