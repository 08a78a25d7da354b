"""The plots of a report: memory over one step, and bytes saved against operations recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pcg.explain.page.svg import COLORS, note, svg_element
from pcg.explain.report_data import Moment, ReportData
from pcg.units import gib

_SIZE = (11.0, 3.6)
_OWN = ("pruned", "rematerialized", "compressed", "fp8")
"""The stages of pcg's own, of which the last is the chosen plan."""


def step_plot(moments: Sequence[Moment]) -> Markup:
    """Return bars of saved bytes and workspace over the moments of a step."""
    peak = max(moments, key=lambda moment: moment.total_bytes)
    unit, name = _unit(peak.total_bytes)

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot(xlim=(-0.5, len(moments) - 0.5))
        places = range(len(moments))
        saved = [moment.kept_bytes / unit for moment in moments]
        workspace = [moment.workspace_bytes / unit for moment in moments]
        for bars in (
            axes.bar(places, workspace, 1.0, saved, color=COLORS["workspace"], label="workspace"),
            axes.bar(places, saved, 1.0, color=COLORS["activations"], label="saved for backward"),
        ):
            for bar, moment in zip(bars, moments, strict=True):
                note(bar, _words(moment))
        top = peak.total_bytes / unit
        axes.annotate(
            f"peak {gib(peak.total_bytes)} GiB",
            (moments.index(peak), top),
            (0, 5),
            textcoords="offset points",
            ha="center",
            backgroundcolor=COLORS["paper"],
        )
        axes.set_ylim(top=1.15 * top)
        axes.set_ylabel(name)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        _label_layers(axes, moments)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)

    return svg_element("timeline", draw, _SIZE, "Memory over one step")


def _label_layers(axes: Axes, moments: Sequence[Moment]) -> None:
    """Number about four layers of each half, and name the phases below them."""
    numbers: dict[int, str] = {}
    phases: dict[str, list[int]] = {}
    layers = sum(moment.label.startswith("forward") for moment in moments)
    for place, moment in enumerate(moments):
        phase, _, layer = moment.label.partition(" ")
        if phase != "again":  # which is within backward
            phases.setdefault(phase, []).append(place)
            if layer and int(layer) % max(1, layers // 4) == 0:
                numbers[place] = layer
    axes.set_xticks(list(numbers), list(numbers.values()))
    middles = [(places[0] + places[-1]) / 2 for places in phases.values()]
    axes.set_xticks(middles, list(phases), minor=True)
    axes.tick_params("x", which="minor", length=0, pad=18, labelcolor=COLORS["ink"])


def _words(moment: Moment) -> str:
    return (
        f"{moment.label}: {gib(moment.kept_bytes)} GiB saved + {gib(moment.workspace_bytes)} GiB "
        f"workspace = {gib(moment.total_bytes)} GiB"
    )


@dataclass(frozen=True)
class Point:
    """A way to train.

    Attributes:
        size_bytes: the bytes that it saves for backward.
        ratio: the operations that it recomputes, as a share of the forward's.
    """

    name: str
    size_bytes: int
    ratio: float


def front_points(report: ReportData) -> list[Point]:
    """Return the corners of pcg's front."""
    return [
        Point(
            f"{one.restored} layers share saved inputs" if one.restored else f"corner {place}",
            one.bytes,
            one.recompute_flops_ratio,
        )
        for place, one in enumerate(report.pareto, 1)
    ]


def peer_points(report: ReportData) -> list[Point]:
    """Return the points of torch's partitioner, those that recompute least first."""
    points = [
        Point(f"torch's partitioner, budget {one.budget:g}", one.bytes, one.recompute_flops_ratio)
        for one in report.peers
    ]
    return sorted(points, key=lambda point: point.ratio)


def named_points(report: ReportData) -> list[Point]:
    """Return the chosen plan, and every way to train that is not pcg's."""
    chosen = report.chosen_stage
    return [
        Point("chosen plan" if one is chosen else one.stage, one.bytes, one.recompute_flops_ratio)
        for one in report.activations
        if one is chosen or one.stage not in _OWN
    ]


def front_plot(report: ReportData) -> Markup:
    """Return pcg's front of plans, and where other ways to train lie."""
    front, named, peers = front_points(report), named_points(report), peer_points(report)
    most = max(point.size_bytes for point in (*front, *named, *peers))
    unit, name = _unit(most)

    def series(axes: Axes, label: str, points: Sequence[Point], **style: Any) -> None:
        places = [(point.size_bytes / unit, point.ratio) for point in points]
        axes.plot(*zip(*places, strict=True), label=label, **style)
        for point, (x, y) in zip(points, places, strict=True):
            (mark,) = axes.plot(x, y, **style)
            words = f"{gib(point.size_bytes)} GiB saved, {point.ratio:.1%} recomputed"
            note(mark, f"{point.name}: {words}")

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot(xlim=(0, 1.05 * most / unit))
        accent, ink = COLORS["activations"], COLORS["ink"]
        series(axes, "attainable front", front, color=accent, marker="o", markersize=4)
        if peers:
            style = {"marker": "s", "markersize": 4, "linestyle": "--", "color": COLORS["soft"]}
            series(axes, "torch's partitioner, by budget", peers, **style)
        shapes = cycle("sD^v")
        for point in named:
            style = {"linestyle": "none", "markersize": 8, "markerfacecolor": "none"}
            if point.name == "chosen plan":
                style |= {"marker": "o", "markersize": 10, "markeredgecolor": accent}
            else:
                style |= {"marker": next(shapes), "markeredgecolor": ink}
            series(axes, point.name, [point], **style)
        axes.set_xlabel(f"saved for backward, {name}")
        axes.set_ylabel("recomputed")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(loc="best")

    return svg_element("pareto", draw, _SIZE, "Bytes saved against operations recomputed")


def _unit(most_bytes: int) -> tuple[int, str]:
    """Return the largest unit that so many bytes are one of, and its name."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((one for one in units if most_bytes >= one[0]), (1, "bytes"))
