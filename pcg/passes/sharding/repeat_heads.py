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
from pcg.ir.program.program import ModelGraph
from pcg.parallel.base_plan import partitioned_attentions
from pcg.passes.pass_base import GraphPass, Pass
from pcg.passes.stages import Prepared


@dataclass(frozen=True)
class RepeatHeads(GraphPass):
    """Give attentions of a layer KV heads that so many ranks divide.

    `attentions` names those of which each rank has heads.
    """

    name = "repeat_heads"
    degree: int
    attentions: tuple[str, ...]

    def run(self, before: Graph) -> Graph:
        builder = Builder.extending(before.replace(nodes=()))
        builder.reserved = before.types
        for node in before.nodes:
            if node.name in self.attentions:
                heads, kv_heads = (before.types[name].features[-2] for name in node.inputs[:2])
                wanted = lcm(kv_heads, self.degree)
                wanted = wanted if heads % wanted == 0 else heads
                if wanted != kv_heads:
                    # Named after the attention, as a bypass network may stand before them.
                    inputs = list(node.inputs)
                    for place, kind in ((1, "keys"), (2, "values")):
                        inputs[place] = builder.add(
                            "repeat_interleave",
                            [inputs[place]],
                            name=f"{node.name}_{kind}_repeated",
                            scope=node.scope,
                            dim=-2,
                            repeats=wanted // kv_heads,
                        )
                    node = dataclasses.replace(node, inputs=tuple(inputs))
            builder.append(node)
        return builder.build(before.outputs)


@dataclass(frozen=True)
class RepeatHeadsOfModels(Pass[Prepared, Prepared]):
    """Give the attentions of which ranks have heads by the base's plan KV heads, in each model."""

    name = RepeatHeads.name
    degree: int

    def run(self, before: Prepared) -> Prepared:
        passes = [
            RepeatHeads(self.degree, tuple(sorted(partitioned_attentions(block, layouts))))
            for block, layouts in zip(before.base.blocks, before.layouts, strict=True)
        ]

        def repeated(model: ModelGraph) -> ModelGraph:
            pairs = zip(before.base_blocks(model), model.blocks, strict=True)
            blocks = tuple(passes[place].run(block) for place, block in pairs)
            return dataclasses.replace(model, blocks=blocks)

        return before.map_models(repeated)
