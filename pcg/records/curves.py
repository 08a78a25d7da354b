"""Curves as SVG: plain lines, thinned, with the numbers for a browser's pointer.

They are drawn here and not by matplotlib, as a record's page is written at the end of every run, in
the process that may be serving: a figure takes a millisecond.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from pcg.records.run import Point

_WIDTH, _HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 26
_MOST_POINTS = 400
"""Points of a line; its peaks stay."""
_SMOOTHED_FROM = 100
"""Points from which a line is drawn faint, and its mean over some of them above it."""
_MEANS = 50
COLORS = (
    "save", "activations", "compress", "optimizer", "kv_cache", "gradients", "recompute", "other",
)  # fmt: skip
"""Colours of lines, by the names of the page's variables."""
_DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        label: its name in the legend.
        place: its place among the lines, which gives its colour.
        is_marked: True to mark each point, as of evaluations.
    """

    label: str
    points: Sequence[Point]
    place: int = 0
    is_marked: bool = False

    @property
    def color(self) -> str:
        return COLORS[self.place % len(COLORS)]

    @property
    def dash(self) -> str:
        return _DASHES[self.place // len(COLORS) % len(_DASHES)]


def figure(title: str, curves: Sequence[Curve]) -> Markup:
    """Return a figure of at least one curve with at least one point, over the steps."""
    points = [point for curve in curves for point in curve.points]
    x = Axis(float(min(p[0] for p in points)), float(max(p[0] for p in points)), _LEFT, _right())
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    margin = (high / 2 - low / 2) * 0.08 or abs(high) * 0.05 or 1.0
    most = sys.float_info.max
    y = Axis(max(-most, low - margin), min(most, high + margin), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg class="curves" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'data-x="{x.low!r} {x.high!r} {_LEFT} {_right()}"><title>{escape(title)}</title>'
    ]
    for value in y.ticks(5):
        place = y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {place:.1f}H{_right()}"></path>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{place + 3:.1f}" text-anchor="end">{tick_text(value)}</text>'
        )
    parts += [
        f'<text x="{x(value):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick_text(value)}</text>'
        for value in x.ticks(6)
        if value == int(value)
    ]
    parts += [_line(curve, x, y) for curve in curves if curve.points]
    cursor = f'<path class="cursor" d="M0 {_TOP}V{_HEIGHT - _BOTTOM}"></path>'
    return Markup("".join([*parts, cursor, "</svg>"]))


def _right() -> int:
    return _WIDTH - _RIGHT


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to places: `low` stands at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        # Halves, as the difference of two large numbers may be infinite.
        span = self.high / 2 - self.low / 2
        part = 0.5 if not span else (value / 2 - self.low / 2) / span
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return up to about so many round values within the scale."""
        span = self.high - self.low
        if not span or not math.isfinite(span) or span < abs(self.high) * 1e-12:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(span / most))
        if not power:  # the least numbers that there are
            return [self.low]
        step = next(unit * power for unit in (1, 2, 5, 10) if span / (unit * power) <= most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def tick_text(value: float) -> str:
    """Return a number as short as an axis has room for."""
    if value and not 1e-3 <= abs(value) < 1e4:
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size <= abs(value) < 1e3 * size:
                return f"{value / size:.4g}{unit}"
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{value:.4g}"


def _line(curve: Curve, x: Axis, y: Axis) -> str:
    points = thinned(curve.points)
    style = f'style="--c: var(--{curve.color})"'
    dash = f' stroke-dasharray="{curve.dash}"' if curve.dash else ""
    values = " ".join(f"{step}:{value:.6g}" for step, value in points)
    given = f'data-label="{escape(curve.label)}" data-values="{values}"'
    is_faint = len(curve.points) >= _SMOOTHED_FROM and not curve.is_marked
    kind = "curve faint" if is_faint else "curve"
    parts = [f'<path class="{kind}" {style} {given}{dash} d="{_path(points, x, y)}"></path>']
    if is_faint:
        path = _path(smoothed(curve.points), x, y)
        parts.append(f'<path class="curve mean" {style}{dash} d="{path}"></path>')
    if curve.is_marked or len(points) == 1:
        parts += [
            f'<circle {style} cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.6"></circle>'
            for step, value in points
        ]
    return "".join(parts)


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most some hundred points: the least and the greatest of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    found = [points[0]]
    stretches = _MOST_POINTS // 2 - 1
    for place in range(stretches):
        part = points[place * len(points) // stretches : (place + 1) * len(points) // stretches]
        ends = {min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])}
        found += sorted(ends)
    return [*found, points[-1]]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the means of equal stretches, each at its middle."""
    found = []
    for place in range(_MEANS):
        part = points[place * len(points) // _MEANS : (place + 1) * len(points) // _MEANS]
        mean = math.fsum(value / len(part) for _, value in part)
        found.append((part[len(part) // 2][0], mean))
    return found
