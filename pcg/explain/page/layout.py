"""Lay out a directed acyclic graph in layers.

    1. rank       the longest path from an input; an input stands right above its first reader
    2. dummies    an edge over several ranks goes through a place in each rank between
    3. order      within a rank by barycentres, swept down and up; the order with fewest crossings
    4. places     as near to their neighbours' mean as the widths allow (isotonic regression); a
                  dummy's neighbours are those of its edge, which keeps a long edge straight

Source: Sugiyama, Tagawa, Toda, "Methods for visual understanding of hierarchical system
structures", 1981; step 4 is the pool-adjacent-violators algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 12
_DUMMY_WIDTH = 10.0
_STIFFNESS = 50.0
"""How much more a long edge wants to be straight than a node to be among its neighbours."""


@dataclass(frozen=True)
class Layout:
    """Where the nodes of a graph go.

    Attributes:
        ranks: of each node.
        centres: the middle of each node, across.
        paths: for each edge (from, to), the places across of its ranks, from the first to the last.
        width: of all.
    """

    ranks: Mapping[str, int]
    centres: Mapping[str, float]
    paths: Mapping[tuple[str, str], tuple[float, ...]]
    width: float


def layout(inputs: Mapping[str, Sequence[str]], widths: Mapping[str, float], gap: float) -> Layout:
    """Lay out a graph.

    Args:
        inputs: for each node, what it reads; in topological order.
        widths: of the nodes.
        gap: between two of them.
    """
    ranks = _ranks(inputs)
    chains = {
        (source, name): [
            source,
            *(f"{source}→{name}@{rank}" for rank in range(ranks[source] + 1, ranks[name])),
            name,
        ]
        for name, sources in inputs.items()
        for source in sources
    }
    rows: list[list[str]] = [[] for _ in range(max(ranks.values()) + 1)]
    for name, rank in ranks.items():
        rows[rank].append(name)
    for (source, _), chain in chains.items():
        for i, dummy in enumerate(chain[1:-1], ranks[source] + 1):
            rows[i].append(dummy)
    above: dict[str, list[str]] = {name: [] for row in rows for name in row}
    below: dict[str, list[str]] = {name: [] for row in rows for name in row}
    for chain in chains.values():
        for upper, lower in pairwise(chain):
            above[lower].append(upper)
            below[upper].append(lower)
    rows = _ordered(rows, above, below)
    sizes = {name: widths.get(name, _DUMMY_WIDTH) for name in above}
    dummies = {name: chain[1:-1] for chain in chains.values() for name in chain[1:-1]}
    near = {name: dummies.get(name, above[name] + below[name]) for name in above}
    places = _placed(rows, near, sizes, gap)
    left = min(places[name] - sizes[name] / 2 for name in places)
    places = {name: place - left for name, place in places.items()}
    return Layout(
        ranks,
        {name: places[name] for name in inputs},
        {edge: tuple(places[name] for name in chain) for edge, chain in chains.items()},
        max(places[name] + sizes[name] / 2 for name in places),
    )


def _ranks(inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for name, sources in inputs.items():
        ranks[name] = 1 + max((ranks[source] for source in sources), default=-1)
    for name, sources in inputs.items():
        if not sources:
            readers = [ranks[other] for other, read in inputs.items() if name in read]
            ranks[name] = min(readers, default=1) - 1
    return ranks


def _ordered(
    rows: list[list[str]], above: Mapping[str, list[str]], below: Mapping[str, list[str]]
) -> list[list[str]]:
    best, fewest = rows, _crossings(rows, below)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        order = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        rows = [list(row) for row in rows]
        for rank in order:
            other = rows[rank - 1 if down else rank + 1]
            index = {name: i for i, name in enumerate(other)}
            own = {name: i for i, name in enumerate(rows[rank])}
            keys = {
                name: _mean([index[n] for n in neighbours[name]], own[name]) for name in rows[rank]
            }
            rows[rank].sort(key=keys.__getitem__)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _crossings(rows: list[list[str]], below: Mapping[str, list[str]]) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        index = {name: i for i, name in enumerate(lower)}
        ends = [(i, index[end]) for i, name in enumerate(upper) for end in below[name]]
        count += sum(a < c and b > d for a, b in ends for c, d in ends)
    return count


def _placed(
    rows: list[list[str]],
    near: Mapping[str, Sequence[str]],
    sizes: Mapping[str, float],
    gap: float,
) -> dict[str, float]:
    places: dict[str, float] = {}
    for row in rows:
        wanted = [0.0] * len(row)
        places.update(zip(row, _apart(row, wanted, sizes, gap), strict=True))
    for sweep in range(4 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted = [_mean([places[other] for other in near[n]], places[n]) for n in row]
            places.update(zip(row, _apart(row, wanted, sizes, gap), strict=True))
    return places


def _apart(
    row: list[str], wanted: list[float], sizes: Mapping[str, float], gap: float
) -> list[float]:
    """The places nearest to the wanted ones, in this order and with the gap between them."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (sizes[left] + sizes[right]) / 2 + gap)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for name, want, offset in zip(row, wanted, offsets, strict=True):
        weight = _STIFFNESS if "→" in name else 1.0
        block = (want - offset, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, other, length = blocks.pop()
            both = other + block[1]
            block = ((mean * other + block[0] * block[1]) / both, both, length + block[2])
        blocks.append(block)
    level = [mean for mean, _, length in blocks for _ in range(length)]
    return [mean + offset for mean, offset in zip(level, offsets, strict=True)]


def _mean(numbers: Sequence[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default
