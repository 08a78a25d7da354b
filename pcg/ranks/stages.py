"""Pipeline stages: the layers cut into runs, one for each group of ranks.

    prologue · layers 0 … a-1 | layers a … b-1 | layers b … n-1 · epilogue

Of all cuts the one whose slowest stage has the fewest operations is taken, as the others wait for
it, and of those the one whose largest stage has the fewest bytes of weights. Operations are those
of matrix products and attention for each token of a sequence of `TOKENS`; the first stage holds the
embeddings, and the last one the head, which are two copies where they are tied.

    longest(k, j) = min over i of max(longest(k - 1, i), cost(layers i … j-1))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pcg.errors import ParallelError
from pcg.ir.analysis.dataflow import graph_flops
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph

TOKENS = 1024
"""The tokens of the sequence for which a stage's operations are counted."""
_ABSENT = Graph("absent", (), (), (), ())


@dataclass(frozen=True)
class Stage:
    """One of the stages.

    Attributes:
        index: its place, from 0.
        count: the number of stages.
        layers: its layers.
    """

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def own(self, model: ModelGraph) -> ModelGraph:
        """Return a model whose graphs are empty where they are other stages'."""
        if self.count == 1:
            return model
        absent = len(model.blocks)
        layers = tuple(b if i in self.layers else absent for i, b in enumerate(model.layers))
        return ModelGraph(
            model.prologue if self.is_first else _ABSENT,
            (*model.blocks, _ABSENT),
            layers,
            model.epilogue if self.is_last else _ABSENT,
        )


@dataclass(frozen=True)
class Stages:
    """All stages of a model, by the first layer of each and the end of the last one."""

    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Stage:
        return Stage(index, self.count, range(*self.bounds[index : index + 2]))

    def __str__(self) -> str:
        return ", ".join(f"{a}-{b - 1}" for a, b in pairwise(self.bounds))


def cut_stages(model: ModelGraph, count: int) -> Stages:
    """Cut a model into so many stages.

    Raises:
        ParallelError: it has fewer layers.
    """
    layers = len(model.layers)
    if not 1 <= count <= layers:
        raise ParallelError(
            f"pp={count} stages need a layer each, and the model has {layers}; use pp of at most "
            f"{layers}"
        )
    if count == 1:
        return Stages((0, layers))
    blocks = [_cost(block) for block in model.blocks]
    costs = [blocks[block] for block in model.layers]
    costs[0] = _sum([costs[0], _cost(model.prologue)])
    costs[-1] = _sum([costs[-1], _cost(model.epilogue)])
    # By the number of layers that are dealt: the worst stage's cost, and the bounds.
    best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), (0,))}
    for stage in range(1, count + 1):
        left = count - stage
        best = {
            stop: min(
                (_worst(worst, _sum(costs[first:stop])), (*bounds, stop))
                for first, (worst, bounds) in best.items()
                if first < stop
            )
            for stop in range(stage, layers - left + 1)
        }
    return Stages(best[layers][1])


def _cost(graph: Graph) -> tuple[int, int]:
    """Return the operations for a sequence's tokens, and the bytes of weights."""
    frozen = [one.type for one in graph.parameters if one.role == "frozen"]
    return graph_flops(graph, TOKENS, TOKENS), sum(int(type_.size_bytes) for type_ in frozen)


def _sum(costs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    flops, size_bytes = zip(*costs, strict=True)
    return sum(flops), sum(size_bytes)


def _worst(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), max(a[1], b[1])
