"""Place: decide what runs at the base and what at the client, for serving and for training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.options import SplitLink
from pcg.parallel.costs.cost_model import CostModel
from pcg.passes.differentiate import Differentiated
from pcg.passes.pass_base import Pass
from pcg.passes.placement.cut import GraphCut, StepCut, cut_graph
from pcg.passes.placement.split_costs import SplitCosts
from pcg.passes.placement.split_graph import split_problem
from pcg.passes.stage import Named
from pcg.passes.stages import Gradients, ModelGradients

TARGETS = "targets"
"""The input of a loss that the client keeps to itself."""


@dataclass(frozen=True)
class Placed:
    """The cuts of a model's steps.

    Attributes:
        decode: a step of one token of each sequence.
        prefill: a step of whole sequences.
        training: forward and backward of whole sequences; None where nothing is trained.
    """

    decode: StepCut
    prefill: StepCut
    training: StepCut | None

    def check(self) -> None:
        """Check nothing: pieces are not of a model's chain."""

    @property
    def graphs(self) -> Named:
        """The graphs of all pieces, each under its step's name."""
        steps = {"decode": self.decode, "prefill": self.prefill, "training": self.training}
        return {
            f"{name}.{piece.graph.name}": piece.graph
            for name, step in steps.items()
            if step is not None
            for graph in step.graphs
            for piece in graph.pieces
        }


@dataclass(frozen=True)
class Place(Pass[Gradients, Placed]):
    """Cut the graphs between a base and a client.

    It runs behind `prune`: of a forward's values, those that backward reads are to be kept by the
    client, or made again by the base, which keeps nothing.

    Attributes:
        base: the cost model of the base's device.
        client: that of the client's.
        link: the link between them.
        batch: sequences of a step.
        seq: tokens of each.
        privacy: send linear operators alone.
    Raises:
        CostModelError: a device has no cost for an operator.
        UnsupportedError: privacy cannot be kept, or a graph is too wide.
    """

    name = "place"
    base: CostModel
    client: CostModel
    link: SplitLink
    batch: int = 1
    seq: int = 1024
    privacy: bool = False

    def run(self, before: Gradients) -> Placed:
        whole = self.batch * self.seq
        training = None
        if before.training is not None:
            pairs = _trained(before.training)
            training = StepCut(whole, tuple(self._cut(*pair, whole) for pair in pairs))
        serving = _served(before.serving)
        return Placed(
            StepCut(self.batch, tuple(self._cut(*graph, self.batch) for graph in serving)),
            StepCut(whole, tuple(self._cut(*graph, whole) for graph in serving)),
            training,
        )

    def _cut(
        self, name: str, count: int, graph: Graph, backward: Graph | None, tokens: int
    ) -> GraphCut:
        costs = SplitCosts(self.base, self.client, self.link, tokens, self.seq)
        problem = split_problem(
            graph, backward, costs, linear_only=self.privacy, private=(TARGETS,)
        )
        return cut_graph(name, count, problem)


_Counted = tuple[str, int, Graph, Graph | None]


def _served(model: ModelGraph) -> tuple[_Counted, ...]:
    """Return the graphs of a model, each with its name and the number of layers that it is of."""
    blocks = [
        (block.name, model.layers.count(index), block, None)
        for index, block in enumerate(model.blocks)
    ]
    ends = (model.prologue, model.epilogue)
    first, last = ((graph.name, 1, graph, None) for graph in ends)
    return first, *blocks, last


def _trained(model: ModelGradients) -> Iterable[_Counted]:
    """Return the graphs of a step that trains, with their backwards."""

    def pair(name: str, count: int, gradients: Differentiated) -> _Counted:
        return name, count, gradients.graph, gradients.backward

    prologue = model.model.prologue
    if model.prologue is None:
        yield prologue.name, 1, prologue, None
    else:
        yield pair(prologue.name, 1, model.prologue)
    for kind in model.kinds:
        yield pair(kind.name, len(kind.layers), kind.gradients)
    yield pair("loss", 1, model.loss)
