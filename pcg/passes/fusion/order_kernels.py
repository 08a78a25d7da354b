"""Order nodes so that those of one kernel stand together, each behind what it reads."""

from __future__ import annotations

import dataclasses

import networkx

from pcg.ir.graph import Graph, KernelGraph
from pcg.ir.kernel_group import KernelGroup, items_of
from pcg.passes.fusion.group_kernels import grouped
from pcg.passes.pass_base import GraphPass


class OrderKernels(GraphPass):
    """Put the nodes of a kernel together; where the order is free, it stays as it is."""

    name = "order_kernels"

    def run(self, before: Graph) -> KernelGraph:
        graph = grouped(before, self.name)
        items = [i.nodes if isinstance(i, KernelGroup) else (i,) for i in items_of(graph)]
        maker = {v.name: i for i, nodes in enumerate(items) for n in nodes for v in n.outputs}
        before_of: networkx.DiGraph[int] = networkx.DiGraph()
        before_of.add_nodes_from(range(len(items)))
        for place, nodes in enumerate(items):
            made = {maker[name] for node in nodes for name in node.inputs if name in maker}
            before_of.add_edges_from((other, place) for other in made - {place})
        order = networkx.lexicographical_topological_sort(before_of)
        return dataclasses.replace(graph, nodes=tuple(n for place in order for n in items[place]))
