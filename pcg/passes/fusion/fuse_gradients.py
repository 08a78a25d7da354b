"""Fusion of adapters' gradients, so that the runtime computes them together for several jobs.

    ds = scale · dz B        dB = scale · dzᵀ s                           LoRA, and its base's
    dx = … + dz W + … + ds A + …                      each of the dtype of dx

become the operator `lora_linear_backward`. Its dx is a summand of the remaining sum: LoRA's part is
added to the base's part in place. LoRA's products stay separate if an operator lies between A and
the sum, such as dropout or a collective, or if dB overlaps a collective.

    h = σ(s + scale · d)     dU = scale · dzᵀ h                           a bottleneck adapter
    ds = σ' ⊙ (scale · dz U)     dd = scale · Σ ds

become the operator `bottleneck_backward`. A fused operator cannot read a value that is recomputed
from its own outputs, such as s over ranks at a small budget.

Functions then also request dA = dsᵀ x from their caller, and in all cases the gradients of vectors:
Σ dz ⊙ (y - b) of (IA)³ and DoRA, and scale · Σ dz of biases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from pcg.ir.analysis.dataflow import waits
from pcg.ir.graph import Graph, Node
from pcg.ir.operators.bypass import Activate
from pcg.passes.graphs.pass_base import GraphPass


class FuseGradients(GraphPass):
    """Fuse the gradients of a layer's backward that a single operator can compute."""

    name = "fuse_gradients"

    def run(self, before: Graph) -> Graph:
        graph = before
        for name in [node.name for node in graph.nodes if node.op == "linear_backward"]:
            graph = _fused(graph, graph.producers[name])
        for name in [node.name for node in graph.nodes if node.op == "activate"]:
            graph = _with_bottleneck(graph, graph.producers[name])
        nodes = [_asked(graph, node) for node in graph.nodes]
        if graph is before and nodes == [*graph.nodes]:
            return graph
        return graph.replace(nodes=in_order(nodes))


