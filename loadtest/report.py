"""Samples to figures: percentiles, goodput, hit share, balance, and whether the run may be believed. Pure.

Definitions: TTFT is from sending a request to the first event with text. ITL is the gap between events with text. TPOT
is (E2E - TTFT) / (output tokens - 1). Goodput counts answers whose TTFT and TPOT keep the limits. Failures are counted
as failures and are in no percentile.
May import: the standard library, msgspec, loadtest.samples.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.samples import ArmRun, Gaps, PodCounters, Run, Sample, StageOutcome, percentile

CLUMPED_EVENTS_PER_READ = 4.0
BUFFERED_TTFT_SHARE = 0.8


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, or several pooled. Times in seconds; None where nothing was measured."""

    requests: int
    failed: int
    failures: dict[str, int]
    failures_by_pod: dict[str, dict[str, int]]  # as far as the router's reply header names the pod; else under ""
    sent_per_s: float
    completed_per_s: float
    output_tok_per_s: float
    goodput_per_s: float
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p90: float | None
    itl_p99: float | None
    tpot_p50: float | None
    tpot_p90: float | None
    e2e_p50: float | None
    e2e_p90: float | None
    e2e_p99: float | None
    hit_share_usage: float | None  # cached / prompt tokens, as the answers' usage says
    hit_share_pods: float | None  # by the pods' own counters
    predicted_equal: float | None  # share of answers whose predicted cached tokens were the delivered ones
    requests_by_pod: dict[str, int]
    imbalance: float | None  # busiest pod's requests over the mean
    late_p99: float | None
    client_cpu: float
    prompt_tokens_mean: float | None
    output_tokens_mean: float | None
    events_per_read: float | None
    buffered_share: float | None  # answers that came all at once at their end
    wall_s: float

    @property
    def hit_share(self) -> float | None:
        """By the pods' own counters where they are known."""
        return self.hit_share_usage if self.hit_share_pods is None else self.hit_share_pods


def figures(
    stages: Sequence[StageOutcome], *, slo_ttft_s: float, slo_tpot_s: float, fleet: Sequence[str] = ()
) -> Figures:
    """The figures of the stages' requests pooled; rates are over the sum of their wall times.

    `fleet`: pods that are known to be there, by the names that replies give them; one without a request shows so.
    """
    samples = [s for stage in stages for s in stage.samples]
    good = [s for s in samples if s.failure is None]
    wall_s = sum(stage.wall_s for stage in stages)
    send_s = sum(stage.seconds or stage.wall_s for stage in stages)
    gaps = Gaps()
    for stage in stages:
        gaps.merge(stage.gaps)
    ttft = [s.ttft_s for s in good if s.ttft_s is not None]
    tpot = [t for t in map(tpot_s, good) if t is not None]
    within = sum(1 for s in good if (s.ttft_s or 0.0) <= slo_ttft_s and (tpot_s(s) or 0.0) <= slo_tpot_s)
    by_pod = _requests_by_pod(stages, samples, fleet)
    failures = Counter(s.failure for s in samples if s.failure is not None)
    reads = sum(s.reads for s in good)
    streamed = [s for s in good if s.events >= 8]
    return Figures(
        requests=len(samples),
        failed=len(samples) - len(good),
        failures=dict(failures.most_common()),
        failures_by_pod=_failures_by_pod(samples),
        sent_per_s=_per(len(samples), send_s),
        completed_per_s=_per(len(good), wall_s),
        output_tok_per_s=_per(sum(s.output_tokens for s in good), wall_s),
        goodput_per_s=_per(within, wall_s),
        ttft_mean=statistics.fmean(ttft) if ttft else None,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p90=percentile(ttft, 0.9),
        ttft_p99=percentile(ttft, 0.99),
        itl_p50=gaps.percentile_s(0.5),
        itl_p90=gaps.percentile_s(0.9),
        itl_p99=gaps.percentile_s(0.99),
        tpot_p50=percentile(tpot, 0.5),
        tpot_p90=percentile(tpot, 0.9),
        e2e_p50=percentile((s.e2e_s for s in good), 0.5),
        e2e_p90=percentile((s.e2e_s for s in good), 0.9),
        e2e_p99=percentile((s.e2e_s for s in good), 0.99),
        hit_share_usage=_hit_share_usage(good),
        hit_share_pods=_hit_share_pods(c for stage in stages for c in stage.pods.values()),
        predicted_equal=_predicted_equal(good),
        requests_by_pod=by_pod,
        imbalance=max(by_pod.values()) * len(by_pod) / sum(by_pod.values()) if any(by_pod.values()) else None,
        late_p99=percentile((s.late_s for s in samples), 0.99),
        client_cpu=max((stage.client_cpu_ratio for stage in stages), default=0.0),
        prompt_tokens_mean=_mean([s.prompt_tokens for s in good if s.prompt_tokens is not None]),
        output_tokens_mean=_mean([s.output_tokens for s in good]),
        events_per_read=sum(s.events for s in good) / reads if reads else None,
        buffered_share=sum(map(_came_at_once, streamed)) / len(streamed) if streamed else None,
        wall_s=wall_s,
    )


