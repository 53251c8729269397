"""A run for the console and for spreadsheets. Pure: strings and rich tables out of a Run.

May import: the standard library, rich, loadtest.report, loadtest.samples.
"""

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadtest.report import ArmSummary, Figures, doubts, summaries
from loadtest.samples import Run

MS_BELOW_S = 1.0


def seconds(value: float | None) -> str:
    """A duration for people: milliseconds below a second."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < MS_BELOW_S else f"{value:.2f} s"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def ratio(base: float | None, value: float | None) -> str:
    """How many times smaller than the base."""
    if not base or not value:
        return "-"
    times = base / value
    return f"{times:.0f} x" if times >= 10 else f"{times:.2f} x"


def balance(requests_by_pod: Mapping[str, int]) -> str:
    """Each pod's requests, or their range for many pods."""
    counts = list(requests_by_pod.values())
    if len(counts) > 4:
        return f"{min(counts)} to {max(counts)} ({len(counts)} pods)"
    return " ".join(map(str, counts)) or "-"


ROWS: Sequence[tuple[str, Callable[[Figures], str]]] = (
    ("requests", lambda f: str(f.requests)),
    ("failed", lambda f: str(f.failed)),
    ("TTFT p50", lambda f: seconds(f.ttft_p50)),
    ("TTFT p90", lambda f: seconds(f.ttft_p90)),
    ("TTFT p99", lambda f: seconds(f.ttft_p99)),
    ("ITL p50", lambda f: seconds(f.itl_p50)),
    ("ITL p99", lambda f: seconds(f.itl_p99)),
    ("TPOT p50", lambda f: seconds(f.tpot_p50)),
    ("E2E p50", lambda f: seconds(f.e2e_p50)),
    ("E2E p90", lambda f: seconds(f.e2e_p90)),
    ("output tok/s", lambda f: f"{f.output_tok_per_s:.0f}"),
    ("goodput req/s", lambda f: f"{f.goodput_per_s:.2f}"),
    ("hit share, pods' counters", lambda f: share(f.hit_share_pods)),
    ("hit share, usage", lambda f: share(f.hit_share_usage)),
    ("predicted = delivered", lambda f: share(f.predicted_equal)),
    ("requests per pod", lambda f: balance(f.requests_by_pod)),
    ("client late p99", lambda f: seconds(f.late_p99)),
)
"""What the table of arms shows, in order."""


def render(run: Run) -> RenderableType:
    """The whole result for a terminal."""
    arms = summaries(run)
    invalid, know = doubts(run)
    parts: list[RenderableType] = [_head(run), _arms(arms)]
    if len(arms) > 1:
        parts.append(_against(arms))
    if any(len(a.by_stage) > 1 for a in arms):
        parts.append(_stages(arms))
    if rows := failure_rows(arms):
        parts += [Text(), _failures(rows)]
    parts += [Text(f"INVALID: {text}", style="bold red") for text in invalid]
    parts += [Text(f"note: {text}", style="yellow") for text in know]
    return Group(*parts)


def _head(run: Run) -> Text:
    where = f"EMULATED: {run.emulated}" if run.emulated else run.target
    return Text(
        f"{run.name}: {run.workload}\n{where}; model {run.model}; seed {run.seed}; {run.machine}\n", style="bold"
    )


def _arms(arms: Sequence[ArmSummary]) -> Table:
    table = Table(title=None, show_edge=False, pad_edge=False)
    table.add_column("")
    for a in arms:
        table.add_column(a.arm, justify="right")
    for name, show in ROWS:
        cells = [show(a.pooled) for a in arms]
        if any(c != "-" for c in cells):
            table.add_row(name, *cells)
    if any(len(a.ttft_p90_by_repeat) > 1 for a in arms):
        table.add_row("TTFT p90, median of repeats (range)", *[repeats(a.ttft_p90_by_repeat) for a in arms])
    return table


def _against(arms: Sequence[ArmSummary]) -> Text:
    """Every arm beside the first one."""
    base = arms[0]
    lines = [""]
    for a in arms[1:]:
        p, b = a.pooled, base.pooled
        lines.append(
            f"{a.arm} against {base.arm}: TTFT p50 {ratio(b.ttft_p50, p.ttft_p50)} shorter, "
            f"p90 {ratio(b.ttft_p90, p.ttft_p90)}, p99 {ratio(b.ttft_p99, p.ttft_p99)}; "
            f"output tok/s {ratio(p.output_tok_per_s, b.output_tok_per_s)} as many"
        )
    return Text("\n".join(lines), style="bold green")


def _stages(arms: Sequence[ArmSummary]) -> Table:
    table = Table(title="by stage: output tok/s, TTFT p50 / p90 / p99, hit share", show_edge=False, pad_edge=False)
    table.add_column("stage")
    for a in arms:
        table.add_column(a.arm, justify="right")
    names = list(dict.fromkeys(n for a in arms for n, _ in a.by_stage))
    for name in names:
        table.add_row(name, *[_stage_cell(dict(a.by_stage).get(name)) for a in arms])
    table.add_row("mean tok/s, weighted p90", *[_aggregate(a) for a in arms])
    return table


def _stage_cell(f: Figures | None) -> str:
    if f is None:
        return "-"
    times = " / ".join(seconds(t) for t in (f.ttft_p50, f.ttft_p90, f.ttft_p99))
    return f"{f.output_tok_per_s:.0f}, {times}, {share(f.hit_share)}"


FAILURE_COLUMNS = ("arm", "pod", "kind", "failed", "share")


def failure_rows(arms: Sequence[ArmSummary]) -> list[tuple[str, str, str, str, str]]:
    """Every kind of failure by arm and pod, and its share of the pod's requests, in the order of FAILURE_COLUMNS."""
    return [
        (a.arm, pod or "not told", kind, str(count), share(count / sent) if (sent := _sent(a, pod)) else "-")
        for a in arms
        for pod, kinds in a.pooled.failures_by_pod.items()
        for kind, count in kinds.items()
    ]


def _sent(a: ArmSummary, pod: str) -> int:
    return a.pooled.requests_by_pod.get(pod, 0) if pod else 0


def _failures(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for n, name in enumerate(FAILURE_COLUMNS):
        table.add_column(name, justify="right" if n > 2 else "left")
    for cells in rows:
        table.add_row(*cells)
    return table


def _aggregate(a: ArmSummary) -> str:
    return f"{a.stage_mean_tok_per_s:.0f}, {seconds(a.weighted_ttft_p90)}"


def repeats(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{seconds(statistics.median(values))} ({seconds(min(values))} to {seconds(max(values))})" if values else "-"


def to_csv(run: Run) -> str:
    """One row for each arm and stage, and one for the arm as a whole (stage `all`); times in seconds."""
    out = io.StringIO()
    plain = [n for n in Figures.__struct_fields__ if n not in ("failures", "failures_by_pod", "requests_by_pod")]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["arm", "stage", *plain, "failures", "requests_by_pod"])
    for a in summaries(run):
        for name, f in [*a.by_stage, ("all", a.pooled)]:
            values = msgspec.structs.asdict(f)
            mappings = [";".join(f"{k}={v}" for k, v in values[n].items()) for n in ("failures", "requests_by_pod")]
            writer.writerow([a.arm, name, *["" if values[n] is None else values[n] for n in plain], *mappings])
    return out.getvalue()
