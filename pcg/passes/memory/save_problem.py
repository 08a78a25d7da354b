"""The save problem: the values that forward saves for backward or that backward recomputes.

For a layer's forward graph and the values N that its backward reads, choose the set S of storages
to save and the set R of nodes to repeat:

    minimise    w_b Σ_{s in S} bytes(s) + w_c Σ_{n in R} cost(n)
    such that   every value of N, and every input of a node of R, is resident (a weight, or shared
                by all layers), lies in a storage of S, or is computed by a node of R.

This is a minimum cut (a project selection with storages as capacities), so the optimum is exact and
the cut is its certificate. Each storage s is an edge s_in -> s_out of capacity w_b bytes(s). With
the sink side T read as "available in backward", s_out in T and s_in not in T is "saved", s_in in T
"recomputed":

    source -> n_in         w_c cost(n)     a recomputed node costs its operations, or seconds
    s_in   -> s_out        w_b bytes(s)    a saved storage costs its bytes
    u_out  -> n_in         infinite        a recomputed node needs its inputs
    x_out from the source  w_b bytes(x)    a graph input cannot be recomputed
    v_out  -> sink         infinite        backward's inputs are available

Views of a value share its storage and count as one node. Decoded values are decoded again instead
of saved: at their size the value itself could be saved. On one rank the cost is operations, counted
for matrix products and attention only; among optima, fewer elements recomputed by other operators
win. Over ranks with known device and links, the cost is the time of every repeated operator and
message.

Sweeping w_b : w_c over the edges of the lower convex hull of (bytes, cost) finds all of its
vertices (`frontier`), from "no product recomputed" to the fewest bytes. Layers may take different
vertices, so a model meets any budget between two of them to within a layer's step
(`pcg.passes.memory.plan`).

Source: FlexLLM §5.2, algorithm 1, which this generalises; its step 2 depends on the order of its
work queue and does not reach a minimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pcg.ir.analysis.dataflow import node_flops
from pcg.ir.analysis.storages import Storage, Storages
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.operators.lossy import Decoder
from pcg.ir.types import TOKENS
from pcg.parallel.costs.cost_model import PICOSECOND, RankCosts
from pcg.passes.memory.minimum_cut import Network

_SOURCE, _SINK = "source", "sink"
_TIE = 2**40
"""Exceeds the elements of a layer's activations, so that other operators only break ties."""


class _Edge(NamedTuple):
    """An edge of the network between two of its nodes, by name.

    Its capacity is the price of saving a storage, or of repeating a node; None is unbounded.
    """

    before: str
    after: str
    price: Storage | Node | None = None


@dataclass(frozen=True)
class Choice:
    """A choice of the values that a layer saves and recomputes.

    Attributes:
        saved: the value that owns each saved storage, in the graph's order.
        recomputed: first outputs of the products that backward recomputes, in the graph's order.
        size_bytes: bytes of the saved storages.
        flops: operations of the recomputed products.
        cost: the measure of plans: these operations, or picoseconds of all recomputed nodes.
        shared: the values shared by all layers that backward reads, in order.
    """

    saved: tuple[str, ...]
    recomputed: tuple[str, ...]
    size_bytes: int
    flops: int
    cost: int
    shared: tuple[str, ...] = ()


