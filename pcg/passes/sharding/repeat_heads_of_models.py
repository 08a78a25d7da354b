"""Repeat the KV heads of each model where ranks have heads by the base's plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pcg.ir.program.program import ModelGraph
from pcg.parallel.base_plan import partitioned_attentions
from pcg.passes.pass_base import Pass
from pcg.passes.sharding.repeat_heads import RepeatHeads
from pcg.passes.stages import Prepared


@dataclass(frozen=True)
class RepeatHeadsOfModels(Pass[Prepared, Prepared]):
    """Give the attentions of each model KV heads that so many ranks divide.

    Attributes:
        degree: number of ranks.
    """

    name = RepeatHeads.name
    degree: int

    def run(self, before: Prepared) -> Prepared:
        passes = [
            RepeatHeads(self.degree, tuple(sorted(partitioned_attentions(block, layouts))))
            for block, layouts in zip(before.base.blocks, before.layouts, strict=True)
        ]

        def repeated(model: ModelGraph) -> ModelGraph:
            pairs = zip(passes, model.blocks, strict=True)
            return dataclasses.replace(model, blocks=tuple(one.run(block) for one, block in pairs))

        return before.map_models(repeated)
