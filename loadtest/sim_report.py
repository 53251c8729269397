"""Outcome of a simulation -> rows of figures, tables, and the comparison with published measurements. Pure but for
reading published.toml. May import: the standard library, msgspec, loadtest.sim_world.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, mean

import msgspec

from loadtest.sim_world import Outcome, Sample, StageOutcome

ORACLE_SUFFIX = "+oracle"  # a rule given true caches and true remaining work without lag
PUBLISHED = Path(__file__).parent / "published.toml"


class Row(msgspec.Struct, frozen=True):
    """One stage, or a whole run. Times in seconds; `imbalance` is the busiest pod's requests over the mean."""

    name: str
    requests: int
    failed: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    itl_p50_s: float
    itl_p99_s: float
    e2e_mean_s: float
    hit_ratio: float
    output_tokens_per_s: float
    imbalance: float
    preemptions: int
    waiting_mean_requests: float
    waiting_max_requests: int
    kv_used_mean_ratio: float
    wrong_prediction_ratio: float  # requests whose cached tokens were not what the router had predicted


def percentile(values: Sequence[float], p: float) -> float:
    """The value that a share `p` of all do not exceed (nearest rank); 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(p * len(ordered)), len(ordered) - 1)]


def row(name: str, stages: Sequence[StageOutcome], pods: int) -> Row:
    """The stages' figures, pooled; output tokens/s over the time from first sending to the drained end."""
    samples = [s for stage in stages for s in stage.samples]
    done = [s for s in samples if s.finished_s >= 0]
    ttft = [s.first_s - s.sent_s for s in samples if s.first_s >= 0]
    steps = sum((stage.itl_steps for stage in stages), Counter[int]())
    waiting = [n for stage in stages for n in stage.waiting]
    kv = [r for stage in stages for r in stage.kv_used]
    seconds = sum(stage.ended_s - stage.begun_s for stage in stages)
    per_pod = Counter(s.pod for s in samples if s.pod >= 0)
    prompts = sum(s.prompt_tokens for s in samples if s.first_s >= 0)
    return Row(
        name=name,
        requests=len(samples),
        failed=sum(s.failed for s in samples),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        ttft_mean_s=sum(ttft) / max(len(ttft), 1),
        itl_p50_s=_step_percentile(steps, 0.5),
        itl_p99_s=_step_percentile(steps, 0.99),
        e2e_mean_s=sum(s.finished_s - s.sent_s for s in done) / max(len(done), 1),
        hit_ratio=sum(s.cached_tokens for s in samples) / max(prompts, 1),
        output_tokens_per_s=sum(s.output_tokens for s in done) / max(seconds, 1e-9),
        imbalance=max(per_pod.values(), default=0) * pods / max(sum(per_pod.values()), 1),
        preemptions=sum(stage.preemptions for stage in stages),
        waiting_mean_requests=sum(waiting) / max(len(waiting), 1),
        waiting_max_requests=max(waiting, default=0),
        kv_used_mean_ratio=sum(kv) / max(len(kv), 1),
        wrong_prediction_ratio=sum(map(_wrong, samples)) / max(len(samples), 1),
    )


def rows(outcome: Outcome, pods: int) -> list[Row]:
    """A row for each measured stage, and one for all of them when there are several."""
    measured = [s for s in outcome.stages if s.measured]
    out = [row(s.name, [s], pods) for s in measured]
    return [*out, row("all", measured, pods)] if len(out) > 1 else out


def ladder_figures(stage_rows: Sequence[Row]) -> tuple[float, float]:
    """The published aggregates: mean of the stages' output tokens/s, request-weighted mean of their TTFT p90."""
    stages = [r for r in stage_rows if r.name != "all"]
    requests = max(sum(r.requests for r in stages), 1)
    return (
        sum(r.output_tokens_per_s for r in stages) / max(len(stages), 1),
        sum(r.ttft_p90_s * r.requests for r in stages) / requests,
    )


def table(all_rows: Mapping[str, Sequence[Row]]) -> str:
    """Plain text, a line for each row."""
    head = (
        f"{'rule':<22} {'stage':<14} {'req':>6} {'fail':>4} {'p50 s':>8} {'p90 s':>8} {'p99 s':>8} {'ITL ms':>7} "
        f"{'ITL p99':>7} {'hit':>5} {'tok/s':>8} {'imbal':>5} {'preempt':>7} {'waiting':>8} {'KV':>4} {'wrong':>6}"
    )
    lines = [head]
    for rule, rule_rows in all_rows.items():
        for r in rule_rows:
            lines.append(  # noqa: PERF401
                f"{rule:<22} {r.name:<14} {r.requests:>6} {r.failed:>4} {r.ttft_p50_s:>8.3f} {r.ttft_p90_s:>8.3f} "
                f"{r.ttft_p99_s:>8.3f} {r.itl_p50_s * 1000:>7.0f} {r.itl_p99_s * 1000:>7.0f} {r.hit_ratio:>5.2f} "
                f"{r.output_tokens_per_s:>8.0f} {r.imbalance:>5.2f} {r.preemptions:>7} "
                f"{r.waiting_mean_requests:>8.2f} {r.kv_used_mean_ratio:>4.2f} {r.wrong_prediction_ratio:>6.3f}"
            )
    return "\n".join(lines)


