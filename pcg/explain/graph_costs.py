"""The costs of a compiled model's steps, from its graphs that serve and train."""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.parallel.costs.cost_model import CostModel
from pcg.parallel.costs.step_costs import GraphCosts
from pcg.passes.stages import TrainedModel


def graph_costs(
    model: CostModel,
    degree: int,
    serving: ModelGraph,
    training: TrainedModel | None = None,
    *,
    host_bytes_per_s: float,
) -> GraphCosts:
    """Return the costs of one rank's graphs, of `degree` ranks.

    Args:
        training: the graphs that train, with what the plan recomputes in backward; None for none.
        host_bytes_per_s: bandwidth of copies from the host's memory.
    Raises:
        CostModelError: an operator has no cost.
    """
    if training is None:
        return GraphCosts(model, degree, serving, host_bytes_per_s=host_bytes_per_s)
    plan = training.plan
    layers = [plan.plans[index] for index in plan.layers]
    return GraphCosts(
        model,
        degree,
        serving,
        [layer.backward for layer in layers],
        training.epilogue,
        sum(_trained(layer.backward, layer.trained) for layer in layers),
        host_bytes_per_s=host_bytes_per_s,
    )


def _trained(backward: Graph | None, names: Sequence[str]) -> int:
    """Return how many numbers a layer trains on one rank."""
    if backward is None:
        return 0
    return sum(int(backward.types[name].elements) for name in backward.outputs[-len(names) :])
