"""Plots of a report: memory over a step, and saved bytes against recomputed operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pcg.explain.report.report_data import Moment, ReportData
from pcg.pages import charts
from pcg.pages.charts import Axis
from pcg.units import gib

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 792, 268, 52, 784
_OWN = ("pruned", "rematerialized", "compressed", "fp8")
"""pcg's own stages; the last one present is the chosen plan."""


def step_plot(moments: Sequence[Moment]) -> Markup:
    """Return bars of saved bytes and workspace over the moments of a step."""
    peak = max(moments, key=lambda moment: moment.total_bytes)
    unit, name = _unit(peak.total_bytes)
    top = peak.total_bytes / unit
    colors = {"workspace": "workspace", "saved for backward": "activations"}
    marks = {label: charts.mark(0, 0, color, 1) for label, color in colors.items()}
    head, below = charts.legend(marks, _LEFT, 14, _RIGHT)
    x = Axis(-0.5, len(moments) - 0.5, _LEFT, _RIGHT)
    y = Axis(0, 1.12 * top, _HEIGHT - 40, below)
    parts = [head, charts.grid(x, y, {}, charts.ticks(y, 4))]
    parts.append(charts.text(_LEFT - 6, below, name, "end"))
    for place, moment in enumerate(moments):
        saved, total = moment.kept_bytes / unit, moment.total_bytes / unit
        bars = charts.bar(x, y, place, 0, saved, "activations")
        bars += charts.bar(x, y, place, saved, total, "workspace")
        parts.append(charts.point(_words(moment), bars))
    words = f"peak {gib(peak.total_bytes)} GiB"
    parts.append(charts.text(x(moments.index(peak)), y(top) - 5, words, kind="ink"))
    parts += _layer_labels(moments, x, y.start)
    return charts.svg(_WIDTH, _HEIGHT, "Memory over one step", parts)


def _layer_labels(moments: Sequence[Moment], x: Axis, bottom: float) -> list[str]:
    """Return labels of about four layers of each half, and the phases' names below them."""
    parts = []
    phases: dict[str, list[int]] = {}
    layers = sum(moment.label.startswith("forward") for moment in moments)
    for place, moment in enumerate(moments):
        phase, _, layer = moment.label.partition(" ")
        if phase != "again":  # `again` moments are within backward
            phases.setdefault(phase, []).append(place)
            if layer and int(layer) % max(1, layers // 4) == 0:
                parts.append(charts.text(x(place), bottom + 15, layer))
    for phase, places in phases.items():
        middle = (places[0] + places[-1]) / 2
        parts.append(charts.text(x(middle), bottom + 31, phase, kind="ink"))
    return parts


def _words(moment: Moment) -> str:
    return (
        f"{moment.label}: {gib(moment.kept_bytes)} GiB saved + {gib(moment.workspace_bytes)} GiB "
        f"workspace = {gib(moment.total_bytes)} GiB"
    )


@dataclass(frozen=True)
class Point:
    """A way to train.

    Attributes:
        size_bytes: the bytes saved for backward.
        ratio: the recomputed operations, as a share of the forward's.
    """

    name: str
    size_bytes: int
    ratio: float


def front_points(report: ReportData) -> list[Point]:
    """Return the corners of pcg's front."""
    return [
        Point(
            f"{corner.restored} layers share saved inputs"
            if corner.restored
            else f"corner {place}",
            corner.bytes,
            corner.recompute_flops_ratio,
        )
        for place, corner in enumerate(report.pareto, 1)
    ]


def peer_points(report: ReportData) -> list[Point]:
    """Return the points of torch's partitioner, in ascending order of recomputation."""
    points = [
        Point(
            f"torch's partitioner, budget {peer.budget:g}", peer.bytes, peer.recompute_flops_ratio
        )
        for peer in report.peers
    ]
    return sorted(points, key=lambda point: point.ratio)


def named_points(report: ReportData) -> list[Point]:
    """Return the chosen plan, and every other software's way to train."""
    chosen = report.chosen_stage
    return [
        Point(
            "chosen plan" if stage is chosen else stage.stage,
            stage.bytes,
            stage.recompute_flops_ratio,
        )
        for stage in report.activations
        if stage is chosen or stage.stage not in _OWN
    ]


def front_plot(report: ReportData) -> Markup:
    """Return a plot of pcg's front of plans, and of other ways to train."""
    front, named, peers = front_points(report), named_points(report), peer_points(report)
    every = (*front, *named, *peers)
    most = max(point.size_bytes for point in every)
    unit, name = _unit(most)
    shapes = [0 if point.name == "chosen plan" else 1 + place for place, point in enumerate(named)]
    colors = ["activations" if shape == 0 else "ink" for shape in shapes]
    styles = list(zip(named, shapes, colors, strict=True))
    marks = {
        "attainable front": charts.sample_line("activations") + charts.mark(0, 0, "activations")
    }
    if peers:
        label = "torch's partitioner, by budget"
        marks[label] = charts.sample_line("soft", "5 3") + charts.mark(0, 0, "soft", 1)
    marks |= {p.name: charts.mark(0, 0, color, shape, hollow=True) for p, shape, color in styles}
    head, below = charts.legend(marks, _LEFT, 14, _RIGHT)
    x = Axis(0, 1.05 * most / unit, _LEFT, _RIGHT)
    y = Axis.around((point.ratio for point in every), _HEIGHT - 38, below)
    parts = [head, charts.grid(x, y, charts.ticks(x, 6), charts.ticks(y, 8, percent=True))]
    words = f"saved for backward, {name}, against what is recomputed"
    parts.append(charts.text((_LEFT + _RIGHT) / 2, _HEIGHT - 5, words))
    for points, color, dash, shape in ((front, "activations", "", 0), (peers, "soft", "5 3", 1)):
        if points:
            places = [(point.size_bytes / unit, point.ratio) for point in points]
            parts.append(charts.line(places, x, y, color, dash=dash))
            parts += [_mark(point, unit, x, y, color, shape) for point in points]
    parts += [_mark(p, unit, x, y, color, shape, hollow=True) for p, shape, color in styles]
    return charts.svg(_WIDTH, _HEIGHT, "Bytes saved against operations recomputed", parts)


def _mark(
    point: Point, unit: int, x: Axis, y: Axis, color: str, shape: int, hollow: bool = False
) -> str:
    words = f"{gib(point.size_bytes)} GiB saved, {point.ratio:.1%} recomputed"
    title = f"{point.name}: {words}"
    place = x(point.size_bytes / unit), y(point.ratio)
    return charts.mark(*place, color, shape, title=title, hollow=hollow)


def _unit(most_bytes: int) -> tuple[int, str]:
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((size, name) for size, name in units if most_bytes >= size), (1, "bytes"))
