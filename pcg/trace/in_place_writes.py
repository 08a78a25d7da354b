"""Refusal of in-place writes that an exported graph's readers would miss.

The importer renames a written value for its later readers. Values that share the memory under
another name, such as the tensor that contains a written part, would still have their old content.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Collection, Iterator

import torch
from torch.fx import Graph, Node

from pcg.trace.flat_graph import refusal


def check_writes(graph: Graph, live: Collection[Node], skipped: Collection[Node]) -> None:
    """Refuse a graph that writes memory under one name and then reads it under another.

    Args:
        live: the nodes that the outputs need, if nothing is shared.
        skipped: nodes that are imported together with other nodes.
    Raises:
        TraceError: names the operator that writes, and its module.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    held = {memory_of(node) for node in graph.nodes if node.op == "placeholder"} - {None}
    sharing: dict[int, list[Node]] = {}
    for node in graph.nodes:
        memory = memory_of(node)
        if memory is not None:
            sharing.setdefault(memory, []).append(node)
    for node in graph.nodes:
        if any(memory_of(value) in held for value, _ in written(node)):
            raise refusal(node, "it writes a buffer or an input, which a program does not")
        if node in skipped:
            continue
        for value, is_renamed in written(node):
            for other in sharing.get(memory_of(value) or 0, ()):
                if order[other] >= order[node] or (other is value and is_renamed):
                    continue
                if _are_parts(other, value):
                    continue
                readers = [user for user in other.users if order[user] > order[node]]
                if any(user in live for user in readers):
                    raise refusal(
                        node,
                        f"it writes into memory that {other.name} shares, which is read later; "
                        "compute a new tensor instead, as torch.where or a product with a mask",
                    )


def written(node: Node) -> Iterator[tuple[Node, bool]]:
    """Yield the tensors that a node writes, with True for the returned tensor."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(value, Node):
            yield value, place == 0


def _are_parts(node: Node, other: Node) -> bool:
    """Return whether two nodes are different parts of a tensor, split by the same operator."""
    is_part = node.target is other.target is python_operator.getitem
    return is_part and node.args[0] is other.args[0] and node.args[1] != other.args[1]


def memory_of(node: Node) -> int | None:
    """Return the identity of a tensor's memory; None for other values."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # tensors of torch.vmap have no memory of their own
        return None
