"""Call pieces: cut the layers between a base and a client, and write the client's graphs.

It is `Place` for a program that runs: the client's layers call the base for the pieces of the cut.
The prologue and the epilogue stay as they are, as each of their products is a round trip by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pcg.errors import CostModelError, UnsupportedError
from pcg.ir.graph import Graph
from pcg.passes.differentiate import Differentiated
from pcg.passes.pass_base import Pass
from pcg.passes.placement.client_graphs import client_graphs
from pcg.passes.placement.cut import GraphCut, cut_graph
from pcg.passes.placement.exact_cut import exact_cut
from pcg.passes.placement.split_costs import SplitCosts
from pcg.passes.placement.split_graph import split_problem
from pcg.passes.stages import Gradients


@dataclass(frozen=True)
class LayerCut:
    """The cut of some layers of a program.

    Attributes:
        name: the graph's name.
        trains: True if it is of their forward and backward.
        cut: None where each product is a call.
        reason: why that is so; empty otherwise.
    """

    name: str
    trains: bool
    cut: GraphCut | None
    reason: str = ""


@dataclass(frozen=True)
class CallPieces(Pass[Gradients, Gradients]):
    """Have the client's layers call the base for the pieces of the cheapest cut.

    A graph whose cut cannot be searched or written stays as it is, and each of its products is a
    call.

    Attributes:
        serving: costs of a step that generates.
        training: costs of a step that trains.
        tell: is told of each cut.
    """

    name = "place"
    serving: SplitCosts
    training: SplitCosts
    tell: Callable[[LayerCut], None]

    def run(self, before: Gradients) -> Gradients:
        model = before.serving
        blocks = []
        for index, block in enumerate(model.blocks):
            count = model.layers.count(index)
            blocks.append(self._cut(block.name, count, block, None, self.serving)[0])
        after = dataclasses.replace(
            before, serving=dataclasses.replace(model, blocks=tuple(blocks))
        )
        if after.training is None:
            return after
        kinds = []
        for kind in after.training.kinds:
            pair = kind.gradients
            if pair.backward.outputs:
                found = self._cut(
                    kind.name, len(kind.layers), pair.graph, pair.backward, self.training
                )
            else:
                found = self._cut(kind.name, len(kind.layers), pair.graph, None, self.training)
            kinds.append(dataclasses.replace(kind, gradients=_with(pair, *found)))
        training = dataclasses.replace(after.training, kinds=tuple(kinds))
        return dataclasses.replace(after, training=training)

    def _cut(
        self, name: str, count: int, graph: Graph, backward: Graph | None, costs: SplitCosts
    ) -> tuple[Graph, Graph | None]:
        trains = costs is self.training
        try:
            split = split_problem(graph, backward, costs)
            best = exact_cut(split.problem)
            written = client_graphs(split, best)
            cut = cut_graph(name, count, split, best)
        except (CostModelError, UnsupportedError) as error:
            self.tell(LayerCut(name, trains, None, str(error)))
            return graph, backward
        self.tell(LayerCut(name, trains, cut))
        return written


def _with(pair: Differentiated, graph: Graph, backward: Graph | None) -> Differentiated:
    return dataclasses.replace(
        pair, graph=graph, backward=pair.backward if backward is None else backward
    )
