"""The cut of a model: the base's calls with their nodes, and the transferred values.

Sizes are those of a step of a number of tokens; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pcg.ir.graph import Graph
from pcg.passes.placement.exact_cut import Cut, RoundTrip, exact_cut, fixed_cut
from pcg.passes.placement.piece import piece_graph
from pcg.passes.placement.split_graph import SplitGraph
from pcg.passes.placement.split_problem import bits

Crossing = tuple[tuple[str, int], ...]
"""Transferred values, by name, with their bytes."""


@dataclass(frozen=True)
class Piece:
    """Nodes that the base runs in a single call.

    Attributes:
        nodes: names of the nodes.
        repeated: names of nodes that also run elsewhere, which avoids the transfer of their values.
        inputs: the values that the client sends.
        outputs: the values that the base returns.
        seconds: time of the round trip, including latency and transfers.
        graph: the nodes as a graph, from the inputs to the outputs.
    """

    is_backward: bool
    nodes: tuple[str, ...]
    repeated: tuple[str, ...]
    inputs: Crossing
    outputs: Crossing
    seconds: float
    graph: Graph

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
        count: number of equal layers.
        pieces: the calls of the base, in order.
        client: names of the nodes that the client runs.
        held: frozen weights of two dims and more that the client needs, with their bytes.
        costs: the costs of a single graph, with both sides' seconds.
        fixed: the costs if each product is a call (Symbiosis).
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
    """The cuts of all graphs of a step with a number of tokens."""

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


def cut_graph(name: str, count: int, graph: SplitGraph, cut: Cut | None = None) -> GraphCut:
    """Describe a cut, by default the cheapest; raise UnsupportedError if the graph is too wide."""
    problem = graph.problem
    best = exact_cut(problem) if cut is None else cut
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
        tuple(_piece(f"{name}_piece_{n}", graph, trip) for n, trip in enumerate(best.trips, 1)),
        client=client,
        held=graph.held,
        costs=_costs(graph, best),
        fixed=_costs(graph, fixed_cut(problem)),
    )


def _piece(name: str, graph: SplitGraph, trip: RoundTrip) -> Piece:
    def names(nodes: int) -> tuple[str, ...]:
        return tuple(graph.problem.nodes[number].name for number in bits(nodes))

    def crossing(values: int) -> Crossing:
        crossed = (graph.problem.values[number] for number in bits(values))
        return tuple((value.name, value.size_bytes) for value in crossed)

    nodes, repeated = names(trip.nodes), names(trip.repeated)
    inputs, outputs = crossing(trip.sent), crossing(trip.returned)
    ends = [key for key, _ in inputs], [key for key, _ in outputs]
    return Piece(
        any(number >= graph.first_backward for number in bits(trip.nodes)),
        nodes,
        repeated,
        inputs,
        outputs,
        trip.cost_ps * 1e-12,
        piece_graph(name, graph.graphs, (*nodes, *repeated), *ends),
    )


def _costs(graph: SplitGraph, cut: Cut) -> Costs:
    values = graph.problem.values
    sent = sum(values[value].size_bytes for trip in cut.trips for value in bits(trip.sent))
    returned = sum(values[value].size_bytes for trip in cut.trips for value in bits(trip.returned))
    return Costs(len(cut.trips), sent, returned, cut.cost_ps * 1e-12)
