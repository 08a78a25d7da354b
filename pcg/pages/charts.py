"""SVG charts: axes, lines, marks and bars, in the colours of the pages' variables.

Charts are written as text, without a plotting library: a record's page is written at the end of
every run, possibly in a serving process, and a chart takes a millisecond. Colours are names of
variables in style.css.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape

Points = Sequence[tuple[float, float]]
"""Pairs of x and y, in the units of the axes."""

_SHAPES = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "M-3.4-3.4h6.8v6.8h-6.8z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "M0-4.4L4.4 3.4h-8.8z",
    "M0 4.4L4.4-3.4h-8.8z",
)
"""Paths of marks: circle, square, diamond, triangles."""
_LETTER = 6.2
"""Width of a letter in a legend, pixels; more than in most fonts."""


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels: `low` maps to `start`, `high` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float) -> Axis:
        """Return a scale that covers some values with a margin."""
        values = [*values]
        low, high = min(values), max(values)
        margin = (high / 2 - low / 2) * 0.08 or abs(high) * 0.05 or 1.0
        most = sys.float_info.max
        return cls(max(-most, low - margin), min(most, high + margin), start, end)

    def __call__(self, value: float) -> float:
        # Halves, because the difference of two large numbers may overflow.
        span = self.high / 2 - self.low / 2
        part = 0.5 if not span else (value / 2 - self.low / 2) / span
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return round values within the scale, up to about `most`."""
        span = self.high - self.low
        if not span or not math.isfinite(span) or span < abs(self.high) * 1e-12:
            return [self.low]
        power = 10.0 ** math.floor(math.log10(span / most))
        if not power:  # denormal numbers
            return [self.low]
        step = next(unit * power for unit in (1, 2, 5, 10) if span / (unit * power) <= most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def tick_text(value: float) -> str:
    """Return a number in the few characters of an axis label."""
    if value and not 1e-3 <= abs(value) < 1e4:
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size <= abs(value) < 1e3 * size:
                return f"{value / size:.4g}{unit}"
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{value:.4g}"


def grid(x: Axis, y: Axis, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str]) -> str:
    """Return horizontal lines at the ticks of y, and the labels of all ticks."""
    parts = []
    for value, words in y_ticks.items():
        place = y(value)
        parts.append(f'<path class="grid" d="M{x.start:.1f} {place:.1f}H{x.end:.1f}"></path>')
        parts.append(text(x.start - 6, place + 3.5, words, "end"))
    parts += [text(x(value), y.start + 16, words) for value, words in x_ticks.items()]
    return "".join(parts)


def ticks(axis: Axis, most: int, percent: bool = False) -> dict[float, str]:
    """Return round values of an axis with their labels."""
    return {v: f"{v:.0%}" if percent else tick_text(v) for v in axis.ticks(most)}


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "") -> str:
    """Return a text at a position in pixels."""
    class_ = f' class="{kind}"' if kind else ""
    return f'<text{class_} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def color_of(name: str) -> str:
    """Return the attribute that sets an element's colour."""
    return f'style="--c: var(--{name})"'


def path(points: Points, x: Axis, y: Axis) -> str:
    """Return the path through some points."""
    return "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)


def line(points: Points, x: Axis, y: Axis, color: str, *, dash: str = "", label: str = "") -> str:
    """Return a line; with a label, it has its values for the page's script."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    values = f" {values_of(label, points)}" if label else ""
    return f'<path class="curve" {color_of(color)}{values}{dashes} d="{path(points, x, y)}"></path>'


def values_of(label: str, points: Points) -> str:
    """Return the attributes with a line's label and values."""
    values = " ".join(f"{a:.6g}:{b:.6g}" for a, b in points)
    return f'data-label="{escape(label)}" data-values="{values}"'


def mark(
    x: float, y: float, color: str, shape: int = 0, *, title: str = "", hollow: bool = False
) -> str:
    """Return a mark at a position in pixels; its title is shown on hovering."""
    kind, scale = ("mark hollow", " scale(1.4)") if hollow else ("mark", "")
    drawn = (
        f'<path class="{kind}" {color_of(color)} transform="translate({x:.1f} {y:.1f}){scale}" '
        f'd="{_SHAPES[shape % len(_SHAPES)]}"></path>'
    )
    return point(title, drawn) if title else drawn


def point(title: str, drawn: str) -> str:
    """Return a part of a chart with a title that is shown on hovering."""
    return f'<g class="point"><title>{escape(title)}</title>{drawn}</g>'


def bar(x: Axis, y: Axis, place: float, low: float, high: float, color: str) -> str:
    """Return a bar of width 1 between two values."""
    left, right = x(place - 0.5), x(place + 0.5)
    return (
        f'<path class="area" {color_of(color)} '
        f'd="M{left:.1f} {y(low):.1f}H{right:.1f}V{y(high):.1f}H{left:.1f}z"></path>'
    )


def legend(entries: Mapping[str, str], x: float, y: float, right: float) -> tuple[str, float]:
    """Return a legend, and the y position below it.

    Args:
        entries: a mark or a line around the position (0, 0), by its label.
        x: the left end of each row.
        right: the right end, at which rows break.
    """
    parts, left = [], x
    for label, drawn in entries.items():
        width = 34 + _LETTER * len(label)
        if left > x and left + width > right:
            left, y = x, y + 16
        parts.append(f'<g transform="translate({left + 9:.1f} {y - 4:.1f})">{drawn}</g>')
        parts.append(text(left + 22, y, label, "start", "ink"))
        left += width
    return "".join(parts), y + 12


def sample_line(color: str, dash: str = "") -> str:
    """Return a piece of a line for a legend."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path class="curve" {color_of(color)}{dashes} d="M-9 0H9"></path>'


def svg(
    width: float,
    height: float,
    title: str,
    parts: Iterable[str],
    kind: str = "wide",
    more: str = "",
) -> Markup:
    """Return a chart as an element of a page.

    Args:
        title: the subject of the chart, for screen readers.
        more: further attributes.
    """
    return Markup(
        f'<svg class="plot {kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img"{more}>'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def svg_file(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return a chart as a standalone file in the light colours."""
    folder = Path(__file__).parent
    colors = re.search(r":root \{(.*?)\}", (folder / "style.css").read_text(), re.S)
    assert colors is not None
    style = f"svg {{{colors[1]} background: white }}{(folder / 'charts.css').read_text()}"
    space = ' xmlns="http://www.w3.org/2000/svg"'
    return svg(width, height, title, [f"<style>{style}</style>", *parts], more=space) + "\n"
