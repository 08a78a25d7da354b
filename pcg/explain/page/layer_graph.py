"""The forward graph of one layer, drawn: boxes coloured by what becomes of their tensors."""

from __future__ import annotations

from itertools import pairwise

from markupsafe import Markup, escape

from pcg.explain.page.layout import layered
from pcg.explain.report_data import GraphNode, ReportData, SavedTensor
from pcg.pages import charts

_STEP, _HEIGHT, _GAP = 58.0, 30.0, 12.0
"""The distance of two ranks, the height of a box, and the space between two of them, in pixels."""


def graph_plot(report: ReportData) -> Markup:
    """Return the drawing of a report's graph, from the layer's input down to its output."""
    # The graph is of the layer that most layers with a backward are like.
    below = {group.name for group in report.layer_groups if not group.has_backward}
    back = (row for row in report.saved if row.tensor.partition(".")[0] not in below)
    ordered = sorted(back, key=lambda row: row.layers)
    rows = {row.tensor.partition(".")[2]: row for row in ordered}
    inputs = {node.name: node.inputs for node in report.graph}
    widths = {node.name: 6.0 * max(len(node.name), len(node.op)) + 18 for node in report.graph}
    layout = layered(inputs, widths, _GAP)
    parts = [_edge(places, layout.ranks[edge[0]]) for edge, places in layout.paths.items()]
    for node in report.graph:
        x, y = layout.centres[node.name] + 8, _middle(layout.ranks[node.name])
        wide = widths[node.name]
        corner = f"M{x - wide / 2:.1f} {y - _HEIGHT / 2:.1f}"
        box = f'<path d="{corner}h{wide:.1f}v{_HEIGHT}h{-wide:.1f}z"></path>'
        words = charts.text(x, y - 2, node.name) + charts.text(x, y + 10, node.op)
        title = escape(_note(node, rows.get(node.name)))
        kind = f"point node d-{node.decision}"
        parts.append(f'<g class="{kind}"><title>{title}</title>{box}{words}</g>')
    width, height = layout.width + 16, _middle(max(layout.ranks.values())) + _HEIGHT / 2 + 8
    more = f' width="{1.2 * width:.0f}"'
    return charts.svg(width, height, "Forward graph of one layer", parts, "", more)


def _middle(rank: int) -> float:
    """Return the middle of the boxes of a rank."""
    return 8 + _HEIGHT / 2 + rank * _STEP


def _edge(places: tuple[float, ...], rank: int) -> str:
    """Return a path from below one rank to above the next, then straight past that rank's nodes."""
    top = _middle(rank)
    drawn = f"M{places[0] + 8:.1f} {top:.1f}"
    for left, right in pairwise(place + 8 for place in places):
        middle, end = top + _STEP / 2, top + _STEP - _HEIGHT / 2
        drawn += f"L{left:.1f} {top + _HEIGHT / 2:.1f}C{left:.1f} {middle:.1f} {right:.1f}"
        drawn += f" {middle:.1f} {right:.1f} {end:.1f}L{right:.1f} {top + _STEP:.1f}"
        top += _STEP
    return f'<path class="edge" d="{drawn}"></path>'


def _note(node: GraphNode, row: SavedTensor | None) -> str:
    where = f" ({node.scope})" if node.scope else ""
    words = f"{node.name} = {node.op}{where}: {node.decision}"
    if row is None:
        return words
    shape = ", ".join(map(str, row.shape))
    return f"{words} – {row.reason}; {row.dtype}[{shape}], {row.bytes / 2**20:,.2f} MiB"
