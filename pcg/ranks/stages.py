"""Pipeline stages: the layers cut into runs, a run for each group of ranks, and their messages.

    prologue · layers 0 … a-1 | layers a … b-1 | layers b … n-1 · epilogue

The cut taken has the fewest operations in its slowest stage, as the others wait for it, and among
equal cuts the fewest bytes of weights in its largest stage. Operations are those
of matrix products and attention for each token of a sequence of `TOKENS`; the first stage holds the
embeddings, and the last stage the head, which are two copies where they are tied.

    longest(k, j) = min over i of max(longest(k - 1, i), cost(layers i … j-1))

A stage sends its last layer's outputs, and the prologue's outputs that later stages read, such as
the rotations of positions, in a single message; gradients return. Each rank sends to the rank at
its place of the next stage, so that a shard goes where it is read. A message stays in memory until
it has arrived, while this rank continues. Where a stage sends to the stage that it receives from
next, as micro-batches do, both are a single exchange.

    message = the tensors in a row, each from a multiple of 16 bytes on
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from pcg.errors import ParallelError
from pcg.ir.analysis.dataflow import graph_flops
from pcg.ir.graph import Graph
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TORCH_NAMES, TensorType, tokens_at
from pcg.ranks.group import PendingCollective, padded
from pcg.ranks.mesh import RankMesh

TOKENS = 1024
"""The tokens of the sequence for which a stage's operations are counted."""
_ABSENT = Graph("absent", (), (), (), ())


