"""Fuse the gradients of a frozen linear operator and of its LoRA.

    ds = scale · dz B        dB = scale · dzᵀ s
    dx = … + dz W + … + ds A + …                      each of the dtype of dx

become one operator, `lora_linear_backward`, whose dx is a summand of what is left of the sum. The
runtime then adds LoRA's part to the base's where that lies, and does it at once for the jobs that
run the base's product together. It stands where the last of its inputs is made. Where something is
between A and the sum, as dropout or a collective, LoRA's products stay by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pcg.ir.graph import Graph, Node


def fuse_gradients(graph: Graph) -> Graph:
    """A layer's backward with such operators, where there can be some."""
    for base in [node for node in graph.nodes if node.op == "linear_backward"]:
        graph = _fused(graph, base)
    return graph


def _fused(graph: Graph, base: Node) -> Graph:
    """The graph with one base product's LoRA in one operator with it."""
    gradient, weight = base.inputs
    parameter = graph.parameters_by_name.get(weight)
    of_gradient = graph.consumers[gradient]
    up = [node for node in of_gradient if node.op == "expand_backward"]
    if parameter is None or parameter.role != "frozen":
        return graph
    for expand in up:
        outer = next(
            (n for n in of_gradient if n.op == "scaled_outer" and n.inputs[2] == expand.inputs[1]),
            None,
        )
        down = [n for n in graph.consumers[expand.name] if n.op == "shrink_backward"]
        if outer is None or len(down) != 1:
            continue
        path = _path(graph, base, down[0])
        if path is not None:
            return _with_operator(graph, base, expand, outer, down[0], path)
    return graph


def _path(graph: Graph, base: Node, down: Node) -> tuple[str, Sequence[Node]] | None:
    """LoRA's summand, and the sums from the first that has it or the base's to that of both.

    None where they are not summands of one sum, and where another reads a part of it on the way.
    """
    lora = down.name
    readers = graph.consumers[lora]
    if len(readers) == 1 and readers[0].op == "cast":
        lora = readers[0].name
    if graph.types[lora] != graph.types[base.name]:
        return None
    chains = [_sums(graph, name) for name in (lora, base.name)]
    first = next((node for node in chains[0] if node in chains[1]), None)
    if first is None:
        return None
    chains = [chain[: chain.index(first)] for chain in chains]
    return lora, (*chains[0], *chains[1], first)


def _sums(graph: Graph, name: str) -> list[Node]:
    """The sums that a value is a summand of, from the inmost."""
    found: list[Node] = []
    while len(readers := graph.consumers[name]) == 1 and name not in graph.outputs:
        (reader,) = readers
        if reader.op != "add" or len({*reader.inputs}) != 2:
            break
        found.append(reader)
        name = reader.name
    return found


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
    # The sum that LoRA's part was added in is the other summand.
    (last,) = [node for node in sums if lora in node.inputs]
    (other,) = [name for name in last.inputs if name != lora]
    gone = {base.name, expand.name, outer.name, down.name, lora, last.name}
    nodes: list[Node] = []
    waiting = {*inputs} & graph.producers.keys()
    is_there = not waiting
    if is_there:
        nodes.append(fused)
    for node in graph.nodes:
        if node.name not in gone:
            nodes.append(
                dataclasses.replace(
                    node,
                    inputs=tuple(other if name == last.name else name for name in node.inputs),
                )
            )
        waiting -= {value.name for value in node.outputs}
        if not waiting and not is_there:
            nodes.append(fused)
            is_there = True
    outputs_of_graph = tuple(other if name == last.name else name for name in graph.outputs)
    return graph.replace(nodes=tuple(nodes), outputs=outputs_of_graph)
