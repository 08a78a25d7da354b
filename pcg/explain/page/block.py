"""The forward graph of one layer, coloured by what becomes of each tensor."""

from __future__ import annotations

from itertools import pairwise

from pcg.explain.page.element import Markup, element, joined, scroll, section
from pcg.explain.page.layout import Layout, layout
from pcg.explain.page.plot import readout
from pcg.explain.page.tensors import DECISIONS, badge
from pcg.explain.report_data import GraphNode, ReportData, SavedTensor

_HIGH, _STEP = 36.0, 66.0
"""Height of a node, and from one rank to the next, in pixels."""
_MARGIN, _GAP = 8.0, 14.0


def block(report: ReportData) -> Markup | None:
    """The graph; None where pcg cannot train the model."""
    if not report.graph:
        return None
    # The graph is of the layer that most layers are like.
    rows = {
        row.tensor.partition(".")[2]: row for row in sorted(report.saved, key=lambda r: r.layers)
    }
    widths = {node.name: _width(node) for node in report.graph}
    made = layout({node.name: node.inputs for node in report.graph}, widths, _GAP)
    high = (max(made.ranks.values()) + 1) * _STEP - (_STEP - _HIGH)
    wide = made.width + 2 * _MARGIN
    drawn = element(
        "svg",
        element("title", "Forward graph of one layer"),
        element(
            "desc",
            f"{len(report.graph)} nodes from the layer's input above to its output below; the "
            "table of tensors says what becomes of each.",
        ),
        element("g", *_edges(made), class_="edges"),
        *(_node(node, made, widths[node.name], rows.get(node.name)) for node in report.graph),
        viewBox=f"0 0 {wide:.0f} {high + 2 * _MARGIN:.0f}",
        width=f"{wide:.0f}",
        height=f"{high + 2 * _MARGIN:.0f}",
        role="img",
        class_="block",
    )
    present = {node.decision for node in report.graph}
    legend = [
        element("span", badge(word), f" {meaning}", class_="entry")
        for word, meaning in DECISIONS.items()
        if word in present
    ]
    return section(
        "graph",
        "The graph of one layer",
        element(
            "p",
            "Forward of the layer that most layers are like. Weights and views are left out; the "
            "lower line of a node is its operator.",
        ),
        element("p", joined(legend), class_="legend"),
        element(
            "figure",
            scroll("Forward graph of one layer", drawn),
            readout("Point at a node, or tap it, for its shape and the reason."),
        ),
    )


def _width(node: GraphNode) -> float:
    return max(6.75 * len(node.name), 5.6 * len(node.op)) + 20


def _node(node: GraphNode, made: Layout, width: float, row: SavedTensor | None) -> Markup:
    x = made.centres[node.name] + _MARGIN
    y = made.ranks[node.name] * _STEP + _MARGIN
    where = f" ({node.scope})" if node.scope else ""
    note = f"{node.name} = {node.op}{where}: {node.decision}"
    if row is not None:
        shape = ", ".join(map(str, row.shape))
        note += f" – {row.reason}; {row.dtype}[{shape}], {row.bytes / 2**20:,.2f} MiB"
    rect = {"x": x - width / 2, "y": y, "width": width, "height": _HIGH, "rx": 6.0}
    return element(
        "g",
        element("title", note),
        element("rect", **rect),
        element("text", node.name, x=x, y=y + 15, class_="value"),
        element("text", node.op, x=x, y=y + 29, class_="op"),
        class_=f"node point d-{node.decision}",
    )


def _edges(made: Layout) -> list[Markup]:
    found = []
    for (source, _), path in made.paths.items():
        rank = made.ranks[source]
        start = rank * _STEP + _HIGH + _MARGIN
        drawn = f"M{path[0] + _MARGIN:.1f} {start:.1f}"
        for i, (left, right) in enumerate(pairwise(path)):
            # From below one rank to above the next, then straight past the nodes of that rank.
            top = (rank + i) * _STEP + _HIGH + _MARGIN
            end = (rank + i + 1) * _STEP + _MARGIN
            middle = (top + end) / 2
            a, b = left + _MARGIN, right + _MARGIN
            drawn += f"C{a:.1f} {middle:.1f} {b:.1f} {middle:.1f} {b:.1f} {end:.1f}"
            if i < len(path) - 2:
                drawn += f"V{end + _HIGH:.1f}"
        found.append(element("path", d=drawn))
    return found
