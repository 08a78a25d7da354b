"""The forward graph of one layer, drawn: boxes coloured by what becomes of their tensors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from pcg.explain.page.layout import layered
from pcg.explain.page.svg import COLORS, note, svg_element
from pcg.explain.report_data import GraphNode, ReportData, SavedTensor

_STEP, _HEIGHT, _GAP = 58.0, 30.0, 12.0
"""The distance of two ranks, the height of a box, and the space between two of them, in pixels."""
_BORDERS: dict[str, dict[str, Any]] = {
    "save": {"linewidth": 1.5},
    "compress": {"linewidth": 3.0},
    "recompute": {"linewidth": 1.2, "linestyle": (0, (4, 2))},
    "drop": {"linewidth": 1.0, "edgecolor": COLORS["other"]},
}


def graph_plot(report: ReportData) -> Markup:
    """Return the drawing of a report's graph, from the layer's input down to its output."""
    # The graph is of the layer that most layers with a backward are like.
    below = {group.name for group in report.layer_groups if not group.has_backward}
    back = (row for row in report.saved if row.tensor.partition(".")[0] not in below)
    ordered = sorted(back, key=lambda row: row.layers)
    rows = {row.tensor.partition(".")[2]: row for row in ordered}
    inputs = {node.name: node.inputs for node in report.graph}
    widths = {node.name: 6.0 * max(len(node.name), len(node.op)) + 18 for node in report.graph}
    found = layered(inputs, widths, _GAP)
    width, height = found.width + 16, max(found.ranks.values()) * _STEP + _HEIGHT + 16

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0, 0, 1, 1), xlim=(-8, width - 8), ylim=(height - 23, -23))
        axes.axis("off")
        for (source, _), places in found.paths.items():
            top, points, codes = found.ranks[source] * _STEP, [(places[0], 0.0)], [Path.MOVETO]
            points = [(places[0], top)]
            for left, right in pairwise(places):
                middle, end = top + _STEP / 2, top + _STEP - _HEIGHT / 2
                start = top + _HEIGHT / 2
                # From below one rank to above the next, then straight past the nodes of that rank.
                points += [(left, start), (left, middle), (right, middle), (right, end)]
                points += [(right, top + _STEP)]
                codes += [Path.LINETO, *[Path.CURVE4] * 3, Path.LINETO]
                top += _STEP
            axes.add_patch(PathPatch(Path(points, codes), fill=False, ec=COLORS["other"]))
        for node in report.graph:
            place = (found.centres[node.name], found.ranks[node.name] * _STEP)
            color = COLORS["soft" if node.decision == "drop" else "ink"]
            box = {"boxstyle": "round,pad=0.45", "facecolor": COLORS[f"{node.decision}-in"]}
            box |= {"edgecolor": COLORS[node.decision], **_BORDERS[node.decision]}
            words = axes.text(*place, f"{node.name}\n{node.op}", color=color, bbox=box)
            words.set(ha="center", va="center", size=9)
            note(words, _note(node, rows.get(node.name)))

    size = (width / 72, height / 72)
    return svg_element("graph", draw, size, "Forward graph of one layer")


def _note(node: GraphNode, row: SavedTensor | None) -> str:
    where = f" ({node.scope})" if node.scope else ""
    words = f"{node.name} = {node.op}{where}: {node.decision}"
    if row is None:
        return words
    shape = ", ".join(map(str, row.shape))
    return f"{words} – {row.reason}; {row.dtype}[{shape}], {row.bytes / 2**20:,.2f} MiB"
