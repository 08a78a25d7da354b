"""Passes over the collectives of a rank's graph: coalesce, overlap, and mark logits.

**Coalesce** joins neighbouring collectives into a single message (rule: `pcg.parallel.coalescing`):

    s_q = all_gather(x_q), s_k = all_gather(x_k)      s_q, s_k = all_gathers(x_q, x_k)

The message replaces the last of the collectives. Readers of the others move after it; no other node
moves.

**Overlap** moves nodes so that nodes independent of a collective run while it is in flight:

    p = f(x)                      s = all_reduce(x)    starts
    w = g(z)                      w = g(z)             overlaps
    s = all_reduce(x)      →      u = h(z)             overlaps
    t = neg(s)                    t = neg(s)           waits for s
    u = h(z)

In backward, the overlapping nodes are gradients of weights, next to the all-reduce of an input's
gradient (Megatron-LM: Narayanan et al. 2021), and nodes that a memory plan recomputes. A collective
moves up to the maker of its input. Independent nodes before it move after it, and independent nodes
after its first reader move before that reader, until they take as long as the collective
(`Collective.flops`). No node moves past another collective, so collectives stay in order. The moves
may add at most the share `MORE` to the peak's bytes per token.

**Mark logits**: the gather that ends the epilogue may send only to the first rank, which samples
the requests' tokens and sends them to the others: n - 1 parts of the vocabulary are sent instead of
n (n - 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from pcg.ir.analysis.dataflow import collective_of, first_reader, node_flops, waits
from pcg.ir.graph import Graph, Node
from pcg.ir.program.program import TrainingGraph
from pcg.ir.program.saved_memory import Alive
from pcg.ir.types import TOKENS
from pcg.parallel.coalescing import accesses_of, coalesced_runs
from pcg.passes.graphs.pass_base import GraphPass, LayerPass

# ----------------------------------------------------------------------------- coalesce collectives


class CoalesceCollectives(GraphPass):
    """Join neighbouring collectives of the same kind into a single node."""

    name = "coalesce_collectives"

    def run(self, before: Graph) -> Graph:
        runs = [run for run in coalesced_runs(accesses_of(before)) if len(run) > 1]
        if not runs:
            return before
        ends = {run[-1]: _joined([before.nodes[place] for place in run]) for run in runs}
        members = {place for run in runs for place in run}
        nodes: list[Node] = []
        later: list[Node] = []
        waiting: set[str] = set()
        for place, node in enumerate(before.nodes):
            if place in ends:
                nodes += [ends[place], *later]
                later, waiting = [], set()
            elif place in members:
                waiting.update(value.name for value in node.outputs)
            elif waiting.intersection(node.inputs):
                waiting.update(value.name for value in node.outputs)
                later.append(node)
            else:
                nodes.append(node)
        return before.replace(nodes=tuple(nodes))


class CoalesceLayer(LayerPass):
    """Coalesce the collectives of a training layer."""

    name = CoalesceCollectives.name

    def run(self, before: TrainingGraph) -> TrainingGraph:
        if before.backward is None:
            return before
        forward, backward = map(CoalesceCollectives().run, (before.forward, before.backward))
        return dataclasses.replace(before, forward=forward, backward=backward)


def _joined(nodes: list[Node]) -> Node:
    inputs = tuple(node.inputs[0] for node in nodes)
    outputs = tuple(node.output for node in nodes)
    first = nodes[0]
    if first.op == "all_reduce":
        return Node("all_reduces", inputs, outputs, (), first.scope)
    dims = tuple(cast("int", node.attribute("dim")) for node in nodes)
    attributes = (("degree", first.attribute("degree")), ("dims", dims))
    return Node("all_gathers", inputs, outputs, attributes, first.scope)


# -------------------------------------------------------------------------------------- mark logits


class MarkLogits(GraphPass):
    """Mark the gather that produces a graph's first output, if any, as a gather of logits."""

    name = "mark_logits"

    def run(self, before: Graph) -> Graph:
        gather = before.producers.get(before.outputs[0])
        if gather is None or gather.op != "all_gather" or gather.get("tokens"):
            return before
        marked = gather.changed(attributes={"logits": True})
        return before.replace(nodes=tuple(marked if n is gather else n for n in before.nodes))


# ------------------------------------------------------------------------------------------ overlap


MANY_TOKENS = 2**24
"""Number of tokens at which only bytes per token matter, as the order serves any number."""
MORE = 0.02
"""Share that moves may add to the peak: s of rank 64 next to 4,096 columns is less."""


