"""Grouping of nodes that a single kernel runs: norms, rotary embedding, elementwise chains.

**Group.** Initially each node is a group. In graph order, a node's group merges with the group that
computes the node's input if

    tokens and features      all outputs of the new group have equal numbers of each,
    rows                     every value summed over rows has the rows of the outputs,
    order                    no path leads from it through another node back into it.

Finally, groups that both load two or more tensors of the size of their outputs merge, too. A value
that a memory plan recomputes in backward is an ordinary node, so it stays in registers for its
readers. Views at a group's border cost nothing, and stay outside.

**Side by side.** Tensors around an attention are independent: queries and keys, with different
numbers of heads, are normed and rotated, and values are appended to the cache with the keys. Two
groups share a kernel, each run by its own programs, if

    attention    reads the outputs of both, or computes an input of both,
    order        no path connects them, through any nodes that run together.

**Order** puts the nodes of a kernel next to each other, each after its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from pcg.errors import PassError
from pcg.ir.analysis.kernel_group import KernelGroup, group_of, names_of
from pcg.ir.graph import Graph, KernelGraph, Node
from pcg.ir.operators import operator
from pcg.ir.types import TensorType
from pcg.passes.graphs.pass_base import GraphPass

if TYPE_CHECKING:
    import networkx


MOST_COLUMNS = 32768
"""Longest row of a program: its 32 elements per thread of 32 warps stay in registers."""
MOST_VALUES = 24
"""Maximum number of values that a kernel reads and writes, as addresses also take registers."""


class GroupKernels(GraphPass):
    """Group the nodes of a graph that a single kernel runs."""

    name = "group_kernels"

    def run(self, before: Graph) -> KernelGraph:
        kernels = tuple(map(names_of, _Grouping(before).run()))
        parts = (before.inputs, before.parameters, before.nodes, before.outputs)
        return KernelGraph(before.name, *parts, kernels)


def grouped(graph: Graph, name: str) -> KernelGraph:
    """Return the graph with its groups; raise PassError if `group_kernels` has not run."""
    if not isinstance(graph, KernelGraph):
        raise PassError(f"pass {name!r} runs behind 'group_kernels'; put that before it")
    return graph


class _Grouping:
    """Groups under construction; the index of any of its nodes identifies a group."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._places = {node.name: i for i, node in enumerate(graph.nodes)}
        self._owner = list(range(len(graph.nodes)))
        self._members = [[i] for i in self._owner]

    def run(self) -> list[KernelGroup]:
        graph = self._graph
        for i, node in enumerate(graph.nodes):
            if not is_fusible(graph, node):
                continue
            for name in node.inputs:
                j = self._places.get(name)
                if j is not None and is_fusible(graph, graph.nodes[j]):
                    self._join(i, j)
        for i, j in self._reading_the_same():
            later_group, other = (self._group(self._members[self._owner[k]]) for k in (i, j))
            if self._owner[j] != self._owner[i] and _loads_in_common(later_group, other):
                self._join(i, j)
        fusible = (m for m in self._members if m and is_fusible(graph, graph.nodes[m[0]]))
        groups = [_without_views_at_borders(self._group(members)) for members in fusible]
        return [group for group in groups if _is_worth_a_kernel(group)]

    def _group(self, members: Sequence[int]) -> KernelGroup:
        return KernelGroup(self._graph, tuple(self._graph.nodes[i] for i in sorted(members)))

    def _join(self, i: int, j: int) -> None:
        """Merge the groups of two nodes, if a single kernel can run both."""
        first, second = self._owner[j], self._owner[i]
        both = self._members[first] + self._members[second]
        if first != second and _fits(self._group(both)) and not self._has_detour(first, second):
            self._members[first], self._members[second] = both, []
            for k in both:
                self._owner[k] = first

    def _reading_the_same(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of fusible nodes, a later and the first, with the same token-wise input."""
        graph = self._graph
        for name, readers in graph.consumers.items():
            if graph.types[name].is_token_wise:
                fusible = [self._places[n.name] for n in readers if is_fusible(graph, n)]
                yield from ((other, fusible[0]) for other in fusible[1:])

    def _has_detour(self, first: int, second: int) -> bool:
        """Return whether a path between two groups passes through other nodes."""

        def readers(group: int) -> set[int]:
            return {
                self._owner[self._places[reader.name]]
                for i in self._members[group]
                for value in self._graph.nodes[i].outputs
                for reader in self._graph.consumers.get(value.name, ())
            }

        # An edge from the second group to the first would also be a way back.
        waiting = list((readers(first) | readers(second)) - {first, second})
        seen = set(waiting)
        while waiting:
            for reader in readers(waiting.pop()):
                if reader in (first, second):
                    return True
                if reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
        return False


def is_fusible(graph: Graph, node: Node) -> bool:
    """Return whether a group's kernel can run a node, by the node itself."""
    type_ = node.output.type
    if len(node.outputs) != 1 or not type_.is_token_wise or not type_.is_float:
        return False
    types = [type_, *(graph.types[name] for name in node.inputs)]
    sized = all(type_.dims and type_.is_sized for type_ in types)
    return sized and bool(type_.features) and operator(node.op).tiles(dict(node.attributes))


def _loads_in_common(group: KernelGroup, other: KernelGroup) -> bool:
    """Return whether two groups share two inputs of the size of their outputs."""
    types, size = group.graph.types, group.type.features
    both = {*group.inputs} & {*other.inputs} - group.graph.parameters_by_name.keys()
    return sum(prod(types[name].features) == prod(size) for name in both) > 1


def _fits(group: KernelGroup) -> bool:
    """Return whether a single kernel can run a group, by its types."""
    types: Mapping[str, TensorType] = group.graph.types
    leaving = [types[name] for name in group.outputs]
    if len(leaving) + len(group.inputs) > MOST_VALUES:
        return False
    if len({(t.shape[0], prod(t.features)) for t in leaving}) != 1:
        return False
    if not group.sums_rows:
        return True
    rows = {_row(type_) for type_ in leaving}
    for node in group.nodes:
        read, output = types[node.inputs[0]], types[node.name]
        if operator(node.op).sums_rows:
            rows.add(_row(read))
        if operator(node.op).is_view and _row(read) != _row(output):
            return False
    return len(rows) == 1 and rows.pop()[1] <= MOST_COLUMNS


def _row(type_: TensorType) -> tuple[int, int]:
    return prod(type_.features[:-1]), type_.features[-1]


def _without_views_at_borders(group: KernelGroup) -> KernelGroup:
    """Drop views that read from outside, or that only outside nodes read.

    A view that the group also reads stays inside: outside, it and the group would wait for each
    other.
    """
    while True:
        read = {name for node in group.nodes for name in node.inputs}
        inner = tuple(
            node
            for node in group.nodes
            if not operator(node.op).is_view
            or (node.inputs[0] in group.made and (node.name in read or not group.leaves(node)))
        )
        if len(inner) == len(group.nodes):
            return group
        group = KernelGroup(group.graph, inner)


def _is_worth_a_kernel(group: KernelGroup) -> bool:
    """Return whether PyTorch needs several kernels for a group, and pcg has no kernel for it."""
    computing = [node for node in group.nodes if not operator(node.op).is_view]
    if len(computing) != 1:
        return bool(computing)
    node = computing[0]
    # A function of pcg takes several PyTorch kernels; PyTorch's `append` does not fill the cache.
    return node.op == "append" or (
        operator(node.op).source(node.inputs, dict(node.attributes)).startswith("K.")
        and not operator(node.op).has_kernel
    )


# ------------------------------------------------------------------------------------ order kernels


class OrderKernels(GraphPass):
    """Put the nodes of a kernel next to each other, and otherwise keep the order."""

    name = "order_kernels"

    def run(self, before: Graph) -> KernelGraph:
        import networkx  # 11 MiB, not needed in a process that loads a program

        graph = grouped(before, self.name)
        groups = [group_of(graph, parts) for parts in graph.kernels]
        items: dict[str, tuple[Node, ...]] = {node.name: (node,) for node in graph.nodes}
        items |= {group.nodes[0].name: group.nodes for group in groups}
        places = {node.name: place for place, node in enumerate(graph.nodes)}
        order = networkx.lexicographical_topological_sort(
            dependencies(graph, groups), key=places.__getitem__
        )
        return dataclasses.replace(graph, nodes=tuple(n for first in order for n in items[first]))


def dependencies(graph: Graph, groups: Iterable[KernelGroup]) -> networkx.DiGraph[str]:
    """Return the graph of groups and other nodes, by first node, with edges to their readers."""
    import networkx

    first = {value.name: node.name for node in graph.nodes for value in node.outputs}
    first |= {name: group.nodes[0].name for group in groups for name in group.made}
    readers: networkx.DiGraph[str] = networkx.DiGraph()
    readers.add_nodes_from(first[node.name] for node in graph.nodes)
    for node in graph.nodes:
        makers = {first[name] for name in node.inputs if name in first} - {first[node.name]}
        readers.add_edges_from((maker, first[node.name]) for maker in makers)
    return readers


# ------------------------------------------------------------------------------------- side by side


class SideBySide(GraphPass):
    """Let groups around an attention share a kernel."""

    name = "side_by_side"

    def run(self, before: Graph) -> KernelGraph:
        graph = grouped(before, self.name)
        groups = [group_of(graph, parts) for parts in graph.kernels]
        for node in graph.nodes:
            if operator(node.op).sees_sequences:
                outputs = [value.name for value in node.outputs]
                groups = _with_shared(groups, _of_values(node.inputs, groups, "outputs"))
                groups = _with_shared(groups, _of_values(outputs, groups, "inputs"))
        return dataclasses.replace(graph, kernels=tuple(map(names_of, groups)))


def _with_shared(groups: list[KernelGroup], around: Sequence[KernelGroup]) -> list[KernelGroup]:
    """Merge the groups around an attention that can share a kernel."""
    if len(around) < 2:
        return groups
    import networkx

    order = dependencies(around[0].graph, groups)
    parts = list(around[:1])
    for group in around[1:]:
        both, name = _joined([*parts, group]), group.nodes[0].name
        fits = len(both.inputs) + len(both.outputs) <= MOST_VALUES
        connected = networkx.ancestors(order, name) | networkx.descendants(order, name)
        if fits and connected.isdisjoint(part.nodes[0].name for part in parts):
            parts.append(group)
    if len(parts) < 2:
        return groups
    return [*(group for group in groups if group not in parts), _joined(parts)]


def _of_values(
    values: Sequence[str], groups: Sequence[KernelGroup], side: str
) -> list[KernelGroup]:
    """Return the groups that read, or compute, some of the values, in the order of the values."""
    places = []
    for group in groups:
        indices = [values.index(name) for name in getattr(group, side) if name in values]
        if indices:
            places.append((min(indices), group))
    return [group for _, group in sorted(places, key=lambda pair: pair[0])]


def _joined(parts: Sequence[KernelGroup]) -> KernelGroup:
    return group_of(parts[0].graph, [names for part in parts for names in names_of(part)])