def tpot_s(sample: Sample) -> float | None:
    """Time per output token after the first; None for answers of one token."""
    if sample.ttft_s is None or sample.output_tokens < 2:
        return None
    return (sample.e2e_s - sample.ttft_s) / (sample.output_tokens - 1)


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm over its repeats."""

    arm: str
    pooled: Figures  # measured stages of all repeats
    by_stage: list[tuple[str, Figures]]  # all repeats of a stage pooled, measured stages in order
    ttft_p90_by_repeat: list[float]
    stage_mean_tok_per_s: float  # the unweighted mean over stages, as the published table has it
    weighted_ttft_p90: float | None  # the request-weighted mean of the stages' p90, likewise


def summaries(run: Run) -> list[ArmSummary]:
    """Every arm, in the order in which they first ran."""
    return [_summary(run, arm) for arm in run.arms]


def _summary(run: Run, arm: str) -> ArmSummary:
    repeats = [r for r in run.runs if r.arm == arm]
    names = list(dict.fromkeys(s.name for r in repeats for s in r.stages if s.measured))

    fleet = _fleet(run, arm)

    def of(stages: Iterable[StageOutcome]) -> Figures:
        return figures(list(stages), slo_ttft_s=run.slo_ttft_s, slo_tpot_s=run.slo_tpot_s, fleet=fleet)

    by_stage = [(n, of(s for r in repeats for s in r.stages if s.measured and s.name == n)) for n in names]
    p90s = [of(measured(r)).ttft_p90 for r in repeats]
    weighted = [(f.ttft_p90, f.requests) for _, f in by_stage if f.ttft_p90 is not None]
    total = sum(n for _, n in weighted)
    return ArmSummary(
        arm=arm,
        pooled=of(s for r in repeats for s in measured(r)),
        by_stage=by_stage,
        ttft_p90_by_repeat=[p for p in p90s if p is not None],
        stage_mean_tok_per_s=statistics.fmean([f.output_tok_per_s for _, f in by_stage]) if by_stage else 0.0,
        weighted_ttft_p90=sum(p * n for p, n in weighted) / total if total else None,
    )


def _fleet(run: Run, arm: str) -> list[str]:
    """The pods that replies name, in this arm or in one that shares a pod with it, warm-ups included."""
    named = {a: {s.pod for r in run.runs if r.arm == a for x in r.stages for s in x.samples if s.pod} for a in run.arms}
    return sorted(set().union(*(pods for pods in named.values() if pods & named[arm])))


def measured(arm_run: ArmRun) -> list[StageOutcome]:
    return [s for s in arm_run.stages if s.measured]


def doubts(run: Run) -> tuple[list[str], list[str]]:
    """(why the run is invalid, what else a reader must know). Valid when the first is empty."""
    invalid: list[str] = []
    know: list[str] = []
    for s in summaries(run):
        f = s.pooled
        if not f.requests:
            invalid.append(f"{s.arm}: no request was measured")
            continue
        if f.late_p99 is not None and f.late_p99 > run.late_limit_s:
            invalid.append(
                f"{s.arm}: the client was the limit: it sent p99 {f.late_p99 * 1000:.0f} ms late "
                f"(limit {run.late_limit_s * 1000:g} ms); use more --client-processes or another machine"
            )
        if f.failed == f.requests:
            invalid.append(f"{s.arm}: every request failed ({_names(f.failures)})")
        elif f.failed:
            know.append(f"{s.arm}: {f.failed} of {f.requests} requests failed ({_names(f.failures)})")
        know += _stream_doubts(s.arm, f)
        late = [x.fleet_late_s for r in run.runs if r.arm == s.arm for x in measured(r) if x.fleet_late_s is not None]
        if late and max(late) > 0.25:
            know.append(
                f"{s.arm}: the emulated pods fell up to {max(late):.1f} s behind their own clock: this machine is too "
                "small for this load; use a lower --speed"
            )
        know += [f"{s.arm}: {c}" for r in run.runs if r.arm == s.arm for c in r.caveats]
    if not all(r.cache_reset for r in run.runs) and len(run.runs) > 1:
        know.append("the pods' caches could not be emptied between arms: every arm had prompts of its own instead")
    if not run.exact_lengths:
        know.append("no tokenizer was given: prompt lengths are estimates (one common word for each token)")
    return invalid, list(dict.fromkeys(know + run.notes))


def _stream_doubts(arm: str, f: Figures) -> list[str]:
    if f.buffered_share is not None and f.buffered_share > 0.05:
        return [
            f"{arm}: {f.buffered_share:.0%} of the answers came all at once at their end: something between client "
            "and pod buffers the streams; TTFT and ITL are not the pods'"
        ]
    if f.events_per_read is not None and f.events_per_read >= CLUMPED_EVENTS_PER_READ:
        return [
            f"{arm}: tokens arrive in clumps ({f.events_per_read:.1f} events a read): a proxy buffers, or the client "
            "is too slow; ITL is too low and TTFT too high"
        ]
    return []


def _came_at_once(s: Sample) -> bool:
    return s.reads * CLUMPED_EVENTS_PER_READ <= s.events and (s.ttft_s or 0.0) >= BUFFERED_TTFT_SHARE * s.e2e_s


def _requests_by_pod(stages: Sequence[StageOutcome], samples: Sequence[Sample], fleet: Sequence[str]) -> dict[str, int]:
    """By the router's reply header where there is one, else by the pods' own counters."""
    named = Counter(s.pod for s in samples if s.pod is not None)
    known = list(dict.fromkeys(pod for stage in stages for pod in stage.pods))
    if named:
        return {pod: named.get(pod, 0) for pod in dict.fromkeys([*known, *sorted({*named, *fleet})])}
    return {p: round(sum(stage.pods[p].requests for stage in stages if p in stage.pods)) for p in known}


def _failures_by_pod(samples: Sequence[Sample]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for s in samples:
        if s.failure is not None:
            counts.setdefault(s.pod or "", Counter())[s.failure] += 1
    return {pod: dict(counts[pod].most_common()) for pod in sorted(counts)}


def _hit_share_usage(good: Sequence[Sample]) -> float | None:
    told = [(s.cached_tokens, s.prompt_tokens) for s in good if s.cached_tokens is not None and s.prompt_tokens]
    prompt = sum(p for _, p in told if p)
    return sum(c for c, _ in told if c) / prompt if prompt else None


def _hit_share_pods(counters: Iterable[PodCounters]) -> float | None:
    hits = queries = 0.0
    for c in counters:
        hits += c.hit_tokens
        queries += c.queried_tokens
    return hits / queries if queries else None


def _predicted_equal(good: Sequence[Sample]) -> float | None:
    pairs = [(s.matched_tokens, s.cached_tokens) for s in good if s.matched_tokens is not None]
    pairs = [p for p in pairs if p[1] is not None]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def _names(failures: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in failures.items())


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
