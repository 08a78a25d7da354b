"""Raise elementary arithmetic to the table's model operators.

    x · rsqrt(mean(x²) + eps) · w                 rms_norm, with its roundings and offset
    (x - mean) · rsqrt(var + eps) · w             layer_norm
    x · cos + rotate(x) · sin                     rope, half or interleaved, on a part of the head
    0.5 x (1 + tanh(…)), x sigmoid(x)             gelu, silu: recognised by their values
    linear(x, W) + b                              linear with a bias
    attention over repeated KV heads              attention over the KV heads themselves

Rules go by the arithmetic, never by the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping

from pcg.ir.graph import Graph, Node
from pcg.ir.program.program import ModelGraph
from pcg.passes.naming import readable_names
from pcg.passes.pass_base import ModelPass
from pcg.passes.raising.activations import activation
from pcg.passes.raising.norms import layer_norm, plain_rms_norm, rms_norm
from pcg.passes.raising.rewriter import NewName, Rewriter, orders, rewrite
from pcg.passes.raising.rotary import partial_rope, rope


class RaiseOperators(ModelPass):
    """Write a model in fewer, larger operators, with readable names."""

    name = "raise"

    def run(self, before: ModelGraph) -> ModelGraph:
        prologue = raise_graph(before.prologue)
        shared = dict(zip(before.prologue.outputs, prologue.outputs, strict=True))
        return ModelGraph(
            prologue,
            tuple(raise_graph(block, shared) for block in before.blocks),
            before.layers,
            raise_graph(before.epilogue, shared),
        )


def raise_graph(graph: Graph, inputs: Mapping[str, str] | None = None) -> Graph:
    """A graph of the same function in fewer, larger operators; `inputs` gives inputs new names."""
    graph = rewrite(graph, (_drop_identity, _join_reshapes))
    graph = rewrite(graph, (layer_norm, rms_norm, _linear_bias, rope, activation))
    graph = rewrite(graph, (plain_rms_norm, partial_rope, _drop_identity, _join_reshapes))
    graph = rewrite(graph, (_unrepeat_heads, _drop_identity, _join_reshapes))
    return graph.renamed(readable_names(graph, inputs))


def _drop_identity(rewriter: Rewriter, node: Node) -> NewName | None:
    scalar = node.get("scalar")
    source = rewriter.graph.types[node.inputs[0]] if node.inputs else None
    neutral = (
        (node.op in ("mul", "div") and scalar == 1 and not node.get("reversed"))
        or (node.op == "add" and scalar == 0)
        or (node.op == "concat" and len(node.inputs) == 1)
        or (node.op in ("reshape", "cast", "expand") and node.output.type == source)
    )
    if neutral and node.output.type == source:
        return rewriter.new(node.inputs[0])
    return None


def _join_reshapes(rewriter: Rewriter, node: Node) -> NewName | None:
    if node.op == "reshape" and (inner := rewriter.producer(node.inputs[0], "reshape")):
        return rewriter.add("reshape", inner.inputs[0], scope=node.scope, **dict(node.attributes))
    return None


def _linear_bias(rewriter: Rewriter, node: Node) -> NewName | None:
    if node.op != "add":
        return None
    for product, bias in orders(node):
        linear = rewriter.producer(product, "linear")
        if linear and len(linear.inputs) == 2 and rewriter.is_parameter(bias):
            type_, own = rewriter.graph.types[bias], linear.output.type
            is_bias = type_.shape == own.shape[-1:] and type_.dtype == own.dtype
            if is_bias and rewriter.is_read_once(product):
                return rewriter.add("linear", *linear.inputs, bias, scope=linear.scope)
    return None


def _unrepeat_heads(rewriter: Rewriter, node: Node) -> NewName | None:
    """Attention reads each KV head once, though the model repeats it for heads that share it."""
    if node.op != "attention":
        return None
    k, v = (_before_repeat(rewriter, name) for name in node.inputs[1:3])
    if k is None or v is None:
        return None
    inputs = (node.inputs[0], k, v, *node.inputs[3:])
    names = rewriter.add_many("attention", *inputs, scope=node.scope, **dict(node.attributes))
    rewriter.new_names[node.outputs[1].name] = names[1]
    return names[0]


def _before_repeat(rewriter: Rewriter, name: str) -> str | None:
    """X [T, K, d], where the value is x with each head repeated; through rope, which commutes."""
    node = rewriter.producer(name, "reshape", "rope")
    if node is None:
        return None
    if node.op == "rope":
        x = _before_repeat(rewriter, node.inputs[0])
        rest, attributes = node.inputs[1:], dict(node.attributes)
        return x and rewriter.add("rope", x, *rest, scope="", **attributes)
    expand = rewriter.producer(node.inputs[0], "expand")
    if expand is None or len(expand.output.type.dims) != 4:
        return None
    _, kv_heads, group, size = rewriter.graph.types[expand.inputs[0]].shape
    if group != 1 or node.output.type.shape[-1] != size:
        return None
    return rewriter.add("reshape", expand.inputs[0], shape=(-1, int(kv_heads), int(size)))
