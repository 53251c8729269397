"""Runs of the matrix -> pooled percentiles, ratios to the best rule, and verdicts with bootstrap intervals. Pure.

May import: the standard library, msgspec, loadtest.sim_report.
"""

import csv
import io
import math
from array import array
from collections.abc import Mapping, Sequence
from random import Random
from statistics import geometric_mean, mean

import msgspec

from loadtest.sim_report import ORACLE_SUFFIX, Row, percentile

ALLOWED_RATIO = 0.10  # of the best rule's percentile; or one decode step where that is more
BLOCKS_PER_RUN = 20  # requests that follow each other share a queue: the bootstrap draws runs of them, not single ones
RESAMPLES = 1000
MEANS = ("hit_ratio", "output_tokens_per_s", "imbalance")  # of a row, over the seeds
FLOOR_S = 0.01  # percentiles below are alike


class Cell(msgspec.Struct, frozen=True, order=True):
    """One run: which pods, which regime, which rule, which seed."""

    profile: str
    scenario: str
    rule: str
    seed: int


class Run(msgspec.Struct, frozen=True):
    """What came of it. `ttft_s`: float32 in the order of sending, infinite for a request without a first token."""

    cell: Cell
    cpu_s: float
    row: Row
    ttft_s: bytes


class Verdict(msgspec.Struct, frozen=True):
    """The judged rule against the best rule of a regime on one percentile. Times in seconds."""

    profile: str
    scenario: str
    percentile: float
    best_rule: str
    best_s: float
    judged_s: float
    oracle_s: float  # the best rule given the truth; nan when no rule was
    allowed_s: float  # how much worse is still even
    low_s: float  # 95 % interval of (judged - best) by paired bootstrap; both 0 for p90, which is judged as it is
    high_s: float

    @property
    def lost(self) -> bool:
        """p90: worse by more than is allowed. p99: so, and the whole interval says it."""
        worse_s = self.judged_s - self.best_s if self.percentile < 0.99 else self.low_s
        return self.judged_s - self.best_s > self.allowed_s and worse_s > self.allowed_s

    @property
    def ratio(self) -> float:
        return max(self.judged_s, FLOOR_S) / max(self.best_s, FLOOR_S)


Pooled = Mapping[str, list[Run]]  # rule -> its seeds


def by_regime(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """(profile, scenario) -> rule -> runs by seed."""
    out: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda r: r.cell.seed):
        c = run.cell
        out.setdefault((c.profile, c.scenario), {}).setdefault(c.rule, []).append(run)
    return out


def pooled_s(runs: Sequence[Run], p: float) -> float:
    """A percentile of TTFT over all seeds together."""
    return percentile([t for run in runs for t in _values(run)], p)


def oracle_s(rules: Pooled, p: float) -> float:
    """The best of the rules that were given the truth; nan when none was."""
    return min((pooled_s(rs, p) for r, rs in rules.items() if r.endswith(ORACLE_SUFFIX)), default=math.nan)


def judge(runs: Sequence[Run], judged: str) -> list[Verdict]:
    """The judged rule against the best of the rules without truth, per profile and regime, on p90 and p99."""
    out = []
    for (profile, scenario), rules in by_regime(runs).items():
        if judged not in rules:
            continue
        for p in (0.90, 0.99):
            plain = {r: pooled_s(rs, p) for r, rs in rules.items() if not r.endswith(ORACLE_SUFFIX)}
            best = min((r for r in plain if r != judged), key=lambda r: plain[r], default=judged)
            low = high = 0.0
            if p >= 0.99 and best != judged:
                low, high = interval_s(rules[judged], rules[best], p)
            step_s = mean(r.row.itl_p50_s for r in rules[judged])
            out.append(
                Verdict(
                    profile=profile,
                    scenario=scenario,
                    percentile=p,
                    best_rule=best,
                    best_s=plain[best],
                    judged_s=plain[judged],
                    oracle_s=oracle_s(rules, p),
                    allowed_s=max(ALLOWED_RATIO * plain[best], step_s),
                    low_s=low,
                    high_s=high,
                )
            )
    return out


def interval_s(ours: Sequence[Run], theirs: Sequence[Run], p: float, *, seed: int = 1) -> tuple[float, float]:
    """95 % interval of the difference of a pooled percentile, ours - theirs, by a paired bootstrap of blocks.

    A block is a twentieth of a run's requests in the order of sending; a resample takes the same blocks of both.
    """
    rng = Random(seed)
    mine, other = _Tail(ours, p), _Tail(theirs, p)
    blocks = min(mine.blocks, other.blocks)
    differences = []
    for _ in range(RESAMPLES):
        taken = [0] * blocks
        for _ in range(blocks):
            taken[rng.randrange(blocks)] += 1
        differences.append(mine.percentile_s(taken) - other.percentile_s(taken))
    differences.sort()
    return differences[int(0.025 * RESAMPLES)], differences[int(0.975 * RESAMPLES)]


