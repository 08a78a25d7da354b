"""Order nodes so that those of one kernel stand together, each behind what it reads."""

from __future__ import annotations

import dataclasses
from heapq import heapify, heappop, heappush

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
        place_of = {node.name: place for place, nodes in enumerate(items) for node in nodes}
        readers: list[set[int]] = [set() for _ in items]
        missing = [0] * len(items)
        for place, nodes in enumerate(items):
            read = (graph.producers.get(name) for node in nodes for name in node.inputs)
            for maker in {place_of[node.name] for node in read if node is not None} - {place}:
                readers[maker].add(place)
                missing[place] += 1
        ready = [place for place, count in enumerate(missing) if not count]
        heapify(ready)
        ordered = []
        while ready:
            place = heappop(ready)
            ordered.append(items[place])
            for reader in readers[place]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready, reader)
        if len(ordered) != len(items):
            waiting = [nodes[0].name for place, nodes in enumerate(items) if missing[place]]
            raise AssertionError(f"kernels of %{', %'.join(waiting)} wait for one another")
        return dataclasses.replace(graph, nodes=tuple(n for nodes in ordered for n in nodes))