@dataclass(frozen=True)
class Overlap(GraphPass):
    """Order a rank's nodes so that other nodes run while a collective is in flight.

    A graph with symbolic sizes, such as a served prompt's, stays unchanged. The memory of `counted`
    values is counted elsewhere.
    """

    name = "overlap"
    counted: tuple[str, ...] = ()

    def run(self, before: Graph) -> Graph:
        is_sized = all(type_.is_sized for type_ in before.types.values())
        if not is_sized or not any(map(collective_of, before.nodes)):
            return before
        return _overlapped(before, frozenset(self.counted))


class OverlapLayer(LayerPass):
    """Overlap the collectives of a training layer.

    The memory of saved values, and of values that all layers share, is counted elsewhere.
    """

    name = Overlap.name

    def run(self, before: TrainingGraph) -> TrainingGraph:
        if before.backward is None:
            return before
        inputs = [value.name for value in before.forward.inputs]
        saved = [name for name in before.saved if name not in inputs]
        shared = inputs[len(before.forward.outputs) - len(saved) :]
        forward = Overlap((*saved, *shared)).run(before.forward)
        backward = Overlap(tuple(shared)).run(before.backward)
        return dataclasses.replace(before, forward=forward, backward=backward)


@lru_cache(maxsize=256)
def _overlapped(graph: Graph, counted: frozenset[str]) -> Graph:
    order = _Order(graph, counted)
    for node in graph.nodes:
        if collective_of(node) is not None:
            order.overlap(node)
    return graph.replace(nodes=tuple(order.nodes))


class _Order:
    def __init__(self, graph: Graph, counted: frozenset[str]) -> None:
        self.nodes = list(graph.nodes)
        self._alive = Alive(graph, counted)
        self._most_bytes = (1 + MORE) * self._bytes(self.nodes)
        self._flops = {node.name: _flops(graph, node) for node in graph.nodes}

    def overlap(self, collective: Node) -> None:
        before = list(self.nodes)
        self._begin_early(collective)
        self._run_behind(collective)
        self._run_before_reader(collective)
        if self.nodes.index(collective) not in waits(self.nodes):
            self.nodes = before

    def _begin_early(self, collective: Node) -> None:
        """Move a collective up past nodes that it does not read, but past no collective."""
        place = to = self.nodes.index(collective)
        while not self._is_enough(collective):
            to -= 1
            above = self.nodes[to] if to >= 0 else None
            if above is None or collective_of(above) is not None or _reads(collective, above):
                return
            if self._move(place, to):
                place = to

    def _run_behind(self, collective: Node) -> None:
        """Move nodes that it does not read after it, except nodes that overlap the previous one."""
        at = self.nodes.index(collective)
        others = [i for i in range(at) if collective_of(self.nodes[i]) is not None]
        start = max((first_reader(self.nodes, i, self.nodes[i]) for i in others), default=-1)
        for place in reversed(range(start + 1, at)):
            if self._is_enough(collective):
                return
            node = self.nodes[place]
            if not any(_reads(other, node) for other in self.nodes[place + 1 : at + 1]):
                at -= self._move(place, at)

    def _run_before_reader(self, collective: Node) -> None:
        at = self.nodes.index(collective)
        first = first_reader(self.nodes, at, collective)
        for place in range(first + 1, len(self.nodes)):
            node = self.nodes[place]
            if collective_of(node) is not None or self._is_enough(collective):
                return
            if not any(_reads(node, other) for other in self.nodes[first:place]):
                first += self._move(place, first)

    def _is_enough(self, collective: Node) -> bool:
        """Return whether the overlapping nodes take as long as the collective."""
        at = self.nodes.index(collective)
        beside = self.nodes[at + 1 : first_reader(self.nodes, at, collective)]
        works = sum(self._flops[n.name] for n in beside if collective_of(n) is None)
        return works >= self._flops[collective.name]

    def _move(self, place: int, to: int) -> bool:
        """Move a node and return True, unless the peak would grow too much."""
        nodes = list(self.nodes)
        nodes.insert(to, nodes.pop(place))
        if self._bytes(nodes) > self._most_bytes:
            return False
        self.nodes = nodes
        return True

    def _bytes(self, nodes: Sequence[Node]) -> int:
        return self._alive.most(nodes, MANY_TOKENS, 1).size_bytes(MANY_TOKENS, 1)


def _flops(graph: Graph, node: Node) -> int:
    """Return a product's operations, or a collective's time in operations; 0 for other nodes."""
    entry = collective_of(node)
    if entry is None:
        return node_flops(graph, node, MANY_TOKENS, 1)
    formula = entry.flops(*graph.types_of(node), dict(node.attributes))
    return int(formula.subs(TOKENS, MANY_TOKENS))


def _reads(node: Node, other: Node) -> bool:
    return any(value.name in node.inputs for value in other.outputs)