def ratio_table(results: Sequence[tuple[str, str, Row]]) -> str:
    """Per scenario: each rule's mean TTFT p90 and p99 over its seeds, divided by the best rule's (decode steps of 10 ms
    do not count); then the geometric mean and the worst over all scenarios."""
    rules = list(dict.fromkeys(rule for _, rule, _ in results))
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for scenario in dict.fromkeys(s for s, _, _ in results):
        means = {rule: _means([r for s, p, r in results if (s, p) == (scenario, rule)]) for rule in rules}
        best = tuple(min(m[i] for m in means.values()) for i in (0, 1))
        found[scenario] = {rule: (m[0] / best[0], m[1] / best[1]) for rule, m in means.items()}
    width = max(map(len, rules)) + 1
    lines = []
    for i, what in enumerate(("p90", "p99")):
        lines.append(f"{'TTFT ' + what + ' / best rule':<26}" + "".join(f"{r:>{width}}" for r in rules))
        for scenario, ratios in found.items():
            lines.append(f"{scenario:<26}" + "".join(f"{ratios[r][i]:>{width}.2f}" for r in rules))
        columns = {r: [ratios[r][i] for ratios in found.values()] for r in rules}
        lines.append(f"{'geometric mean':<26}" + "".join(f"{geometric_mean(columns[r]):>{width}.3f}" for r in rules))
        lines.append(f"{'worst':<26}" + "".join(f"{max(columns[r]):>{width}.2f}" for r in rules))
    return "\n".join(lines)


def _means(some: Sequence[Row]) -> tuple[float, float]:
    return (max(mean(r.ttft_p90_s for r in some), 0.01), max(mean(r.ttft_p99_s for r in some), 0.01))


class Verdict(msgspec.Struct, frozen=True):
    """One bound: what was published, what the model says, and whether it holds."""

    what: str
    published: float
    model: float
    beside: float  # the older run, shown and not judged; 0: none
    within: bool


def acceptance(precise: Sequence[Row], blind: Sequence[Row]) -> list[Verdict]:
    """Both arms of the full ladder against the judged tables: precise tokens/s within 15 % and p90 within 2 x at every
    stage, p99 at 60/s within 2 x; cache-blind p90 within 1.5 x from 20/s up."""
    published = tomllib.loads(PUBLISHED.read_text())
    judged, shown = published["judged"], published["shown"]
    mine, theirs = ({r.name: r for r in arm} for arm in (precise, blind))
    out = []
    for (rate, tokens, p90), (_, old_tokens, old_p90) in zip(judged["precise"], shown["precise"], strict=True):
        r = mine[f"{rate}/s"]
        got = r.output_tokens_per_s
        out.append(Verdict(f"precise tok/s at {rate}/s", tokens, got, old_tokens, abs(got / tokens - 1) <= 0.15))
        out.append(Verdict(f"precise p90 s at {rate}/s", p90, r.ttft_p90_s, old_p90, _within(r.ttft_p90_s, p90, 2.0)))
    p99 = judged["p99_at_60_s"]
    out.append(
        Verdict("precise p99 s at 60/s", p99, mine["60/s"].ttft_p99_s, 0, _within(mine["60/s"].ttft_p99_s, p99, 2))
    )
    for (rate, _, p90), (_, _, old_p90) in zip(judged["blind"], shown["blind"], strict=True):
        if rate >= 20:
            got = theirs[f"{rate}/s"].ttft_p90_s
            out.append(Verdict(f"blind p90 s at {rate}/s", p90, got, old_p90, _within(got, p90, 1.5)))
    return out


def acceptance_table(verdicts: Sequence[Verdict]) -> str:
    lines = [f"{'bound':<26} {'published':>9} {'model':>9} {'ratio':>6} {'2025':>9}  met"]
    for v in verdicts:
        lines.append(  # noqa: PERF401
            f"{v.what:<26} {v.published:>9.2f} {v.model:>9.2f} {v.model / v.published:>6.2f} "
            f"{v.beside or float('nan'):>9.2f}  {'yes' if v.within else 'NO'}"
        )
    missed = sum(not v.within for v in verdicts)
    return "\n".join([*lines, f"{len(verdicts) - missed} of {len(verdicts)} bounds met"])


def _within(value: float, reference: float, factor: float) -> bool:
    return reference / factor <= value <= reference * factor


def _wrong(sample: Sample) -> bool:
    return sample.first_s >= 0 and sample.predicted_tokens != sample.cached_tokens


def _step_percentile(steps: Counter[int], p: float) -> float:
    target = p * steps.total()
    seen = 0
    for milliseconds in sorted(steps):
        seen += steps[milliseconds]
        if seen >= target:
            return milliseconds / 1000
    return 0.0
