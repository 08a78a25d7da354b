"""Plan the base over ranks: the layouts of its weights, which do not depend on adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pcg.parallel.base_plan import base_plan
from pcg.passes.pass_base import Pass
from pcg.passes.stages import Attached, Prepared


@dataclass(frozen=True)
class PlanBase(Pass[Attached, Prepared]):
    """Choose the layouts of the base's weights, from each layer's own graph or as the user says.

    Attributes:
        degree: number of ranks.
        styles: the user's plan, a style by module path; empty to read Megatron's off the graph.
    Raises:
        ParallelError: the degree divides neither heads nor products; those that do are named.
    """

    name = "plan_base"
    degree: int
    styles: Mapping[str, str] = field(default_factory=dict)

    def run(self, before: Attached) -> Prepared:
        layouts = tuple(base_plan(block, self.degree, self.styles) for block in before.base.blocks)
        return Prepared(before.base, before.serving, before.training, layouts)
