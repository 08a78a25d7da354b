"""Latents in the KV cache, in place of the keys and values that are products of them.

    p = W c (+ LoRA);  k, v = parts of p's heads;  k = [k; r]
    attention(q, k, v)                          latent_attention(q, c, r, W, A, B)
    window_attention_backward(dout, out, …)     latent_window_backward(dout, out, …, W, A, B)

Serving programs never multiply W by c for a token that is decoded. In windows of finetuning, the
products' own gradients stay, as dk and dv are those of a window's tokens. Programs that finetune
whole sequences have no cache, and stay unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph, Node
from pcg.ir.program.program import ModelGraph
from pcg.passes.graphs.differentiate import Differentiated, GradientPass
from pcg.passes.graphs.pass_base import ModelPass


class Latents(NamedTuple):
    """The latents of an attention, and the weights of their products.

    Attributes:
        node: the attention.
        latents: c, [T, n].
        rest: the common part r of the keys, [T, 1, d_r].
        weights: W, and A and B of its LoRA if any.
    """

    node: Node
    latents: str
    rest: str
    weights: tuple[str, ...]

    @property
    def attention(self) -> Node:
        """The attention that reads them."""
        inputs = (self.node.inputs[0], self.latents, self.rest, *self.weights)
        return dataclasses.replace(
            self.node,
            op="latent_attention",
            inputs=inputs,
            attributes=(
                ("scale", self.node.attribute("scale")),
                ("value_size", int(self.node.output.type.shape[-1])),
            ),
        )


class CacheLatents(ModelPass):
    """Let the attention of a model's layers read latents.

    Raises:
        UnsupportedError: no layer has latents, or an adapter changes keys and values otherwise
            than LoRA does.
    """

    name = "cache_latents"

    def run(self, before: ModelGraph) -> ModelGraph:
        if not any(latents_of(block) for block in before.blocks):
            raise UnsupportedError(
                "latent_cache=True, and no layer's keys and values are products of a latent; leave "
                "it out"
            )
        return before.map(_with_latents)


def _with_latents(graph: Graph) -> Graph:
    by_node = {each.node.name: each for each in latents_of(graph)}
    if not by_node:
        return graph
    nodes = tuple(by_node[n.name].attention if n.name in by_node else n for n in graph.nodes)
    return graph.replace(nodes=nodes).without_dead_code()


class CacheWindowLatents(GradientPass):
    """Let a layer's attention and its backward over windows read latents in the cache."""

    name = CacheLatents.name

    def run(self, before: Differentiated) -> Differentiated:
        backward = before.backward
        parameters = dict(backward.parameters_by_name)
        nodes = list(backward.nodes)
        every = latents_of(before.graph)
        for latents in every:
            for place, node in enumerate(nodes):
                if node.op == "window_attention_backward" and node.inputs[1] == latents.node.name:
                    nodes[place] = dataclasses.replace(
                        node,
                        op="latent_window_backward",
                        inputs=(*node.inputs, *latents.weights),
                        attributes=(
                            ("rest", int(before.graph.types[latents.rest].shape[-1])),
                            ("scale", node.attribute("scale")),
                        ),
                    )
                    known = before.graph.parameters_by_name
                    parameters |= {name: known[name] for name in latents.weights}
        if not every:
            return before
        graph = before.graph
        forward = _with_latents(graph.replace(outputs=(*graph.outputs, *before.needed)))
        return dataclasses.replace(
            before,
            graph=forward.replace(outputs=graph.outputs, parameters=graph.parameters),
            backward=backward.replace(nodes=tuple(nodes), parameters=tuple(parameters.values())),
        )


def latents_of(graph: Graph) -> list[Latents]:
    """Return the latents of each attention that has any."""
    return [
        latents
        for node in graph.nodes
        if node.op == "attention" and (latents := _latents(graph, node)) is not None
    ]


def _latents(graph: Graph, node: Node) -> Latents | None:
    is_prefixed = _op(graph, node.inputs[1]) == "virtual_tokens"
    key, value = (_inputs(graph, name)[0] if is_prefixed else name for name in node.inputs[1:3])
    key_parts = _inputs(graph, key) if _op(graph, key) == "concat" else ()
    if len(key_parts) != 2 or [_op(graph, part) for part in key_parts] != ["slice", "expand"]:
        return None
    (heads,), (rest,) = (_inputs(graph, part) for part in key_parts)
    if _op(graph, value) != "slice" or _inputs(graph, value) != (heads,):
        return None
    if not _is_split(graph, key_parts[0], value) or graph.types[rest].features[0] != 1:
        return None
    if _op(graph, heads) != "reshape":
        return None
    (product,) = _inputs(graph, heads)
    lora: tuple[str, ...] = ()
    linear = graph.producers[product]
    if linear.op == "expand_add":
        base, low, b = linear.inputs
        linear, shrink = graph.producers[base], graph.producers[low]
        lora = (shrink.inputs[1], b)
        if shrink.op != "shrink" or shrink.inputs[0] != linear.inputs[0]:
            raise _refusal(node)
    if is_prefixed or linear.op != "linear":
        raise _refusal(node)
    if len(linear.inputs) != 2:
        return None
    return Latents(node, linear.inputs[0], rest, (linear.inputs[1], *lora))


def _is_split(graph: Graph, first: str, second: str) -> bool:
    """Return whether two slices are the first and the other entries of the last dim."""
    stops = [graph.producers[name].get("stop") for name in (first, second)]
    starts = [graph.producers[name].get("start") for name in (first, second)]
    size = graph.types[_inputs(graph, first)[0]].features[-1]
    return starts == [0, stops[0]] and stops[1] == size


def _op(graph: Graph, name: str) -> str:
    node = graph.producers.get(name)
    return "" if node is None else node.op


def _inputs(graph: Graph, name: str) -> Sequence[str]:
    return graph.producers[name].inputs


def _refusal(node: Node) -> UnsupportedError:
    return UnsupportedError(
        f"an adapter changes the keys and values of {node.scope or node.name} otherwise than LoRA "
        "does, with A whole on each rank and without dropout, and latent_cache=True caches what "
        "they are products of; leave the module that expands latents, such as kv_b_proj, out of "
        "its targets, or compile with latent_cache=False"
    )
