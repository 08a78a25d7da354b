"""Repeat KV heads, so that each rank has whole ones for its own heads to attend to.

    k: [T, kv, d]  →  repeat_interleave(k, n / kv): [T, n, d],   n = lcm(kv, ranks), or all heads

A KV head serves a run of heads; repeated in place, each copy serves a shorter one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from math import lcm

from pcg.ir.builder import Builder
from pcg.ir.graph import Graph


def repeat_heads(graph: Graph, degree: int, attentions: Collection[str]) -> Graph:
    """The graph whose attentions have KV heads that so many ranks divide.

    Args:
        graph: of a layer.
        degree: number of ranks.
        attentions: names of those of which each rank has heads.
    """
    builder = Builder(graph.name)
    builder.reserved = graph.types
    for value in graph.inputs:
        builder.input(value.name, value.type)
    for parameter in graph.parameters:
        builder.parameter(parameter)
    for node in graph.nodes:
        if node.name in attentions:
            heads, kv_heads = (graph.types[name].features[-2] for name in node.inputs[:2])
            wanted = lcm(kv_heads, degree)
            wanted = wanted if heads % wanted == 0 else heads
            if wanted != kv_heads:
                # Named after the attention, as a bypass network may stand before them.
                repeated = [
                    builder.add(
                        "repeat_interleave",
                        [name],
                        name=f"{node.name}_{kind}_repeated",
                        scope=node.scope,
                        dim=-2,
                        repeats=wanted // kv_heads,
                    )
                    for name, kind in zip(node.inputs[1:3], ("keys", "values"), strict=True)
                ]
                inputs = (node.inputs[0], *repeated, *node.inputs[3:])
                node = dataclasses.replace(node, inputs=inputs)
        builder.append(node)
    return builder.build(graph.outputs)
