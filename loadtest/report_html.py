"""A run as one self-contained HTML page with hand-written SVG. Pure.

May import: the standard library, loadtest.report, loadtest.report_text, loadtest.samples, loadtest.svg.
"""

import time
from collections import Counter
from collections.abc import Sequence
from html import escape

from loadtest.report import ArmSummary, Figures, doubts, measured, summaries
from loadtest.report_text import FAILURE_COLUMNS, ROWS, failure_rows, ratio, repeats, seconds, share
from loadtest.samples import Run, Sample, percentile
from loadtest.svg import Axis, Series, bars, linear_axis, lines, log_axis

CDF_POINTS = 200
TIME_BINS = 30
NARROW_CHARACTERS = 12  # a longer figure may be broken on a narrow page

STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#5d6772;--rule:#d9dee3;--card:#f6f8fa;
--s0:#8a6d00;--s1:#0069b4;--s2:#b3400a;--s3:#00795a;--s4:#a0468c;--s5:#5a5ad0;--s6:#7a5230;--s7:#3c7d8c}
@media(prefers-color-scheme:dark){:root{--bg:#14181d;--fg:#e6e9ec;--dim:#9aa4ae;--rule:#333b44;--card:#1c2229;
--s0:#e8c14a;--s1:#5ab4f0;--s2:#f08a4b;--s3:#3fc99a;--s4:#e08ccc;--s5:#a3a3ff;--s6:#c99a6b;--s7:#76c3d4}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1400px;padding:20px 16px 60px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:.2em 0}h2{font-size:1.1rem;margin:1.8em 0 .5em}p{margin:.3em 0}
.dim{color:var(--dim)}.facts{overflow-wrap:anywhere}
.banner{padding:10px 14px;border-radius:8px;margin:12px 0;border:1px solid var(--rule);background:var(--card)}
.invalid{border:2px solid #c0272d;background:#c0272d1f;font-weight:600}
.emulated{border-color:#b58900;background:#b589001f}
.wins{display:flex;flex-wrap:wrap;gap:12px;margin:14px 0}
.win{flex:1 1 200px;border:1px solid var(--rule);border-radius:8px;padding:10px 14px;background:var(--card)}
.win b{display:block;font-size:1.7rem;line-height:1.2}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:min(100%,640px)}
th,td{padding:4px 12px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
.name{text-align:left}thead th{border-bottom:2px solid var(--dim)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:18px}
figure{margin:0;min-width:0}figcaption{font-weight:600}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--rule)}.axis{stroke:var(--dim)}.tick,.label{fill:var(--dim);font-size:12px}
@media(max-width:640px){.tick,.label{font-size:18px}body{font-size:14px}
table{font-size:12px}th,td{padding:4px}th,.name,.long{white-space:normal}.up{display:none}}
.line{fill:none;stroke-width:2.2}.thin{stroke-width:1.2}.dashed{stroke-width:1.4;stroke-dasharray:5 4}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
""" + "".join(
    f".line.s{n}{{stroke:var(--s{n})}}.dot.s{n},.bar.s{n}{{fill:var(--s{n})}}i.s{n}{{background:var(--s{n})}}"
    for n in range(8)
)


def render(run: Run) -> str:
    """The page: what was measured, whether it may be believed, the table, the plots."""
    arms = summaries(run)
    invalid, know = doubts(run)
    parts = [_head(run)]
    parts += [f'<p class="banner invalid">This run is not valid. {escape(t)}</p>' for t in invalid]
    if run.emulated:
        text = f"Emulated: {run.emulated}. No GPU was involved; these are figures of a model of vLLM."
        parts.append(f'<p class="banner emulated">{escape(text)}</p>')
    parts += [f'<p class="banner">{escape(t)}</p>' for t in know]
    parts += [_wins(arms), _table(arms), _failures(arms), _plots(run, arms), _stage_table(arms), _definitions(run)]
    title = escape(f"{run.name}: warmroute load test")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(p for p in parts if p) + "\n</body></html>\n"
    )


def _head(run: Run) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started_unix_s))
    facts = (
        f"{when} · {run.target} · model {run.model} · seed {run.seed} · {run.client_processes} client "
        f"process{'es' if run.client_processes > 1 else ''} · {run.machine}"
    )
    return (
        f"<h1>{escape(run.name)}</h1><p>{escape(run.workload)}</p>"
        f'<p class="dim facts">{escape(facts)}</p><p class="dim facts"><code>{escape(run.command)}</code></p>'
    )


def _wins(arms: Sequence[ArmSummary]) -> str:
    """The last arm against the first, in three large figures; nothing with one arm."""
    if len(arms) < 2:
        return ""
    base, best = arms[0].pooled, arms[-1].pooled
    if base.ttft_p90 is None or best.ttft_p90 is None:
        return ""
    of = f"{escape(arms[-1].arm)} against {escape(arms[0].arm)}"
    cards = [
        (
            ratio(base.ttft_p90, best.ttft_p90),
            f"shorter TTFT p90: {seconds(best.ttft_p90)}, not {seconds(base.ttft_p90)}",
        ),
        (ratio(best.output_tok_per_s, base.output_tok_per_s), "as many output tokens a second"),
        (share(best.hit_share), f"of prompt tokens came from a pod's cache, not {share(base.hit_share)}"),
    ]
    boxes = "".join(f'<div class="win"><b>{escape(a)}</b>{escape(b)}</div>' for a, b in cards)
    return f'<h2>{of}</h2><div class="wins">{boxes}</div>'


def _table(arms: Sequence[ArmSummary]) -> str:
    rows = [[name, *[show(a.pooled) for a in arms]] for name, show in ROWS]
    rows = [cells for cells in rows if any(c != "-" for c in cells[1:])]
    if any(len(a.ttft_p90_by_repeat) > 1 for a in arms):
        rows.append(["TTFT p90, median of repeats (range)", *[repeats(a.ttft_p90_by_repeat) for a in arms]])
    title = "All stages" if any(len(a.by_stage) > 1 for a in arms) else "All requests"
    return _grid(title, ["", *[a.arm for a in arms]], rows, names=1)


def _failures(arms: Sequence[ArmSummary]) -> str:
    rows = failure_rows(arms)
    return _grid("Failures", FAILURE_COLUMNS, rows, names=3) if rows else ""


def _grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, names: int) -> str:
    """A table under its heading; the first `names` columns are words, the others figures."""

    def line(cells: Sequence[str], tag: str) -> str:
        long = [f"{tag} class=long" if len(c) > NARROW_CHARACTERS else tag for c in cells]
        marks = [f"{tag} class=name" if n < names else mark for n, mark in enumerate(long)]
        return "".join(f"<{m}>{escape(c)}</{tag}>" for m, c in zip(marks, cells, strict=True))

    body = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{line(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _plots(run: Run, arms: Sequence[ArmSummary]) -> str:
    names = list(dict.fromkeys(n for a in arms for n, _ in a.by_stage))
    figures = [
        _figure(
            f"Time to first token{' by stage: p50 (thin), p90, p99 (dashed)' if len(names) > 1 else ': p50, p90, p99'}",
            _ttft_plot(arms, names),
        ),
        _figure("Time to first token, all requests", _cdf_plot(run, arms)),
        _figure("Prompt tokens from the pods' caches over time", _hits_plot(run, arms)),
        _figure("Requests by pod", _balance_plot(arms)),
        _figure("Output tokens a second by stage", _rate_plot(arms, names)) if len(names) > 1 else "",
    ]
    return f'<h2>Plots</h2>{_legend(arms)}<div class="plots">{"".join(figures)}</div>'


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" if svg else ""


def _legend(arms: Sequence[ArmSummary]) -> str:
    keys = "".join(f'<span><i class="s{n % 8}"></i>{escape(a.arm)}</span>' for n, a in enumerate(arms))
    return f'<div class="legend">{keys}</div>'


def _ttft_plot(arms: Sequence[ArmSummary], names: Sequence[str]) -> str:
    """Bars of three percentiles with one stage; with more, lines of p90 by stage."""
    if len(names) == 1:
        places = ("p50", "p90", "p99")
        series = [
            Series(a.arm, n % 8, [(i, v) for i, v in enumerate(_percentiles(a.by_stage[0][1])) if v is not None])
            for n, a in enumerate(arms)
            if a.by_stage
        ]
        y = log_axis("seconds", [v for s in series for _, v in s.points], show=_duration)
        return bars(series, Axis("", 0, 1, names=places), y)
    series = [
        Series(f"{a.arm} {label}", n % 8, _by_stage(a, names, lambda f, i=i: _percentiles(f)[i]), look)
        for n, a in enumerate(arms)
        for i, (label, look) in enumerate((("p50", "thin"), ("p90", ""), ("p99", "dashed")))
    ]
    y = log_axis("seconds", [v for s in series for _, v in s.points], show=_duration)
    return lines(series, Axis("stage", 0, 1, names=names), y)


def _percentiles(f: Figures) -> tuple[float | None, float | None, float | None]:
    return f.ttft_p50, f.ttft_p90, f.ttft_p99


def _by_stage(a: ArmSummary, names: Sequence[str], value: object) -> list[tuple[float, float]]:
    known = dict(a.by_stage)
    assert callable(value)
    found = [(float(n), value(known[name])) for n, name in enumerate(names) if name in known]
    return [(n, v) for n, v in found if v is not None]


def _rate_plot(arms: Sequence[ArmSummary], names: Sequence[str]) -> str:
    series = [Series(a.arm, n % 8, _by_stage(a, names, lambda f: f.output_tok_per_s)) for n, a in enumerate(arms)]
    y = linear_axis("tokens/s", [v for s in series for _, v in s.points])
    return lines(series, Axis("stage", 0, 1, names=names), y)


def _cdf_plot(run: Run, arms: Sequence[ArmSummary]) -> str:
    shares = [n / CDF_POINTS for n in range(1, CDF_POINTS + 1)]
    series = []
    for n, a in enumerate(arms):
        values = sorted(s.ttft_s for s in _samples(run, a.arm) if s.failure is None and s.ttft_s is not None)
        if values:
            points = (
                [(percentile(values, q) or 0.0, q) for q in shares]
                if len(values) > CDF_POINTS
                else [(v, (i + 1) / len(values)) for i, v in enumerate(values)]
            )
            series.append(Series(a.arm, n % 8, points))
    if not series:
        return ""
    x = log_axis("seconds to first token", [v for s in series for v, _ in s.points], show=_duration)
    return lines(series, x, Axis("share of requests", 0, 1, show=_percent), step=True, dots=False)


def _hits_plot(run: Run, arms: Sequence[ArmSummary]) -> str:
    """Hit share of the requests sent in each slice of the run's time, of the arm's first repeat."""
    series = []
    longest = 0.0
    for n, a in enumerate(arms):
        timed = _timeline(run, a.arm)
        if not timed:
            continue
        end = max(t for t, _ in timed)
        longest = max(longest, end)
        width = max(end / TIME_BINS, 1e-9)
        cached: Counter[int] = Counter()
        prompt: Counter[int] = Counter()
        for t, s in timed:
            place = min(int(t / width), TIME_BINS - 1)
            cached[place] += s.cached_tokens or 0
            prompt[place] += s.prompt_tokens or 0
        points = [((i + 0.5) * width, cached[i] / prompt[i]) for i in range(TIME_BINS) if prompt[i]]
        series.append(Series(a.arm, n % 8, points))
    if not series:
        return ""
    x = Axis("seconds of sending", 0, longest or 1.0)
    return lines(series, x, Axis("hit share", 0, 1, show=_percent), dots=False)


def _timeline(run: Run, arm: str) -> list[tuple[float, Sample]]:
    """Answers with usage by the time they were sent, stage after stage."""
    out: list[tuple[float, Sample]] = []
    offset = 0.0
    for stage in measured(next(r for r in run.runs if r.arm == arm)):
        answered = [s for s in stage.samples if s.failure is None and s.cached_tokens is not None]
        out += [(offset + s.at_s, s) for s in answered]
        offset += max([stage.seconds, *[s.at_s for s in answered]])
    return out


def _balance_plot(arms: Sequence[ArmSummary]) -> str:
    pods = list(dict.fromkeys(p for a in arms for p in a.pooled.requests_by_pod))
    if not pods:
        return ""
    series = [
        Series(a.arm, n % 8, [(float(i), float(a.pooled.requests_by_pod.get(p, 0))) for i, p in enumerate(pods)])
        for n, a in enumerate(arms)
    ]
    y = linear_axis("requests", [v for s in series for _, v in s.points])
    return bars(series, Axis("pod", 0, 1, names=[str(n + 1) for n in range(len(pods))]), y)


def _stage_table(arms: Sequence[ArmSummary]) -> str:
    """A row for each stage and arm, so that many arms fit a narrow page too."""
    names = list(dict.fromkeys(n for a in arms for n, _ in a.by_stage))
    if len(names) < 2:
        return ""
    rows = [
        [name, a.arm, *_stage_cells(f)] for name in names for a in arms if (f := dict(a.by_stage).get(name)) is not None
    ]
    rows += [
        ["mean tok/s, weighted p90", a.arm, f"{a.stage_mean_tok_per_s:.0f}", "", seconds(a.weighted_ttft_p90), "", ""]
        for a in arms
    ]
    head = ["stage", "arm", "tok/s", "TTFT p50", "p90", "p99", "hit"]
    return _grid("By stage", head, rows, names=2)


def _stage_cells(f: Figures) -> list[str]:
    return [f"{f.output_tok_per_s:.0f}", *map(seconds, _percentiles(f)), share(f.hit_share)]


def _definitions(run: Run) -> str:
    text = (
        "TTFT: from sending a request to the first event with text. ITL: between events with text. "
        "TPOT: (E2E - TTFT) / (output tokens - 1). Percentiles are by nearest rank, over answers that came whole. "
        f"Goodput: answers with TTFT at most {seconds(run.slo_ttft_s)} and TPOT at most {seconds(run.slo_tpot_s)}. "
        "Hit share: prompt tokens that came from a pod's cache, by the pods' own counters and by the answers' usage."
    )
    return f'<h2>Definitions</h2><p class="dim">{escape(text)}</p>'


def _samples(run: Run, arm: str) -> list[Sample]:
    return [s for r in run.runs if r.arm == arm for stage in measured(r) for s in stage.samples]


def _duration(value: float) -> str:
    return f"{value * 1000:g} ms" if value < 0.9999 else f"{value:g} s"


def _percent(value: float) -> str:
    return f"{value:.0%}"
