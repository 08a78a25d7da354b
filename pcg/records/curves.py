"""Curves of a run's numbers over its steps: thinned, with values for a browser's pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pcg.pages import charts
from pcg.pages.charts import Axis
from pcg.records.run import Point

_WIDTH, _HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 510, 10, 204
_MOST_POINTS = 400
"""Maximum number of points per line; thinning keeps peaks."""
_SMOOTHED_FROM = 100
"""Number of points above which a line is drawn faint, with a line of means over it."""
_MEANS = 50
COLORS = (
    "save", "activations", "compress", "optimizer", "kv_cache", "gradients", "recompute", "other",
)  # fmt: skip
"""Colours of lines, as names of the page's CSS variables."""
_DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        label: the name in the legend.
        place: the index among the lines, which determines the colour.
        is_marked: True to mark each point, for example of evaluations.
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
    steps = [float(step) for step, _ in points]
    x = Axis(min(steps), max(steps), _LEFT, _RIGHT)
    y = Axis.around((value for _, value in points), _BOTTOM, _TOP)
    whole = {value: words for value, words in charts.ticks(x, 6).items() if value == int(value)}
    parts = [charts.grid(x, y, whole, charts.ticks(y, 5))]
    parts += [_line(curve, x, y) for curve in curves if curve.points]
    parts.append(f'<path class="cursor" d="M0 {_TOP}V{_BOTTOM}"></path>')
    places = f' data-x="{x.low!r} {x.high!r} {_LEFT} {_RIGHT}"'
    return charts.svg(_WIDTH, _HEIGHT, title, parts, "curves", places)


def _line(curve: Curve, x: Axis, y: Axis) -> str:
    points, color = thinned(curve.points), curve.color
    drawn = charts.line(points, x, y, color, dash=curve.dash, label=curve.label)
    if len(curve.points) >= _SMOOTHED_FROM and not curve.is_marked:
        mean = charts.line(smoothed(curve.points), x, y, color, dash=curve.dash)
        return f'<g class="faint">{drawn}</g>{mean}'
    if curve.is_marked or len(points) == 1:
        drawn += "".join(charts.mark(x(step), y(value), color) for step, value in points)
    return drawn


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most some hundred points: the minimum and the maximum of each interval."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    kept = [points[0]]
    stretches = _MOST_POINTS // 2 - 1
    for place in range(stretches):
        part = points[place * len(points) // stretches : (place + 1) * len(points) // stretches]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the means of equal intervals, each at the interval's middle."""
    means = []
    for place in range(_MEANS):
        part = points[place * len(points) // _MEANS : (place + 1) * len(points) // _MEANS]
        mean = math.fsum(value / len(part) for _, value in part)
        means.append((part[len(part) // 2][0], mean))
    return means
