"""Put groups side by side in one kernel, each run by programs of its own.

Around one attention other tensors go the same way at the same time: queries and keys, which have
other numbers of heads, are normed and rotated, and values go to the cache beside the keys. Two
groups share a kernel where

    attention    reads what both make, or makes what both read,
    order        no path leads from one to the other, through whatever runs together.
"""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.passes.fusion.kernel_group import MOST_VALUES, Group


def side_by_side(graph: Graph, groups: Sequence[Group]) -> list[Group]:
    """The groups, those around one attention as parts of one."""
    found = list(groups)
    for node in graph.nodes:
        if not operator(node.op).sees_sequences:
            continue
        made = [value.name for value in node.outputs]
        for around in (
            _of_values(node.inputs, [(group.outputs, group) for group in found]),
            _of_values(made, [(group.inputs, group) for group in found]),
        ):
            parts = around[:1]
            for group in around[1:]:
                both = _joined(graph, [*parts, group])
                if len(both.inputs) + len(both.outputs) > MOST_VALUES:
                    continue
                if not any(_has_path(graph, found, one, group) for one in parts):
                    parts.append(group)
            if len(parts) > 1:
                found = [group for group in found if group not in parts]
                found.append(_joined(graph, parts))
    return found


def _of_values(values: Sequence[str], groups: Sequence[tuple[Sequence[str], Group]]) -> list[Group]:
    """The groups that have some of the values among their own, in the order of the values."""
    places = [
        (min(values.index(name) for name in own if name in values), group)
        for own, group in groups
        if not set(values).isdisjoint(own)
    ]
    return [group for _, group in sorted(places, key=lambda pair: pair[0])]


def _joined(graph: Graph, parts: Sequence[Group]) -> Group:
    inner = {node.name for part in parts for node in part.nodes}
    nodes = tuple(node for node in graph.nodes if node.name in inner)
    return Group(graph, nodes, tuple(one for part in parts for one in part.parts or (part,)))


def _has_path(graph: Graph, groups: Sequence[Group], first: Group, second: Group) -> bool:
    """Whether a path leads from one group to another, or back; groups run as a whole."""
    item_of = items_of(graph, groups)
    for start, end in ((first, second), (second, first)):
        waiting: list[Node | Group] = [start]
        seen = {start.nodes[0].name}
        while waiting:
            nodes = nodes_of(waiting.pop())
            values = [value.name for node in nodes for value in node.outputs]
            for reader in (r for name in values for r in graph.consumers.get(name, ())):
                item = item_of[reader.name]
                if item is end:
                    return True
                if nodes_of(item)[0].name not in seen:
                    seen.add(nodes_of(item)[0].name)
                    waiting.append(item)
    return False


def nodes_of(item: Node | Group) -> tuple[Node, ...]:
    """What an item runs."""
    return item.nodes if isinstance(item, Group) else (item,)


def items_of(graph: Graph, groups: Sequence[Group]) -> dict[str, Node | Group]:
    """What runs each node, by its name."""
    item_of: dict[str, Node | Group] = {node.name: node for node in graph.nodes}
    for group in groups:
        item_of |= dict.fromkeys(group.made, group)
    return item_of
