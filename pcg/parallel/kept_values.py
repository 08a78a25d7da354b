"""Values of bypass networks that backward reads: their bytes on a rank, and their least cost.

Of what the nodes of a site make and no other node reads, such as s = x Aᵀ, backward needs some, in
the layout that a node's gradient reads. It is saved, gathered again of saved parts, or recomputed:

    price(v, l) = min over layouts m   λ bytes(v, m) + messages(m → l)
                  min over ways w      seconds(w) + messages(w's layout → l)

λ are seconds a byte, the worth of memory at a budget. What else recomputing v takes is left out, so
that a plan's least cost with these prices is a lower bound of what any way to save and recompute
costs: the cut of the layer's graph (`pcg.passes.memory.save_problem`) has room for these flows
beside those of the base's own values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pcg.ir.graph import Graph, Node
from pcg.ir.layouts import Layout, Sharding
from pcg.parallel.bypass_sites import BypassSite
from pcg.parallel.costs.work import size_bytes
from pcg.parallel.parallel_plan import ParallelPlan
from pcg.parallel.planner import Planner
from pcg.parallel.sequence_parallel import gradient_reads


class KeptValues:
    """The values that backward reads of what a layer's bypass networks make."""

    def __init__(self, planner: Planner, sites: Sequence[BypassSite]) -> None:
        self._planner = planner
        self._costs = planner.costs
        self._nodes = {node.name: node for node in planner.graph.nodes}
        self._makers = {name: node.name for name, node in planner.graph.producers.items()}
        own = {name for site in sites for name in site.nodes}
        private = _private(planner.graph, own)
        self._reads: dict[str, list[tuple[int, str]]] = {}
        known: set[str] = set()
        for name in (name for name in self._nodes if name in own):
            node = self._nodes[name]
            for place in sorted(gradient_reads(planner.graph, node, planner.active)[0]):
                value = node.inputs[place]
                if value in private and value not in known:
                    known.add(value)
                    self._reads.setdefault(name, []).append((place, value))

    def size_bytes(self, plan: ParallelPlan, site: BypassSite) -> int:
        """Bytes that a rank holds of them at a site, where none is recomputed."""
        return sum(
            self._local_bytes(value, plan.nodes[name].rule.inputs[place])
            for name in site.nodes
            for place, value in self._reads.get(name, ())
        )

    def planner(self, byte_seconds: float) -> Planner:
        """The planner for which they cost, at least, so many seconds a byte."""
        prices = {
            name: {rule: self._price(name, rule, byte_seconds) for rule in self._planner.ways(name)}
            for name in self._reads
        }
        return self._planner.with_prices(prices)

    def _price(self, name: str, rule: Sharding, byte_seconds: float) -> float:
        return sum(
            self._least(value, rule.inputs[place], byte_seconds)
            for place, value in self._reads[name]
        )

    def _least(self, value: str, layout: Layout, byte_seconds: float) -> float:
        """The least seconds of having a value in a layout, whatever its node is given."""
        paths, type_ = self._planner.paths, self._planner.graph.types[value]
        found = []
        for other in (layout, *paths.parts(type_)):
            sent = paths.path(type_, False, frozenset([other]), layout)
            if sent is not None:
                found.append(byte_seconds * self._local_bytes(value, other) + sent[0])
        for rule, seconds in self.seconds(self._makers[value]).items():
            sent = paths.path(type_, False, frozenset([rule.outputs[0]]), layout)
            if sent is not None:
                found.append(seconds + sent[0])
        return min(found)

    def seconds(self, name: str) -> dict[Sharding, float]:
        """Seconds of a node's forward, by its ways."""
        node, graph = self._nodes[name], self._planner.graph
        nothing = (False,) * len(node.inputs)
        ways = self._planner.ways(name)
        return {rule: self._costs.node(node, graph, rule, nothing) for rule in ways}

    def _local_bytes(self, value: str, layout: Layout) -> int:
        whole = size_bytes(self._planner.graph.types[value], self._costs.tokens)
        return -(-whole // self._planner.degree) if layout.dim else whole


def _private(graph: Graph, own: set[str]) -> set[str]:
    """Token-wise values that these nodes make, and no other node reads."""
    made = {value.name for node in _those(graph, own) for value in node.outputs}
    inner = {name for node in _those(graph, own) for name in node.inputs}
    outer = {name for node in graph.nodes if node.name not in own for name in node.inputs}
    found = (made & inner) - outer - set(graph.outputs)
    return {name for name in found if graph.types[name].is_token_wise}


def _those(graph: Graph, names: set[str]) -> Iterator[Node]:
    return (node for node in graph.nodes if node.name in names)
