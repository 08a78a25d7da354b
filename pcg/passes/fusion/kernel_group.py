"""A group: nodes that one kernel runs, and whether one can."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.types import TensorType

MOST_COLUMNS = 32768
"""Of a row that one program holds: a thread of 32 warps has 32 of them in registers."""
MOST_VALUES = 24
"""That a kernel reads and writes: addresses take registers, too."""


@dataclass(frozen=True)
class Group:
    """Nodes that one kernel runs.

    Attributes:
        graph: that they are of.
        nodes: in order.
        parts: groups that stand side by side in the kernel; none where it is one.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    parts: tuple[Group, ...] = ()

    @cached_property
    def made(self) -> frozenset[str]:
        """All values that it makes."""
        return frozenset(node.name for node in self.nodes)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Values that it reads, in the order in which they are read first."""
        read = (name for node in self.nodes for name in node.inputs)
        return tuple(dict.fromkeys(name for name in read if name not in self.made))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Values that others read, in order; those of each part behind those of the one before."""
        if self.parts:
            return tuple(name for part in self.parts for name in part.outputs)
        return tuple(node.name for node in self.nodes if self.leaves(node))

    def leaves(self, node: Node) -> bool:
        """Whether what a node makes is read outside."""
        readers = self.graph.consumers.get(node.name, ())
        return node.name in self.graph.outputs or any(r.name not in self.made for r in readers)

    def appended(self, name: str) -> Node | None:
        """The node that appends an output to the cache; None for what is a tensor."""
        node = self.graph.producers[name]
        return node if node.op == "append" else None

    @property
    def apart(self) -> tuple[str, ...]:
        """Inputs [T, heads, d] whose heads may not lie side by side: slices of a joined product."""
        found = []
        for name in self.inputs:
            node, type_ = self.graph.producers.get(name), self.graph.types[name]
            if node is not None and node.op == "slice" and type_.is_token_wise:
                found += [name] * (len(type_.features) == 2 and type_.features[0] > 1)
        return tuple(found)

    @property
    def sums_rows(self) -> bool:
        """Whether a program has to hold whole rows."""
        return any(operator(node.op).sums_rows for node in self.nodes)

    @property
    def type(self) -> TensorType:
        """Of the first output."""
        return self.graph.types[self.outputs[0]]

    def without_views_at_borders(self) -> Group:
        """It without views that read from outside, or that are read there."""
        nodes = self.nodes
        while True:
            made = {node.name for node in nodes}
            inner = Group(self.graph, nodes)
            kept = tuple(
                node
                for node in nodes
                if not operator(node.op).is_view
                or (node.inputs[0] in made and not inner.leaves(node))
            )
            if len(kept) == len(nodes):
                return inner
            nodes = kept

    def fits(self) -> bool:
        """Whether one kernel can run it, as far as its types go."""
        types = self.graph.types
        leaving = [types[name] for name in self.outputs]
        if len(leaving) + len(self.inputs) > MOST_VALUES:
            return False
        if len({(t.shape[0], prod(t.features)) for t in leaving}) != 1:
            return False
        if not self.sums_rows:
            return True
        rows = {_row(type_) for type_ in leaving}
        for node in self.nodes:
            read, made = types[node.inputs[0]], types[node.name]
            if operator(node.op).sums_rows:
                rows.add(_row(read))
            if operator(node.op).is_view and _row(read) != _row(made):
                return False
        return len(rows) == 1 and rows.pop()[1] <= MOST_COLUMNS


def _row(type_: TensorType) -> tuple[int, int]:
    """Rows of a token, and their size."""
    return prod(type_.features[:-1]), type_.features[-1]
