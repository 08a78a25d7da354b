"""Joining of LoRA of sites with the same input in training, so that sites share a launch.

    s_q = shrink(x, A_q), s_k = …          shrink_group(x, A…)
    z_q = expand_add(q, s_q, B_q), …       expand_add_group(q…, s…, B…)
    dx = dx_q + dx_k + …                   lora_group_backward(dz…, W…, A…, B…, s…)
    dA_q = asked_outer(ds_q, x), …         asked_outer_group(ds…, x)

q, k and v then take the launches of a single site. The gradients of their input are summed in place
of the first, including those through weights without LoRA, such as k's if only q and v have LoRA.
Sites of an operator have equal ranks and are independent. If the graph has collectives in flight,
the pass does nothing, as the order of nodes hides the collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from pcg.ir.analysis.dataflow import waits
from pcg.ir.graph import Graph, Node, Value
from pcg.ir.operators.lora import MOST_SITES
from pcg.passes.fusion.fuse_gradients import depends, in_order, sums_of
from pcg.passes.graphs.pass_base import GraphPass


class JoinLora(GraphPass):
    """Join LoRA operators of the same input."""

    name = "join_lora"

    def run(self, before: Graph) -> Graph:
        if waits(before.nodes):
            return before
        graph = before
        for key, join in (
            (_shrink_key, _shrinks),
            (_expand_key, _expands),
            (_backward_key, _backwards),
            (_outer_key, _outers),
        ):
            for names in _groups(graph, key):
                nodes = [graph.producers[name] for name in names]
                if _are_free(graph, nodes):
                    graph = join(graph, nodes)
        return graph


Key = Callable[[Graph, Node], object]
Order = Callable[[Sequence[Node]], tuple[Node, ...]]


def _groups(graph: Graph, key: Key) -> Iterator[list[str]]:
    """Yield the names of nodes with equal keys: two or more, up to an operator's limit."""
    groups: dict[object, list[str]] = {}
    # Gradients are in reverse order; reversing them finds each s where forward put it.
    for node in reversed(graph.nodes) if key in _OF_GRADIENTS else graph.nodes:
        group_key = key(graph, node)
        if group_key is not None:
            groups.setdefault(group_key, []).append(node.name)
    for names in groups.values():
        for first in range(0, len(names) - 1, MOST_SITES):
            yield names[first : first + MOST_SITES]


def _are_free(graph: Graph, nodes: Sequence[Node]) -> bool:
    return not any(
        depends(graph, node.inputs, [other for other in nodes if other is not node])
        for node in nodes
    )


def _joined(graph: Graph, nodes: Sequence[Node], new: Node, order: Order = in_order) -> Graph:
    """Replace nodes by a single node at the place of the last, and order the result."""
    names = {node.name for node in nodes}
    last = next(node for node in reversed(graph.nodes) if node.name in names)
    kept = (
        new if node is last else node
        for node in graph.nodes
        if node is last or node.name not in names
    )
    return graph.replace(nodes=order([*kept]))


