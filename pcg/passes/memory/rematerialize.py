"""Rematerialize: decide what each layer's forward saves and backward recomputes, and write both.

Of the layers a memory budget decides (`pcg.passes.memory.plan`). The prologue's backward recomputes
all that it reads, which is little; the epilogue's runs behind its forward, and saves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcg.options import MemoryBudget
from pcg.parallel.costs.rank_costs import RankCosts
from pcg.passes.memory.plan import frontiers
from pcg.passes.memory.recompute import loss_and_gradients, prologue_backward
from pcg.passes.pass_base import Pass
from pcg.passes.stages import Gradients, ModelGradients, Trained, TrainedModel


@dataclass(frozen=True)
class Rematerialize(Pass[Gradients, Trained]):
    """Write forwards that save, and backwards that recompute the rest, within a budget.

    Attributes:
        costs: the seconds of a rank's nodes; None to count operations.
    Raises:
        MemoryBudgetError: the least that backward needs is more than the budget.
    """

    name = "rematerialize"
    budget: MemoryBudget
    costs: RankCosts | None = None

    def run(self, before: Gradients) -> Trained:
        training = None if before.training is None else self._trained(before.training)
        return Trained(before.serving, training)

    def _trained(self, given: ModelGradients) -> TrainedModel:
        model = given.model
        budget = self.budget
        step = (budget.batch, budget.seq, self.costs, budget.parts)
        found = frontiers(model, given.kinds, *step)
        prologue, trained = None, tuple[str, ...]()
        if given.prologue is not None:
            carried = model.prologue.outputs[: len(model.blocks[0].outputs)]
            prologue = prologue_backward(given.prologue, carried)
            trained = given.prologue.trained
        return TrainedModel(
            model,
            found,
            found.plan(self.budget),
            prologue,
            trained,
            loss_and_gradients(given.loss),
            given.loss.trained,
            given.loss.graph,
        )