class SaveProblem:
    """The cut of a layer, at a step of `batch` sequences of `seq` tokens.

    Args:
        graph: the layer's forward graph.
        needed: the graph's values that backward reads.
        resident: inputs that are always available in backward, as all layers share them.
        costs: the seconds of a rank's nodes; None to count operations.
        parts: ranks that share the tokens of a sequence; `seq` counts a rank's tokens.
    """

    def __init__(
        self,
        graph: Graph,
        needed: Sequence[str],
        resident: Sequence[str],
        batch: int,
        seq: int,
        costs: RankCosts | None = None,
        parts: int = 1,
    ) -> None:
        seen = parts * seq
        self.graph = graph
        self._storages = Storages.of(graph)
        self._resident = tuple(dict.fromkeys(self._storages[name].name for name in resident))
        self._tokens = batch * seq
        self._needed = self._stored(needed)
        self._read = {self._storages[name].name for name in needed}
        self._given = self._stored(value.name for value in graph.inputs)
        self._nodes = self._makers()
        self._flops = {n.name: node_flops(graph, n, self._tokens, seen) for n in self._nodes}
        self._elements = {n.name: self._elements_of(n) for n in self._nodes}
        self._costs = self._flops
        if costs is not None:
            self._costs = {
                n.name: round(costs.node_seconds(graph, n, self._tokens, seen) / PICOSECOND)
                for n in self._nodes
            }
        kept = [*self._given, *(s for node in self._nodes for s in self._made(node))]
        self._bytes = {storage.name: int(storage.size_bytes(self._tokens)) for storage in kept}

    def choose(self, byte_weight: int, cost_weight: int | None) -> Choice:
        """Return the best choice at these weights; a cost weight of None forbids products."""
        if not self._needed:
            return Choice((), (), 0, 0, 0)
        capacities = [self._price(edge.price, byte_weight, cost_weight) for edge in self._edges]
        sink_side = self._network.sink_side(capacities)
        return self._choice({name for name, place in self._places.items() if place in sink_side})

    @cached_property
    def _edges(self) -> tuple[_Edge, ...]:
        edges = [_Edge(_SOURCE, storage.name, storage) for storage in self._given]
        for node in self._nodes:
            stored = self._made(node)
            place = f"node {node.name}"
            edges.append(_Edge(_SOURCE, place, node))
            edges += (_Edge(read.name, place) for read in self._stored(node.inputs))
            for storage in stored:
                inner = place if len(stored) == 1 else f"in {storage.name}"
                if inner != place:
                    edges.append(_Edge(place, inner))
                edges.append(_Edge(inner, storage.name, storage))
        edges += (_Edge(storage.name, _SINK) for storage in self._needed)
        return tuple(edges)

    @cached_property
    def _places(self) -> dict[str, int]:
        ends = (end for edge in self._edges for end in (edge.before, edge.after))
        names = dict.fromkeys((_SOURCE, _SINK, *ends))
        return {name: place for place, name in enumerate(names)}

    @cached_property
    def _network(self) -> Network:
        places = self._places
        pairs = [(places[edge.before], places[edge.after]) for edge in self._edges]
        return Network(len(places), pairs)

    @cached_property
    def first(self) -> Choice:
        return self.choose(1, None)

    def frontier(self) -> tuple[Choice, ...]:
        """Return the choice without recomputed products, then the hull's further vertices.

        If every operator has a cost, the hull begins with the choice that recomputes nothing.
        """
        first = self.first
        last = self.choose(sum(self._costs.values()) + 1, 1)
        if last.size_bytes == first.size_bytes:
            return (first,)
        if self._costs is self._flops:
            return (first, *self._between(first, last), last)
        start = self.choose(1, sum(self._bytes.values()) + 1)
        return tuple(dict.fromkeys((first, start, *self._between(start, last), last)))

    def _between(self, left: Choice, right: Choice) -> list[Choice]:
        byte_weight, cost_weight = right.cost - left.cost, left.size_bytes - right.size_bytes
        if not cost_weight:
            return []
        middle = self.choose(byte_weight, cost_weight)

        def price(choice: Choice) -> int:
            return byte_weight * choice.size_bytes + cost_weight * choice.cost

        if price(middle) >= price(left):
            return []
        return [*self._between(left, middle), middle, *self._between(middle, right)]

    def add_cost(self, value: str, seconds: float) -> None:
        """Add to the cost of recomputing the node that computes a value."""
        node = self.graph.producers.get(value)
        if node is not None and node.name in self._costs:
            self._costs[node.name] += round(seconds / PICOSECOND)

    def in_costs(self, choices: Iterable[Choice]) -> tuple[Choice, ...]:
        """Return the choices with their cost in this problem."""
        return tuple(replace(choice, cost=self._cost_of(choice.saved)) for choice in choices)

    def _cost_of(self, saved: Sequence[str]) -> int:
        makers = {storage.name: node for node in self._nodes for storage in self._made(node)}
        waiting = [storage.name for storage in self._needed if storage.name not in saved]
        recomputed: set[str] = set()
        while waiting:
            node = makers[waiting.pop()]
            if node.name not in recomputed:
                recomputed.add(node.name)
                reads = (storage.name for storage in self._stored(node.inputs))
                waiting += [name for name in reads if name not in saved]
        return sum(self._costs[name] for name in recomputed)

    def _stored(self, names: Iterable[str]) -> list[Storage]:
        storages = (self._storages[name] for name in names)
        return [s for s in storages if not s.is_parameter and s.name not in self._resident]

    def _made(self, node: Node) -> list[Storage]:
        return self._stored(value.name for value in node.outputs)

    def _makers(self) -> list[Node]:
        """Return the nodes that needed values depend on, without views."""
        live = {storage.name for storage in self._needed}
        nodes = []
        for node in reversed(self.graph.nodes):
            is_view = self._storages[node.name].name != node.name
            if not is_view and any(storage.name in live for storage in self._made(node)):
                nodes.append(node)
                live.update(storage.name for storage in self._stored(node.inputs))
        return nodes[::-1]

    def _price(
        self, of: Storage | Node | None, byte_weight: int, cost_weight: int | None
    ) -> int | None:
        if isinstance(of, Storage):
            return self._save_price(of, byte_weight)
        return None if of is None else self._recompute_price(of, cost_weight)

    def _save_price(self, storage: Storage, byte_weight: int) -> int | None:
        node = self.graph.producers.get(storage.name)
        if node is not None and isinstance(operator(node.op), Decoder):
            return None
        return self._bytes[storage.name] * byte_weight * _TIE

    def _recompute_price(self, node: Node, cost_weight: int | None) -> int | None:
        price = self._costs[node.name] * (cost_weight or 0) * _TIE
        if not operator(node.op).is_product:
            return price + self._elements[node.name]
        return None if cost_weight is None else price

    def _elements_of(self, node: Node) -> int:
        elements = [value.type.elements for value in node.outputs]
        return int(sum(count.subs(TOKENS, self._tokens) for count in elements))

    def _choice(self, sink_side: set[str]) -> Choice:
        recomputed = [node for node in self._nodes if f"node {node.name}" in sink_side]
        again = {storage.name for node in recomputed for storage in self._made(node)}
        read = {storage.name for storage in self._needed}
        read.update(s.name for node in recomputed for s in self._stored(node.inputs))
        saved = [name for name in self._bytes if name in read - again]
        products = [node for node in recomputed if operator(node.op).is_product]
        inputs = {self._storages[name].name for node in recomputed for name in node.inputs}
        return Choice(
            tuple(saved),
            tuple(node.name for node in products),
            sum(self._bytes[name] for name in saved),
            sum(self._flops[node.name] for node in products),
            sum(self._costs[node.name] for node in recomputed),
            tuple(name for name in self._resident if name in self._read | inputs),
        )
