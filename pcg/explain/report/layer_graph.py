"""Drawing of a layer's forward graph by ranks: boxes coloured by the decisions on their tensors.

The layout is computed here, as networkx' layered layouts support neither nodes of different widths
nor edges over several ranks, and Graphviz is no Python package.

    1. rank     the longest path from an input; an input is a rank above its first reader
    2. bends    an edge over several ranks gets a bend in each rank in between
    3. places   in the graph's order, each as near to its neighbours' mean as the widths allow
                (isotonic regression); a bend's neighbours are the edge's other bends

Source: Sugiyama, Tagawa, Toda, "Methods for visual understanding of hierarchical system
structures", 1981; step 3 is the pool-adjacent-violators algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import networkx as nx
from markupsafe import Markup, escape

from pcg.explain.report.report_data import GraphNode, ReportData, SavedTensor
from pcg.pages import charts

_SWEEPS = 48
_BEND_WIDTH = 10.0
_BEND_WEIGHT = 50.0
"""Weight of a bend in the regression, relative to a node: long edges stay straight."""


@dataclass(frozen=True)
class Layout:
    """The places of a graph's nodes and edges.

    Attributes:
        ranks: the rank of each node, from 0 at the top.
        centres: the horizontal centre of each node.
        paths: for each edge (from, to), its horizontal places, from the first rank to the last.
        width: the width of the whole graph.
    """

    ranks: Mapping[str, int]
    centres: Mapping[str, float]
    paths: Mapping[tuple[str, str], tuple[float, ...]]
    width: float


def layered(inputs: Mapping[str, Sequence[str]], widths: Mapping[str, float], gap: float) -> Layout:
    """Lay out a graph.

    Args:
        inputs: the names that each node reads, in topological order.
    """
    graph = nx.DiGraph((source, name) for name, sources in inputs.items() for source in sources)
    graph.add_nodes_from(inputs)
    ranks = {n: rank for rank, names in enumerate(nx.topological_generations(graph)) for n in names}
    for name in inputs:
        if not inputs[name] and graph[name]:
            ranks[name] = min(ranks[reader] for reader in graph[name]) - 1
    rows: list[list[str]] = [[] for _ in range(max(ranks.values()) + 1)]
    for name in inputs:
        rows[ranks[name]].append(name)
    near: dict[str, list[str]] = {name: [] for name in inputs}
    chains: dict[tuple[str, str], list[str]] = {}
    for name, sources in inputs.items():
        for source in sources:
            bends = {
                f"{source}→{name}@{rank}": rank for rank in range(ranks[source] + 1, ranks[name])
            }
            for bend, rank in bends.items():
                rows[rank].append(bend)
                near[bend] = list(bends)
            chain = chains[source, name] = [source, *bends, name]
            near[source].append(chain[1])
            near[name].append(chain[-2])
    sizes = {name: widths.get(name, _BEND_WIDTH) for name in near}
    places = _placed(rows, near, sizes, gap)
    left = min(places[name] - sizes[name] / 2 for name in places)
    places = {name: place - left for name, place in places.items()}
    return Layout(
        ranks,
        {name: places[name] for name in inputs},
        {edge: tuple(places[name] for name in chain) for edge, chain in chains.items()},
        max(places[name] + sizes[name] / 2 for name in places),
    )


def _placed(
    rows: Sequence[list[str]],
    near: Mapping[str, Sequence[str]],
    sizes: Mapping[str, float],
    gap: float,
) -> dict[str, float]:
    """Move nodes to the mean of their neighbours, row by row, down and up."""
    places = dict.fromkeys(near, 0.0)
    for sweep in range(_SWEEPS + 1):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = [
                fmean([places[other] for other in near[name]] or [places[name]]) for name in row
            ]
            places.update(zip(row, _apart(row, wanted, sizes, gap), strict=True))
    return places


def _apart(
    row: Sequence[str], wanted: Sequence[float], sizes: Mapping[str, float], gap: float
) -> list[float]:
    """Return the places nearest to the wanted ones, in this order and separated by the gap."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (sizes[left] + sizes[right]) / 2 + gap)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for name, want, offset in zip(row, wanted, offsets, strict=True):
        mean, weight, length = want - offset, _BEND_WEIGHT if "→" in name else 1.0, 1
        while blocks and blocks[-1][0] > mean:
            before, more, others = blocks.pop()
            mean = (before * more + mean * weight) / (more + weight)
            weight, length = more + weight, others + length
        blocks.append((mean, weight, length))
    level = [mean for mean, _, length in blocks for _ in range(length)]
    return [mean + offset for mean, offset in zip(level, offsets, strict=True)]


_STEP, _HEIGHT, _GAP = 58.0, 30.0, 12.0
"""Distance between ranks, height of a box, and gap between boxes, in pixels."""


def graph_plot(report: ReportData) -> Markup:
    """Return the drawing of a report's graph, from the layer's input down to its output."""
    # The graph shows the most frequent kind of layer with a backward.
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
    return 8 + _HEIGHT / 2 + rank * _STEP


def _edge(places: tuple[float, ...], rank: int) -> str:
    """Return a path that bends from each rank to the next, and is straight past a rank's nodes."""
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