def _delayed(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Delay nodes until their inputs are computed; other nodes stay in order."""
    missing = {value.name for node in nodes for value in node.outputs}
    ordered: list[Node] = []
    waiting: list[Node] = []
    for node in nodes:
        waiting.append(node)
        while ready := [candidate for candidate in waiting if missing.isdisjoint(candidate.inputs)]:
            ordered.append(ready[0])
            waiting.remove(ready[0])
            missing -= {value.name for value in ready[0].outputs}
    return tuple(ordered)


def _columns(nodes: Sequence[Node]) -> list[str]:
    return [name for names in zip(*(node.inputs for node in nodes), strict=True) for name in names]


# ----------------------------------------------------------------------------------------- forward


def _shrink_key(graph: Graph, node: Node) -> object:
    return (node.inputs[0], graph.types[node.name]) if node.op == "shrink" else None


def _shrinks(graph: Graph, nodes: Sequence[Node]) -> Graph:
    inputs = (nodes[0].inputs[0], *(node.inputs[1] for node in nodes))
    outputs = tuple(node.output for node in nodes)
    return _joined(graph, nodes, Node("shrink_group", inputs, outputs, (), nodes[0].scope))


def _expand_key(graph: Graph, node: Node) -> object:
    maker = graph.producers.get(node.inputs[1]) if node.op == "expand_add" else None
    if maker is None or maker.op != "shrink_group":
        return None
    return maker.name, graph.types[node.inputs[0]].dtype


def _expands(graph: Graph, nodes: Sequence[Node]) -> Graph:
    outputs = tuple(node.output for node in nodes)
    new = Node("expand_add_group", tuple(_columns(nodes)), outputs, (), nodes[0].scope)
    return _joined(graph, nodes, new)


# ---------------------------------------------------------------------------------------- backward


def _backward_key(graph: Graph, node: Node) -> object:
    """Return the sum that contains the operator's dx, and the type of its s."""
    if node.op != "lora_linear_backward":
        return None
    sums = sums_of(graph, node.outputs[-1].name)
    return (sums[-1].name, graph.types[node.inputs[4]]) if sums else None


def _backwards(graph: Graph, nodes: Sequence[Node]) -> Graph:
    plain = _plain(graph, nodes)
    ds, db, dx = zip(*(node.outputs for node in nodes), strict=True)
    dz, weights, *rest = zip(*(node.inputs for node in nodes), strict=True)
    dz, weights = (
        (*joined_names, *(n.inputs[i] for n in plain))
        for i, joined_names in enumerate((dz, weights))
    )
    inputs, outputs = (
        (*dz, *weights, *(name for names in rest for name in names)),
        (*ds, *db, dx[0]),
    )
    count = (("plain", len(plain)),)
    new = Node("lora_group_backward", inputs, outputs, count, nodes[0].scope)
    for summand in (*dx[1:], *(node.output for node in plain)):
        graph = _without_summand(graph, summand)
    nodes = [*nodes, *plain]
    # Readers of a site's gradients wait; other products stay before those of the last site.
    return _joined(graph, [graph.producers[node.name] for node in nodes], new, _delayed)


def _plain(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Return products by frozen weights without LoRA, in the same sum as the nodes' dx."""
    of_lora = nodes[0].outputs[-1].name
    whole = sums_of(graph, of_lora)[-1]
    products: list[Node] = []
    for node in graph.nodes:
        weight = graph.parameters_by_name.get(node.inputs[1]) if node.op == PLAIN else None
        if weight is None or weight.role != "frozen" or len(nodes) + len(products) == MOST_SITES:
            continue
        sums = sums_of(graph, node.name)
        is_like = (
            bool(sums) and sums[-1] is whole and graph.types[node.name] == graph.types[of_lora]
        )
        if is_like and _are_free(graph, [*nodes, *products, node]):
            products.append(node)
    return products


PLAIN = "linear_backward"


def _without_summand(graph: Graph, summand: Value) -> Graph:
    """Drop a summand from its sum, as another summand includes it."""
    (last,) = graph.consumers[summand.name]
    (other,) = [name for name in last.inputs if name != summand.name]

    def renamed(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(other if name == last.name else name for name in names)

    nodes = tuple(
        dataclasses.replace(node, inputs=renamed(node.inputs))
        for node in graph.nodes
        if node is not last
    )
    return graph.replace(nodes=nodes, outputs=renamed(graph.outputs))


def _outer_key(graph: Graph, node: Node) -> object:
    if node.op != "asked_outer":
        return None
    return node.inputs[1], graph.types[node.inputs[0]]


def _outers(graph: Graph, nodes: Sequence[Node]) -> Graph:
    inputs = (*(node.inputs[0] for node in nodes), nodes[0].inputs[1])
    outputs = tuple(node.output for node in nodes)
    of = (("of", nodes[0].name),)
    return _joined(graph, nodes, Node("asked_outer_group", inputs, outputs, of, nodes[0].scope))


_OF_GRADIENTS = (_backward_key, _outer_key)
