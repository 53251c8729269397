"""Plots as SVG text: lines, steps and grouped bars on linear, logarithmic or named axes. Pure.

Colours come from the page's style sheet by class (`s0`, `s1`, ...), so one picture serves light and dark pages.
May import: the standard library, msgspec.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

import msgspec

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 14, 48


class Series(msgspec.Struct, frozen=True):
    """Points of one arm; `colour` is its number in the style sheet."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    look: str = ""  # a further class of the style sheet: thin, dashed


class Axis(msgspec.Struct, frozen=True):
    """Values between `low` and `high`; `names` gives a named axis, one place each."""

    label: str
    low: float
    high: float
    log: bool = False
    names: Sequence[str] = ()
    show: Callable[[float], str] = "{:g}".format

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end."""
        if self.names:
            return (value + 0.5) / len(self.names)
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        if self.names:
            every = max(1, math.ceil(len(self.names) / 12))
            return [(float(n), name if n % every == 0 else "") for n, name in enumerate(self.names)]
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [m * 10.0**d for d in decades for m in ((1, 2, 5) if len(decades) <= 3 else (1,))]
        else:
            step = nice_step(self.high - self.low)
            values = [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        return [(v, self.show(v)) for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]


def nice_step(span: float, wanted: int = 5) -> float:
    """1, 2 or 5 times a power of ten, for about `wanted` ticks."""
    raw = max(span, 1e-12) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))


def linear_axis(label: str, values: Sequence[float], *, show: Callable[[float], str] = "{:g}".format) -> Axis:
    """From 0 to a nice value above all; right for no values too."""
    top = max([v for v in values if math.isfinite(v)], default=0.0)
    if top <= 0:
        return Axis(label, 0.0, 1.0, show=show)
    step = nice_step(top)
    return Axis(label, 0.0, step * math.ceil(top / step - 1e-9), show=show)


def log_axis(label: str, values: Sequence[float], *, show: Callable[[float], str]) -> Axis:
    """From below the least to above the greatest; at least one decade."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if not positive:
        return Axis(label, 0.01, 1.0, log=True, show=show)
    low, high = min(positive) / 1.2, max(positive) * 1.2
    if high / low < 10:
        middle = math.sqrt(high * low)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    return Axis(label, low, high, log=True, show=show)


def lines(series: Sequence[Series], x: Axis, y: Axis, *, step: bool = False, dots: bool = True) -> str:
    """A line for each series; `step` holds a value until the next point."""
    body: list[str] = []
    for s in series:
        places = [(_x(x, px), _y(y, py)) for px, py in s.points]
        if len(places) > 1:
            look = f" {s.look}" if s.look else ""
            body.append(f'<path class="line s{s.colour}{look}" d="{_path(places, step)}"/>')
        if (dots and not s.look) or len(places) == 1:
            for (cx, cy), (_, value) in zip(places, s.points, strict=True):
                title = f"<title>{escape(s.name)}: {escape(y.show(value))}</title>"
                body.append(f'<circle class="dot s{s.colour}" cx="{cx:.1f}" cy="{cy:.1f}" r="3">{title}</circle>')
    return _frame(x, y, body)


def bars(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Grouped bars on a named x axis."""
    body: list[str] = []
    slot = (WIDTH - LEFT - RIGHT) / max(len(x.names), 1)
    width = min(slot * 0.8 / max(len(series), 1), 60.0)
    for n, s in enumerate(series):
        for px, py in s.points:
            left = _x(x, px) + (n - len(series) / 2) * width
            top = _y(y, py)
            title = f"<title>{escape(s.name)}, {escape(x.names[int(px)])}: {escape(y.show(py))}</title>"
            body.append(
                f'<rect class="bar s{s.colour}" x="{left:.1f}" y="{top:.1f}" width="{max(width - 1.5, 1):.1f}" '
                f'height="{max(HEIGHT - BOTTOM - top, 0):.1f}">{title}</rect>'
            )
    return _frame(x, y, body)


def _x(axis: Axis, value: float) -> float:
    return LEFT + _inside(axis.share(value)) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - _inside(axis.share(value)) * (HEIGHT - TOP - BOTTOM)


def _inside(share: float) -> float:
    return min(max(share, 0.0), 1.0)


def _path(places: Sequence[tuple[float, float]], step: bool) -> str:
    parts = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
    for px, py in places[1:]:
        parts.append(f"H{px:.1f}V{py:.1f}" if step else f"L{px:.1f} {py:.1f}")
    return "".join(parts)


def _frame(x: Axis, y: Axis, body: Sequence[str]) -> str:
    """Grid, axes and labels around the marks."""
    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value, text in y.ticks():
        at = _y(y, value)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in x.ticks():
        at = _x(x, value)
        if not x.names:
            out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        place = f'x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle"'
        out.append(f'<text class="tick" {place}>{escape(text)}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>')
    across = f'transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle"'
    out.append(f'<text class="label up" {across}>{escape(y.label)}</text>')
    return "".join([*out, *body, "</svg>"])
