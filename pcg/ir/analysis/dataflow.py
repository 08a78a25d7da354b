"""Data flow in a graph: gradients, collectives in flight, and the operations of products.

A collective in flight overlaps other nodes:

    s = all_reduce.begin(x)      starts at the node's place
    y = linear(z, W)             overlaps
    s = s()                      waits directly before the first reader, or at the end
    t = neg(s)

All ranks run the same program, so all start, and wait for, the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.operators.collectives import Collective
from pcg.ir.types import CONTEXT, TOKENS

# ---------------------------------------------------------------------------------------- trainable


def trained(graph: Graph) -> tuple[str, ...]:
    """Return the adapters' parameters that a gradient of an output reaches.

    Excludes VeRA's shared matrices, which operators treat as constants.
    """
    reached = set(graph.outputs)
    for node in reversed(graph.nodes):
        if any(value.name in reached for value in node.outputs):
            constants = operator(node.op).constant_in
            reached.update(name for i, name in enumerate(node.inputs) if i not in constants)
    return tuple(p.name for p in graph.parameters if p.role == "adapter" and p.name in reached)


def reachable(graph: Graph, sources: Iterable[str]) -> frozenset[str]:
    """Return the sources, and the values through which a gradient flows back to them."""
    reached = set(sources)
    for node in graph.nodes:
        constants = operator(node.op).constant_in
        if any(name in reached for i, name in enumerate(node.inputs) if i not in constants):
            reached.update(value.name for value in node.outputs if value.type.is_float)
    return frozenset(reached)


# ---------------------------------------------------------------------------------------- in flight


class Reader(Protocol):
    """A node, or the launch of several nodes."""

    @property
    def inputs(self) -> tuple[str, ...]: ...


def collective_of(item: Reader) -> Collective | None:
    """Return the operator of a node that communicates; None for other nodes."""
    if not isinstance(item, Node):
        return None
    entry = operator(item.op)
    return entry if isinstance(entry, Collective) and entry.rounds else None


def waits(items: Sequence[Reader]) -> dict[int, int]:
    """Map the index of each overlapped collective to the index of its outputs' first reader.

    Without a reader, that index is the number of items.
    """
    first_readers = {}
    for place, item in enumerate(items):
        if not isinstance(item, Node) or collective_of(item) is None:
            continue
        first = first_reader(items, place, item)
        if any(_is_work(other) for other in items[place + 1 : first]):
            first_readers[place] = first
    return first_readers


def first_reader(items: Sequence[Reader], place: int, node: Node) -> int:
    """Return the index of the first reader of a node's outputs, or the number of items."""
    outputs = {value.name for value in node.outputs}
    later = range(place + 1, len(items))
    return next((i for i in later if not outputs.isdisjoint(items[i].inputs)), len(items))


def _is_work(item: Reader) -> bool:
    """Return whether a node overlaps a collective; views and other collectives do not."""
    if not isinstance(item, Node):
        return True
    return not operator(item.op).is_view and collective_of(item) is None


# ------------------------------------------------------------------------------------ product flops


def node_flops(graph: Graph, node: Node, tokens: int, seq: int) -> int:
    """Return the operations of a matrix product or attention; 0 for any other operator."""
    entry = operator(node.op)
    if not entry.is_product:
        return 0
    formula = entry.flops(*graph.types_of(node), dict(node.attributes))
    return int(formula.subs({TOKENS: tokens, CONTEXT: seq}))


def graph_flops(graph: Graph, tokens: int, seq: int) -> int:
    """Return the operations of a graph's matrix products and attention."""
    return sum(node_flops(graph, node, tokens, seq) for node in graph.nodes)
