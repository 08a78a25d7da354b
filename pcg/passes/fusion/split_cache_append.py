"""Split what writes keys and values into the cache from attention, where kernels make them.

    out = attention(q, k, v)      keys = append(k), values = append(v)
                                  out = attention(q, keys, values)

The kernel that makes k then stores it at its place in the cache itself. Where keys are made by no
such kernel, as in models without rotary embedding, attention goes on to append both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pcg.ir.graph import Graph, Node, Value
from pcg.ir.operators import operator
from pcg.ir.program.program import python_name
from pcg.kernels.sizes import HEAD_SIZES, KERNEL_DTYPES
from pcg.passes.fusion.group_kernels import is_fusible
from pcg.passes.naming import unused_name
from pcg.passes.pass_base import GraphPass


@dataclass(frozen=True)
class SplitCacheAppend(GraphPass):
    """Let nodes of their own append keys and values to the cache, before attention.

    Attributes:
        sizes: sizes of heads that attention's kernels take; other attention appends for itself.
        dtypes: dtypes that they take.
    """

    name = "split_cache_append"
    sizes: tuple[int, ...] = HEAD_SIZES
    dtypes: tuple[str, ...] = KERNEL_DTYPES

    def run(self, before: Graph) -> Graph:
        names = {python_name(name) for name in before.types}
        nodes: list[Node] = []
        for node in before.nodes:
            if node.op != "attention" or not self.splits(before, node):
                nodes.append(node)
                continue
            q, k, v, *rest = node.inputs
            appended = []
            for value, to in ((k, "keys"), (v, "values")):
                name = unused_name(to, names)
                names.add(name)
                appended.append(name)
                output = Value(name, before.types[value])
                nodes.append(Node("append", (value,), (output,), (("to", to),), node.scope))
            nodes.append(dataclasses.replace(node, inputs=(q, *appended, *rest)))
        return before.replace(nodes=tuple(nodes))

    def splits(self, graph: Graph, node: Node) -> bool:
        """Return whether the kernel that makes an attention's keys appends for it."""
        q, k, v = (graph.types[name] for name in node.inputs[:3])
        sizes = {q.features[-1], v.features[-1]}
        known = sizes.issubset(self.sizes) and q.dtype in self.dtypes
        same = q.dtype == k.dtype == v.dtype
        return known and same and _is_made_by_a_kernel(graph, node.inputs[1])


def _is_made_by_a_kernel(graph: Graph, value: str) -> bool:
    node = graph.producers.get(value)
    while node is not None and operator(node.op).is_view:
        node = graph.producers.get(node.inputs[0])
    return node is not None and is_fusible(graph, node)