def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Order nodes after their inputs, and otherwise keep their order."""
    makers = {value.name: node for node in nodes for value in node.outputs}
    placed: dict[str, Node] = {}

    def place(node: Node) -> None:
        if node.name not in placed:
            for name in node.inputs:
                if name in makers:
                    place(makers[name])
            placed[node.name] = node

    for node in nodes:
        place(node)
    return tuple(placed.values())


def depends(graph: Graph, values: Iterable[str], on: Collection[Node]) -> bool:
    """Return whether one of the values depends on outputs of `on`."""
    waiting, seen = [*values], set[str]()
    while waiting:
        node = graph.producers.get(waiting.pop())
        if node in on:
            return True
        if node is not None and node.name not in seen:
            seen.add(node.name)
            waiting += node.inputs
    return False


_VECTORS = {"inner": "asked_inner", "sum_tokens": "asked_sum_tokens"}


def _asked(graph: Graph, node: Node) -> Node:
    """Turn a vector's or a fused A's gradient into a request to the caller."""
    of = ("of", node.name)
    if node.op in _VECTORS:
        return dataclasses.replace(node, op=_VECTORS[node.op], attributes=(*node.attributes, of))
    maker = graph.producers.get(node.inputs[0]) if node.op == "outer" else None
    if maker is None or maker.op not in ("lora_linear_backward", "bottleneck_backward"):
        return node
    return dataclasses.replace(node, op="asked_outer", attributes=(of,))


def _fused(graph: Graph, base: Node) -> Graph:
    gradient, weight = base.inputs
    parameter = graph.parameters_by_name.get(weight)
    of_gradient = graph.consumers[gradient]
    up = [node for node in of_gradient if node.op == "expand_backward"]
    if parameter is None or parameter.role != "frozen":
        return graph
    begun = waits(graph.nodes).items()
    beside = {node for start, end in begun for node in graph.nodes[start + 1 : end]}
    for expand in up:
        outers = [n for n in of_gradient if n.op == "scaled_outer"]
        outer = next((n for n in outers if n.inputs[2] == expand.inputs[1]), None)
        down = [n for n in graph.consumers[expand.name] if n.op == "shrink_backward"]
        if outer is None or len(down) != 1 or outer in beside:
            continue
        if depends(graph, (outer.inputs[1], outer.inputs[2], down[0].inputs[1]), (expand, base)):
            continue
        path = _path(graph, base, down[0])
        if path is not None:
            return _with_operator(graph, base, expand, outer, down[0], path)
    return graph


def _path(graph: Graph, base: Node, down: Node) -> tuple[str, Sequence[Node]] | None:
    """Return the sums from LoRA's summand, and the base's, to their common sum.

    None if no sum has both, or if another node reads an intermediate sum.
    """
    lora = down.name
    reader, *others = graph.consumers[lora]
    if reader.op == "cast" and not others:
        lora = reader.name
    if graph.types[lora] != graph.types[base.name]:
        return None
    lora_sums, others = (sums_of(graph, name) for name in (lora, base.name))
    first = next((node for node in lora_sums if node in others), None)
    if first is None:
        return None
    return lora, (*lora_sums[: lora_sums.index(first)], *others[: others.index(first)], first)


def sums_of(graph: Graph, name: str) -> list[Node]:
    """Return the nested sums that contain a value as summand, innermost first."""
    sums: list[Node] = []
    while len(readers := graph.consumers.get(name, ())) == 1 and name not in graph.outputs:
        (reader,) = readers
        if reader.op != "add" or len({*reader.inputs}) != 2:
            break
        sums.append(reader)
        name = reader.name
    return sums


def _with_operator(
    graph: Graph,
    base: Node,
    expand: Node,
    outer: Node,
    down: Node,
    path: tuple[str, Sequence[Node]],
) -> Graph:
    lora, sums = path
    outputs = (expand.output, outer.output, base.output)
    inputs = (*base.inputs, down.inputs[1], expand.inputs[1], outer.inputs[1])
    fused = Node("lora_linear_backward", inputs, outputs, (), base.scope)
    # `other` is the other summand of the sum that added LoRA's part.
    (last,) = [node for node in sums if lora in node.inputs]
    (other,) = [name for name in last.inputs if name != lora]
    gone = {expand.name, outer.name, down.name, lora, last.name}

    def renamed(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(other if name == last.name else name for name in names)

    kept = tuple(
        dataclasses.replace(node, inputs=renamed(node.inputs))
        for node in (fused if node is base else node for node in graph.nodes)
        if node.name not in gone or node is fused
    )
    return graph.replace(nodes=kept, outputs=renamed(graph.outputs))


# ------------------------------------------------------------------------------- bottlenecks


def _with_bottleneck(graph: Graph, inner: Node) -> Graph:
    s, bias = inner.inputs
    readers = graph.consumers
    for outer in readers.get(inner.name, ()):
        if outer.op != "scaled_outer" or outer.inputs[1] != inner.name:
            continue
        gradient, _, up = outer.inputs
        expand = _reader(readers, gradient, "expand_backward", up)
        if expand is None or len(readers[expand.name]) != 1:
            continue
        (slope,) = readers[expand.name]
        of_sum = graph.producers.get(slope.inputs[-1])
        of_bias = _reader(readers, slope.name, "sum_tokens", bias)
        is_slope = slope.op == Activate.gradients[str(inner.attribute("function"))][0]
        if not is_slope or of_sum is None or of_sum.inputs != inner.inputs or of_bias is None:
            continue
        fused = Node(
            "bottleneck_backward",
            (gradient, up, s, bias),
            (slope.output, outer.output, of_bias.output),
            inner.attributes,
            outer.scope,
        )
        if depends(graph, (s, bias, up), (expand, slope, outer, of_bias)):
            continue
        gone = {expand.name, outer.name, of_bias.name}
        every = (fused if node is slope else node for node in graph.nodes)
        kept = tuple(node for node in every if node.name not in gone)
        return graph.replace(nodes=kept).without_dead_code()
    return graph


def _reader(readers: Mapping[str, Sequence[Node]], value: str, op: str, last: str) -> Node | None:
    nodes = (n for n in readers.get(value, ()) if n.op == op and n.inputs == (value, last))
    return next(nodes, None)
