"""Put groups side by side in one kernel, each run by programs of its own.

Around one attention other tensors go the same way at the same time: queries and keys, which have
other numbers of heads, are normed and rotated, and values go to the cache beside the keys. Two
groups share a kernel where

    attention    reads what both make, or makes what both read,
    order        no path leads from one to the other, through whatever runs together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pcg.ir.analysis.kernel_group import KernelGroup, group_of, names_of
from pcg.ir.graph import Graph, KernelGraph
from pcg.ir.operators import operator
from pcg.passes.fusion.group_kernels import MOST_VALUES, grouped
from pcg.passes.fusion.order_kernels import dependencies
from pcg.passes.pass_base import GraphPass


class SideBySide(GraphPass):
    """Let groups around one attention share a kernel."""

    name = "side_by_side"

    def run(self, before: Graph) -> KernelGraph:
        graph = grouped(before, self.name)
        found = [group_of(graph, parts) for parts in graph.kernels]
        for node in graph.nodes:
            if operator(node.op).sees_sequences:
                made = [value.name for value in node.outputs]
                found = _with_shared(found, _of_values(node.inputs, found, "outputs"))
                found = _with_shared(found, _of_values(made, found, "inputs"))
        return dataclasses.replace(graph, kernels=tuple(map(names_of, found)))


def _with_shared(groups: list[KernelGroup], around: Sequence[KernelGroup]) -> list[KernelGroup]:
    """The groups, with those that can share a kernel of some around one attention as one."""
    if len(around) < 2:
        return groups
    import networkx  # see `order_kernels`

    order = dependencies(around[0].graph, groups)
    parts = list(around[:1])
    for group in around[1:]:
        both, own = _joined([*parts, group]), group.nodes[0].name
        fits = len(both.inputs) + len(both.outputs) <= MOST_VALUES
        connected = networkx.ancestors(order, own) | networkx.descendants(order, own)
        if fits and connected.isdisjoint(part.nodes[0].name for part in parts):
            parts.append(group)
    if len(parts) < 2:
        return groups
    return [*(group for group in groups if group not in parts), _joined(parts)]


def _of_values(
    values: Sequence[str], groups: Sequence[KernelGroup], side: str
) -> list[KernelGroup]:
    """The groups that read, or make, some of the values, in the order of the values."""
    places = []
    for group in groups:
        own = [values.index(name) for name in getattr(group, side) if name in values]
        if own:
            places.append((min(own), group))
    return [group for _, group in sorted(places, key=lambda pair: pair[0])]


def _joined(parts: Sequence[KernelGroup]) -> KernelGroup:
    return group_of(parts[0].graph, [names for part in parts for names in names_of(part)])
