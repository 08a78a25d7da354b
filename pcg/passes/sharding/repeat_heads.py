"""Repeat KV heads, so that each rank has whole ones for its own heads to attend to.

    k: [T, kv, d]  →  repeat_interleave(k, n / kv): [T, n, d],   n = lcm(kv, ranks), or all heads

A KV head serves a run of heads; repeated in place, each copy serves a shorter one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import lcm

from pcg.ir.builder import Builder
from pcg.ir.graph import Graph
from pcg.passes.pass_base import GraphPass


@dataclass(frozen=True)
class RepeatHeads(GraphPass):
    """Give attentions of a layer KV heads that so many ranks divide.

    Attributes:
        degree: number of ranks.
        attentions: names of the attentions of which each rank has heads.
    """

    name = "repeat_heads"
    degree: int
    attentions: tuple[str, ...]

    def run(self, before: Graph) -> Graph:
        builder = Builder(before.name)
        builder.reserved = before.types
        for value in before.inputs:
            builder.input(value.name, value.type)
        for parameter in before.parameters:
            builder.parameter(parameter)
        for node in before.nodes:
            if node.name in self.attentions:
                heads, kv_heads = (before.types[name].features[-2] for name in node.inputs[:2])
                wanted = lcm(kv_heads, self.degree)
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
        return builder.build(before.outputs)
