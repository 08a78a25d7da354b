"""Groups of nodes that a single kernel runs, and the order of groups and other nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pcg.ir.graph import Graph, KernelGraph, Node
from pcg.ir.operators import operator
from pcg.ir.types import TensorType


@dataclass(frozen=True)
class KernelGroup:
    """Nodes that a single kernel runs.

    Attributes:
        nodes: the nodes in the graph's order.
        parts: groups that run side by side in the kernel; empty for a single function.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    parts: tuple[KernelGroup, ...] = ()

    @cached_property
    def made(self) -> frozenset[str]:
        return frozenset(node.name for node in self.nodes)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The values that the group reads from outside, in the order of the first read."""
        read = (name for node in self.nodes for name in node.inputs)
        return tuple(dict.fromkeys(name for name in read if name not in self.made))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The values that other nodes read, in order, part by part."""
        if self.parts:
            return tuple(name for part in self.parts for name in part.outputs)
        return tuple(node.name for node in self.nodes if self.leaves(node))

    def leaves(self, node: Node) -> bool:
        readers = self.graph.consumers.get(node.name, ())
        return node.name in self.graph.outputs or any(r.name not in self.made for r in readers)

    def appended(self, name: str) -> Node | None:
        """Return the node that appends an output to the cache; None for a plain tensor."""
        node = self.graph.producers[name]
        return node if node.op == "append" else None

    @cached_property
    def deferred(self) -> tuple[str, ...]:
        """Inputs that stand for deferred LoRA summands, not in memory."""
        summands = {node.inputs[1] for node in self.nodes if node.op == "add_deferred"}
        return tuple(name for name in self.inputs if name in summands)

    @property
    def apart(self) -> tuple[str, ...]:
        """Inputs [T, heads, d] with a stride between heads: slices of a joined product."""

        def is_apart(name: str) -> bool:
            node, type_ = self.graph.producers.get(name), self.graph.types[name]
            if node is None or node.op != "slice" or not type_.is_token_wise:
                return False
            return len(type_.features) == 2 and type_.features[0] > 1

        return tuple(filter(is_apart, self.inputs))

    @property
    def sums_rows(self) -> bool:
        """True if a program must hold whole rows."""
        return any(operator(node.op).sums_rows for node in self.nodes)

    @property
    def type(self) -> TensorType:
        return self.graph.types[self.outputs[0]]


def group_of(graph: Graph, parts: Iterable[Iterable[str]]) -> KernelGroup:
    """Return the group of a kernel with these parts, each given by its nodes' names."""
    groups = [
        KernelGroup(graph, tuple(n for n in graph.nodes if n.name in names))
        for names in map(frozenset, parts)
    ]
    if len(groups) == 1:
        return groups[0]
    every = {name for part in groups for name in part.made}
    return KernelGroup(graph, tuple(n for n in graph.nodes if n.name in every), tuple(groups))


def names_of(group: KernelGroup) -> tuple[tuple[str, ...], ...]:
    """Return the names of a group's nodes, part by part, as in `KernelGraph.kernels`."""
    return tuple(tuple(n.name for n in part.nodes) for part in group.parts or (group,))


def items_of(graph: KernelGraph) -> tuple[Node | KernelGroup, ...]:
    """Return the groups and the other nodes, each at the place of its first node."""
    groups = [group_of(graph, parts) for parts in graph.kernels]
    group_of_node = {name: group for group in groups for name in group.made}
    items = (group_of_node.get(node.name, node) for node in graph.nodes)
    return tuple({id(item): item for item in items}.values())
