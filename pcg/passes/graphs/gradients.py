"""Passes over a graph and its backward: prune, compress, window attention.

**Prune** drops the gradients that no trained parameter needs: FlexLLM §5.2, algorithm 1, step 1,
over the backward graph of `differentiate` (its line 3):

    5–10   drop the unwanted outputs: gradients of frozen weights, and of inputs below which no
           parameter is trained; queue the nodes that compute them
    11–17  while the queue is not empty, take a node; if no node reads any of its outputs, drop the
           node, and queue the nodes that compute its inputs
    18–22  the forward values that the remaining nodes read are `Differentiated.needed`

A gradient rule gives each gradient its own node, or several nodes that read the same values; so
UPDATEINPUT(n, O(n)) of a node is all its inputs while any of its outputs is read, and empty after.

**Compress** lets backward read part of a value where that suffices, without loss:

    relu_backward(dy, y)  needs only the signs of y: one bit an element, packed
                          as pack_signs(y) [.., n / 8], u8

The packed value is a value of the forward graph that the save problem may save
(`pcg.passes.memory.save_problem`); if it is not saved, `uncompressed` lets backward read y. Other
lossless savings need no operator: an fp32 copy of an exact bf16 value is recomputed from that
value, and a dropout mask is redrawn from its seed. Both are cheap nodes for the cut.

**Window attention** lets backward read the keys and values that windows left in the KV cache:

    attention_backward(dout, out, lse, q, k, v)   →   window_attention_backward(dout, out, lse, q)

Token-level finetuning (`pcg.runtime.training.runner`) keeps all keys and values of its sequences in
the cache for later windows, so they need not be saved again. If a single product computes queries,
keys and values, they are views of a tensor that is saved whole for the queries.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Graph, Node, Value
from pcg.passes.graphs.differentiate import Differentiated, GradientPass, with_nodes

# -------------------------------------------------------------------------------------------- prune


class Prune(GradientPass):
    """Drop all gradients except those of adapters' parameters and of wanted inputs."""

    name = "prune"

    def run(self, before: Differentiated) -> Differentiated:
        kept = {*before.wanted, *before.trained}
        names = (*before.wrt, *before.trained, *before.frozen)
        pairs = list(zip(names, before.backward.outputs, strict=True))
        outputs = tuple(gradient for name, gradient in pairs if name in kept)
        unwanted = [gradient for name, gradient in pairs if name not in kept]
        return dataclasses.replace(
            before,
            backward=_without(before.backward.replace(outputs=outputs), unwanted),
            wrt=tuple(name for name in before.wrt if name in kept),
            frozen=(),
        )


def _without(graph: Graph, unwanted: Iterable[str]) -> Graph:
    """Drop these values' makers, and nodes before them, if no other node reads their outputs."""
    readers = Counter([*graph.outputs, *(name for node in graph.nodes for name in node.inputs)])
    queue = deque(graph.producers[name] for name in unwanted if name in graph.producers)
    gone = set()
    while queue:
        node = queue.popleft()
        if node.name in gone or any(readers[value.name] for value in node.outputs):
            continue
        gone.add(node.name)
        for name in node.inputs:
            readers[name] -= 1
            if name in graph.producers:
                queue.append(graph.producers[name])
    return graph.replace(
        inputs=tuple(value for value in graph.inputs if readers[value.name]),
        parameters=tuple(p for p in graph.parameters if readers[p.name]),
        nodes=tuple(node for node in graph.nodes if node.name not in gone),
    )


# ----------------------------------------------------------------------------------------- compress


SIGNS_PER_BYTE = 8


class Compress(GradientPass):
    """Compute packed values in forward, for backward to read."""

    name = "compress"

    def run(self, before: Differentiated) -> Differentiated:
        forward = Builder.extending(before.graph)
        inputs = {value.name: value for value in before.backward.inputs}
        nodes = []
        for node in before.backward.nodes:
            if node.op == "relu_backward" and _packs(node.inputs[1], inputs):
                y = node.inputs[1]
                signs = forward.add("pack_signs", [y], name=f"{y}_signs")
                inputs[signs] = Value(signs, forward.types[signs])
                node = dataclasses.replace(
                    node, op="relu_backward_packed", inputs=(node.inputs[0], signs)
                )
            nodes.append(node)
        return dataclasses.replace(
            before,
            graph=before.graph.replace(nodes=tuple(forward.nodes)),
            backward=with_nodes(before.backward, nodes, inputs.values()),
        )


def uncompressed(gradients: Differentiated, saved: Container[str]) -> Graph:
    """Read plain values in backward instead of packed values that are not saved."""
    backward = gradients.backward
    nodes, inputs = [], {value.name: value for value in backward.inputs}
    for node in backward.nodes:
        if node.op == "relu_backward_packed" and node.inputs[1] not in saved:
            dy, signs = node.inputs
            (y,) = gradients.graph.producers[signs].inputs
            inputs.setdefault(y, Value(y, gradients.graph.types[y]))
            node = dataclasses.replace(node, op="relu_backward", inputs=(dy, y))
        nodes.append(node)
    return with_nodes(backward, nodes, inputs.values())


def _packs(name: str, inputs: Mapping[str, Value]) -> bool:
    return name in inputs and inputs[name].type.features[-1] % SIGNS_PER_BYTE == 0


# --------------------------------------------------------------------------------- window attention


class WindowAttention(GradientPass):
    """Read attention's keys and values from the KV cache in backward, instead of saved copies."""

    name = "window_attention"

    def run(self, before: Differentiated) -> Differentiated:
        backward = before.backward
        nodes = [_cached(node, backward) for node in backward.nodes]
        return dataclasses.replace(before, backward=with_nodes(backward, nodes, backward.inputs))


def _cached(node: Node, backward: Graph) -> Node:
    if node.op != "attention_backward":
        return node
    heads, size = backward.types[node.inputs[5]].features
    return node.changed(
        op="window_attention_backward",
        inputs=(*node.inputs[:4], *node.inputs[6:]),
        attributes={"kv_heads": heads, "value_size": size},
    )
