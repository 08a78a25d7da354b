"""Order nodes so that those of one kernel stand together, each behind what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pcg.ir.analysis.kernel_group import KernelGroup, group_of
from pcg.ir.graph import Graph, KernelGraph, Node
from pcg.passes.fusion.group_kernels import grouped
from pcg.passes.pass_base import GraphPass

if TYPE_CHECKING:
    import networkx


class OrderKernels(GraphPass):
    """Put the nodes of a kernel together; where the order is free, it stays as it is."""

    name = "order_kernels"

    def run(self, before: Graph) -> KernelGraph:
        import networkx  # 11 MiB, which a process that loads a program does without

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
    """The groups and other nodes, by the name of their first node, each with those that read it."""
    import networkx

    first = {value.name: node.name for node in graph.nodes for value in node.outputs}
    first |= {name: group.nodes[0].name for group in groups for name in group.made}
    found: networkx.DiGraph[str] = networkx.DiGraph()
    found.add_nodes_from(first[node.name] for node in graph.nodes)
    for node in graph.nodes:
        made = {first[name] for name in node.inputs if name in first} - {first[node.name]}
        found.add_edges_from((maker, first[node.name]) for maker in made)
    return found