@dataclass(frozen=True)
class Stage:
    """A pipeline stage.

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
        """Return the model with empty graphs for those of other stages."""
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
    """All stages of a model, by the first layer of each and the end of the last stage."""

    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Stage:
        return Stage(index, self.count, range(*self.bounds[index : index + 2]))

    def __str__(self) -> str:
        return ", ".join(f"{a}-{b - 1}" for a, b in pairwise(self.bounds))


def cut_stages(model: ModelGraph, count: int) -> Stages:
    """Cut a model into `count` stages. ParallelError: it has fewer layers."""
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
    frozen = [parameter.type for parameter in graph.parameters if parameter.role == "frozen"]
    return graph_flops(graph, TOKENS, TOKENS), sum(int(type_.size_bytes) for type_ in frozen)


def _sum(costs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    flops, size_bytes = zip(*costs, strict=True)
    return sum(flops), sum(size_bytes)


def _worst(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), max(a[1], b[1])


UNDER_WAY = 2
"""Messages of one direction that may be under way before the first of them is waited for: as a
stage that is ahead of the next one by more has nothing to do anyway, none waits for another in
circles."""
PARTS_PER_STAGE = 2
"""Parts of a step that serves, for each stage, if it has so many tokens."""
LEAST_TOKENS = 256
"""The fewest tokens of such a part; benchmarks/parallel.py compares it with whole steps."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StageLink:
    """The messages of a rank of a stage to and from the neighbouring stages.

    Attributes:
        exchanges: True if the next stage to send to is the stage to receive from then, which sets
            it likewise; a message to send waits for that.
    """

    def __init__(
        self, model: ModelGraph, stages: Stages, mesh: RankMesh, device: torch.device
    ) -> None:
        """Make the link of this rank's stage of a model, with the graphs that a rank runs."""
        self.exchanges = False
        self.stages = stages
        self.stage: Stage = stages[mesh.stage]
        self._mesh = mesh
        self._device = device
        self._vocabulary = model.vocabulary
        self._outputs = len(model.prologue.outputs)
        self._places = _sent(model)
        self._carried = [model.epilogue.inputs[place].type for place in self._places]
        self._shared = [_shared_from(model, stages[i].layers.start) for i in range(stages.count)]
        self._types = model.prologue.types
        self._names = model.prologue.outputs
        self._under_way: dict[int, deque[tuple[Tensor, PendingCollective]]] = defaultdict(deque)
        self._held: tuple[int, Tensor] | None = None

    @classmethod
    def of(
        cls, model: ModelGraph, stages: Stages, mesh: RankMesh, device: torch.device
    ) -> StageLink | None:
        """Return the link of this rank's stage; None if it has all layers."""
        return None if stages.count == 1 else cls(model, stages, mesh, device)

    def parts_of(self, tokens: int) -> int:
        """Return the number of consecutive parts that a serving step is cut into.

        Few tokens take as long as the weights take to be read, so that these are not cut.
        """
        return max(1, min(PARTS_PER_STAGE * self.stage.count, tokens // LEAST_TOKENS))

    def receive(self, tokens: int) -> list[Tensor | None]:
        """Return the outputs of the prologue for `tokens` tokens, with those of the stage before.

        The first ones are the inputs of the stage's first layer, but for LoRA's summands, which do
        not exist between stages. Those are None, and so are outputs that no graph from this stage
        on reads.
        """
        places = self._shared[self.stage.index]
        types = [*self._carried, *(self._types[self._names[place]] for place in places)]
        came = self._received(self.stage.index - 1, types, tokens)
        outputs: list[Tensor | None] = [None] * self._outputs
        for place, tensor in zip((*self._places, *places), came, strict=True):
            outputs[place] = tensor
        return outputs

    def send(self, carried: Sequence[Any], shared: Sequence[Tensor | None]) -> None:
        """Send the outputs of this stage's last layer, and the prologue's for later stages."""
        places = self._shared[self.stage.index + 1]
        sent = [carried[place] for place in self._places]
        tensors = [*sent, *(output for place in places if (output := shared[place]) is not None)]
        self._send(self.stage.index + 1, tensors)

    def receive_back(self, tokens: int) -> list[Tensor]:
        """Return the gradients of the outputs of this stage's last layer."""
        return self._received(self.stage.index + 1, self._carried, tokens)

    def send_back(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of the inputs of this stage's first layer to the stage before."""
        self._send(self.stage.index - 1, gradients)

    def settle(self) -> None:
        """Wait until all sent messages have arrived."""
        self._send_held()
        for sent in self._under_way.values():
            while sent:
                sent.popleft()[1]()

    def meet(self) -> None:
        """Wait until all stages have finished their earlier work."""
        self._mesh.pp.all_reduce(torch.zeros(1, device=self._device)).item()

    def told(self, number: int) -> int:
        """Return the last stage's number."""
        return int(self._mesh.pp.broadcast(torch.tensor([number], device=self._device)))

    def tell_end(self, result: Tensor, on_first: bool) -> Tensor:
        """Send the epilogue's result, [rows, …], to all stages unless the first rank wants it."""
        if not on_first:
            kind = [*result.shape, _DTYPES.index(result.dtype)]
            self._mesh.pp.broadcast(torch.tensor(kind, device=self._device))
            self._mesh.pp.broadcast(result.contiguous())
        return result

    def ended(self, rows: int, on_first: bool) -> Tensor:
        """Return the epilogue's result of the last stage; zeros if only the first rank has it."""
        if on_first:
            return torch.zeros((1, 1), device=self._device).expand(rows, self._vocabulary)
        kind = torch.zeros(3, dtype=torch.int64, device=self._device)
        *shape, dtype = self._mesh.pp.broadcast(kind).tolist()
        result = torch.empty(shape, dtype=_DTYPES[dtype], device=self._device)
        return self._mesh.pp.broadcast(result)

    def _send(self, stage: int, tensors: Sequence[Tensor]) -> None:
        sizes = [padded(tensor.nbytes) for tensor in tensors]
        message = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._device)
        for part, tensor in zip(message.split(sizes), tensors, strict=True):
            part[: tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        self._send_held()
        self._held = stage, message
        if not self.exchanges:
            self._send_held()

    def _send_held(self) -> None:
        if self._held is None:
            return
        (stage, message), self._held = self._held, None
        sent = self._under_way[stage]
        while len(sent) >= UNDER_WAY:
            sent.popleft()[1]()
        sent.append((message, self._mesh.pp.begin_send(message, self._rank_of(stage))))

    def _rank_of(self, stage: int) -> int:
        return self.stage.count - 1 - stage

    def _received(self, stage: int, types: Sequence[TensorType], tokens: int) -> list[Tensor]:
        shapes = [_shape(type_, tokens) for type_ in types]
        dtypes = [getattr(torch, TORCH_NAMES[type_.dtype]) for type_ in types]
        wanted = [prod(s) * dtype.itemsize for s, dtype in zip(shapes, dtypes, strict=True)]
        sizes = [padded(size) for size in wanted]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        if self._held is not None and self._held[0] == stage:
            (_, sent), self._held = self._held, None
            self._mesh.pp.exchange(sent, message, self._rank_of(stage))
        else:
            self._send_held()
            self._mesh.pp.receive(message, self._rank_of(stage))
        parts = zip(message.split(sizes), wanted, shapes, dtypes, strict=True)
        # Each has its own memory, as some of them are kept longer than others.
        return [part[:size].clone().view(dtype).view(shape) for part, size, shape, dtype in parts]


def link_bytes(model: ModelGraph, stages: Stages, stage: int, tokens: int) -> tuple[int, int]:
    """Return the bytes that a rank sends to a stage for some tokens, and gets back from it."""
    carried = [model.epilogue.inputs[place].type for place in _sent(model)]
    names = model.prologue.outputs
    places = _shared_from(model, stages[stage].layers.start)
    shared = [model.prologue.types[names[place]] for place in places]
    sizes = [
        padded(prod(_shape(type_, tokens)) * getattr(torch, TORCH_NAMES[type_.dtype]).itemsize)
        for type_ in (*carried, *shared)
    ]
    return sum(sizes), sum(sizes[: len(carried)])


def _carried(model: ModelGraph) -> int:
    return len(model.blocks[0].outputs)


def deferred_places(model: ModelGraph) -> list[int]:
    """Return the places of LoRA's summands among the outputs of a layer."""
    operators = {node.outputs[0].name: node.op for node in model.prologue.nodes if node.outputs}
    first = model.prologue.outputs[: _carried(model)]
    return [place for place, name in enumerate(first) if operators.get(name) == "nothing_deferred"]


def _sent(model: ModelGraph) -> list[int]:
    """Return the places of a layer's sent outputs."""
    deferred = deferred_places(model)
    return [place for place in range(_carried(model)) if place not in deferred]


def _shared_from(model: ModelGraph, layer: int) -> list[int]:
    """Return the places of the prologue's outputs that graphs from a layer on read."""
    blocks = {model.layers[i] for i in range(layer, len(model.layers))}
    graphs = [*(model.blocks[block] for block in sorted(blocks)), model.epilogue]
    names = {value.name for graph in graphs for value in graph.inputs[_carried(model) :]}
    return [place for place, name in enumerate(model.prologue.outputs) if name in names]


def _shape(type_: TensorType, tokens: int) -> tuple[int, ...]:
    first, *rest = type_.shape
    return (int(tokens_at(first, tokens)), *map(int, rest))