class _Tail:
    """A pool of samples, worst first, each with its block: a resample's percentile is a short walk from the top."""

    def __init__(self, runs: Sequence[Run], p: float) -> None:
        self._beyond = 1.0 - p
        self._sizes: list[int] = []
        samples: list[tuple[float, int]] = []
        for run in runs:
            values = _values(run)
            size = max(-(-len(values) // BLOCKS_PER_RUN), 1)
            first = len(self._sizes)
            samples += ((t, first + i // size) for i, t in enumerate(values))
            self._sizes += (len(values[i : i + size]) for i in range(0, len(values), size))
        self._samples = sorted(samples, reverse=True)
        self.blocks = len(self._sizes)

    def percentile_s(self, taken: Sequence[int]) -> float:
        """Of the resample that has block b `taken[b]` times."""
        left = self._beyond * sum(n * size for n, size in zip(taken, self._sizes, strict=False))
        for t, block in self._samples:
            if block < len(taken):
                left -= taken[block]
                if left < 0:
                    return t
        return self._samples[-1][0] if self._samples else 0.0


def ratio_tables(runs: Sequence[Run]) -> str:
    """Per profile: each rule's pooled TTFT p90 and p99 over the best rule's; geometric mean and worst below."""
    lines: list[str] = []
    grouped = by_regime(runs)
    for profile in dict.fromkeys(p for p, _ in grouped):
        table = {s: rules for (p, s), rules in grouped.items() if p == profile}
        names = [r for r in next(iter(table.values())) if not r.endswith(ORACLE_SUFFIX)]
        for p in (0.90, 0.99):
            lines += ["", *_ratio_table(f"{profile}, p{100 * p:.0f}", table, names, p)]
    return "\n".join(lines)


def _ratio_table(title: str, table: Mapping[str, Pooled], names: Sequence[str], p: float) -> list[str]:
    width = max(map(len, names)) + 1
    lines = [f"{title:<28}{'best s':>9}{'oracle':>8}" + "".join(f"{n:>{width}}" for n in names)]
    columns: dict[str, list[float]] = {n: [] for n in [*names, ORACLE_SUFFIX]}
    for scenario, rules in table.items():
        values = {n: max(pooled_s(rules[n], p), FLOOR_S) for n in names}
        best = min(values.values())
        values[ORACLE_SUFFIX] = max(oracle_s(rules, p), FLOOR_S)
        for n, v in values.items():
            columns[n].append(v / best)
        cells = "".join(f"{values[n] / best:>{width}.2f}" for n in names)
        lines.append(f"{scenario:<28}{best:>9.3f}{values[ORACLE_SUFFIX] / best:>8.2f}" + cells)
    for what, f in (("geometric mean", geometric_mean), ("worst", max)):
        cells = "".join(f"{f(columns[n]):>{width}.3f}" for n in names)
        lines.append(f"{what:<28}{'':>9}{f(columns[ORACLE_SUFFIX]):>8.2f}" + cells)
    return lines


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """Where the judged rule is not the best, the worst first; then how many it lost."""
    lines = [
        f"{'profile':<20} {'regime':<26} {'of':<4} {'judged s':>9} {'best s':>9} {'ratio':>6} {'allowed s':>9} "
        f"{'interval of the difference s':>30}  best rule"
    ]
    for v in sorted(verdicts, key=lambda v: -v.ratio):
        if v.ratio > 1.02 or v.lost:
            interval = f"{v.low_s:.3f} .. {v.high_s:.3f}" if v.percentile >= 0.99 else ""
            lines.append(
                f"{v.profile:<20} {v.scenario:<26} p{100 * v.percentile:<3.0f} {v.judged_s:>9.3f} {v.best_s:>9.3f} "
                f"{v.ratio:>6.2f} {v.allowed_s:>9.3f} {interval:>30}  {v.best_rule}{'  LOST' if v.lost else ''}"
            )
    lost = sum(v.lost for v in verdicts)
    return "\n".join([*lines, f"{len(verdicts)} comparisons, {lost} lost"])


def csv_table(runs: Sequence[Run]) -> str:
    """A row for each profile, regime and rule: percentiles pooled over seeds, the rest as means of the seeds."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(
        [*Cell.__struct_fields__[:3], "seeds", "requests", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", *MEANS, "failed"]
    )
    for (profile, scenario), rules in by_regime(runs).items():
        for rule, some in rules.items():
            rows = [r.row for r in some]
            percentiles = [f"{pooled_s(some, p):.4g}" for p in (0.5, 0.9, 0.99)]
            means = [f"{mean(getattr(r, field) for r in rows):.4g}" for field in MEANS]
            counts = len(some), sum(r.requests for r in rows)
            write([profile, scenario, rule, *counts, *percentiles, *means, sum(r.failed for r in rows)])
    return out.getvalue()


def _values(run: Run) -> Sequence[float]:
    """Of the requests that got a first token; the others are counted as failed, not timed."""
    return [t for t in array("f", run.ttft_s) if t < math.inf]
