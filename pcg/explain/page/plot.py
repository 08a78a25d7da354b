"""The frame of a plot: scales, ticks and grid lines.

Places are percentages of the plot's box, so that it is as wide as the page while text and points
keep their size; areas and lines are drawn in a box of their own that is stretched (`stretched`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pcg.explain.page.element import Markup, element


@dataclass(frozen=True)
class Scale:
    """Numbers from 0 to `most` on an axis, with ticks at round ones.

    Attributes:
        most: the number at its end.
        unit: that ticks are counted in.
        name: of the unit.
    """

    most: float
    unit: float = 1.0
    name: str = ""

    @classmethod
    def of_bytes(cls, most: float, room: float = 1.0) -> Scale:
        """A scale for so many bytes, with room for more by a factor."""
        for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if most >= unit:
                return cls(most * room, unit, name)
        return cls(max(most * room, 1.0), 1, "bytes")

    def share(self, number: float) -> float:
        """Where a number lies, from 0 to 1."""
        return number / self.most

    def ticks(self, steps: int = 6) -> list[tuple[float, str]]:
        """(share, label) of round numbers from 0 on, at most so many steps of 1, 2 or 5."""
        most = self.most / self.unit
        power = 10.0 ** math.floor(math.log10(most / steps))
        step = next(power * n for n in (1, 2, 5, 10) if most < power * n * (steps + 0.001))
        count = int(most / step + 1e-9)
        places = max(0, -math.floor(math.log10(step)))
        return [(i * step / most, f"{i * step:,.{places}f}") for i in range(count + 1)]


def percent(share: float) -> str:
    """A place as SVG writes it."""
    return f"{100 * share:.3f}%"


def text(x: float, y: float, words: str, **attributes: str | float | None) -> Markup:
    """Words at a place; `y` goes up."""
    return element("text", words, x=percent(x), y=percent(1 - y), **attributes)


def rows(ticks: Iterable[tuple[float, str]]) -> list[Markup]:
    """Horizontal grid lines with their labels."""
    found = []
    for y, label in ticks:
        at = percent(1 - y)
        found.append(element("line", x2="100%", y1=at, y2=at, class_="grid"))
        found.append(text(0, y, label, dx=-8.0, dy=4.0, text_anchor="end"))
    return found


def columns(ticks: Iterable[tuple[float, str]]) -> list[Markup]:
    """Vertical marks under the plot with their labels."""
    found = []
    for x, label in ticks:
        at = percent(x)
        found.append(element("line", x1=at, x2=at, y1="100%", y2="100%", class_="tick"))
        found.append(text(x, 0, label, dy=18.0, text_anchor="middle"))
    return found


def stretched(*children: Markup) -> Markup:
    """A box of 1 by 1, y down, as wide and high as the plot."""
    return element(
        "svg",
        *children,
        viewBox="0 0 1 1",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )


def line(points: Iterable[tuple[float, float]], **attributes: str) -> Markup:
    """A line through points of a `stretched` box; `y` goes up."""
    return element("polyline", points=_points(points), **attributes)


def area(points: Iterable[tuple[float, float]], **attributes: str) -> Markup:
    """The same, closed and filled."""
    return element("polygon", points=_points(points), **attributes)


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.5f},{1 - y:.5f}" for x, y in points)


def mark(shape: str, x: float, y: float, title: str, **attributes: str) -> Markup:
    """A point of a plot: a path around (0, 0), in pixels, at a place."""
    inner = element("path", element("title", title), d=shape, **attributes)
    return element("svg", inner, x=percent(x), y=percent(1 - y), class_="at")


def plot(title: str, description: str, *children: Markup, legend: Markup) -> Markup:
    """A figure with a plot in it.

    Args:
        title: what it shows.
        description: what there is to see, for who does not see it.
        children: in percentages of the plot's box.
        legend: under the plot.
    """
    drawn = element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        role="img",
        class_="plot",
    )
    said = readout("Point at the figure, or tap it, for its numbers.")
    return element("figure", element("div", drawn, class_="frame"), legend, said)


def readout(idle: str) -> Markup:
    """The line of a figure where the page's script shows the title of what is pointed at."""
    return element("p", idle, class_="readout", aria_hidden="true")
