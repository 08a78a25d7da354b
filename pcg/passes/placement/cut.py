"""The cut of a model: what runs at the base, in which calls, and what crosses for it.

Sizes and times are of a step of so many tokens; times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pcg.passes.placement.exact_cut import Cut, RoundTrip, exact_cut, fixed_cut
from pcg.passes.placement.split_graph import SplitGraph
from pcg.passes.placement.split_problem import bits

Crossing = tuple[tuple[str, int], ...]
"""Values that cross, by name, with their bytes."""


@dataclass(frozen=True)
class Piece:
    """Nodes that one call runs at the base.

    Attributes:
        is_backward: True if it is a part of the backward.
        nodes: names of the nodes.
        repeated: names of nodes that ran elsewhere, too, and run again instead of being sent.
        inputs: the values that the client sends.
        outputs: the values that the base returns.
        seconds: time of the round trip, latency and transfers included.
    """

    is_backward: bool
    nodes: tuple[str, ...]
    repeated: tuple[str, ...]
    inputs: Crossing
    outputs: Crossing
    seconds: float

    @property
    def sent_bytes(self) -> int:
        return sum(size for _, size in self.inputs)

    @property
    def returned_bytes(self) -> int:
        return sum(size for _, size in self.outputs)


@dataclass(frozen=True)
class Costs:
    """The costs of a step, or of a graph in it."""

    round_trips: int = 0
    sent_bytes: int = 0
    returned_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: Costs, times: int = 1) -> Costs:
        """These costs and so many times others."""
        return Costs(
            self.round_trips + times * other.round_trips,
            self.sent_bytes + times * other.sent_bytes,
            self.returned_bytes + times * other.returned_bytes,
            self.seconds + times * other.seconds,
        )


@dataclass(frozen=True)
class GraphCut:
    """The cut of a graph, or of a layer's forward and backward together.

    Attributes:
        name: the graph's name.
        count: how many layers are like it.
        pieces: the calls of the base, in order.
        client: names of the nodes that the client runs.
        held: frozen weights of two dims and more that the client needs, with their bytes.
        costs: the costs of one such graph, with both sides' seconds.
        fixed: the costs where each product is a call (Symbiosis).
    """

    name: str
    count: int
    pieces: tuple[Piece, ...]
    client: tuple[str, ...]
    held: Crossing
    costs: Costs
    fixed: Costs


@dataclass(frozen=True)
class StepCut:
    """The cuts of all graphs of a step of so many tokens."""

    tokens: int
    graphs: tuple[GraphCut, ...]

    @cached_property
    def costs(self) -> Costs:
        return self._sum(lambda graph: graph.costs)

    @cached_property
    def fixed(self) -> Costs:
        return self._sum(lambda graph: graph.fixed)

    def _sum(self, of: Callable[[GraphCut], Costs]) -> Costs:
        total = Costs()
        for graph in self.graphs:
            total = total.plus(of(graph), graph.count)
        return total


def cut_graph(name: str, count: int, graph: SplitGraph) -> GraphCut:
    """Return the cheapest cut of a graph.

    Raises:
        UnsupportedError: the graph is too wide to search.
    """
    problem = graph.problem
    best = exact_cut(problem)
    elsewhere = 0
    for trip in best.trips:
        elsewhere |= trip.nodes & ~trip.again
    client = tuple(
        node.name
        for number, node in enumerate(problem.nodes)
        if graph.nodes[number] is not None and not elsewhere >> number & 1
    )
    return GraphCut(
        name,
        count,
        tuple(_piece(graph, trip) for trip in best.trips),
        client,
        graph.held,
        _costs(graph, best),
        _costs(graph, fixed_cut(problem)),
    )


def _piece(graph: SplitGraph, trip: RoundTrip) -> Piece:
    nodes, values = graph.problem.nodes, graph.problem.values
    return Piece(
        any(number >= graph.first_backward for number in bits(trip.nodes)),
        tuple(nodes[number].name for number in bits(trip.nodes)),
        tuple(nodes[number].name for number in bits(trip.repeated)),
        tuple((values[number].name, values[number].size_bytes) for number in bits(trip.sent)),
        tuple((values[number].name, values[number].size_bytes) for number in bits(trip.returned)),
        trip.cost_ps * 1e-12,
    )


def _costs(graph: SplitGraph, cut: Cut) -> Costs:
    values = graph.problem.values
    sent = sum(values[value].size_bytes for trip in cut.trips for value in bits(trip.sent))
    returned = sum(values[value].size_bytes for trip in cut.trips for value in bits(trip.returned))
    return Costs(len(cut.trips), sent, returned, cut.cost_ps * 1e-12)
