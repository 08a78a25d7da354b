"""What the training program keeps for backward, and what it needs beside that while it runs.

    kept      = Σ layers storages(kept of the block) + what layers share + what the loss reads
    transient = max over graphs, max over nodes: storages alive there that are not counted elsewhere

Values that are views of one another are kept once. A block's input is the output of the one before
it, so it counts in one of the two. Temporaries within an operator are no values and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import sympy

from pcg.ir.graph import Graph
from pcg.ir.program import ModelGraph, TrainingGraph
from pcg.ir.types import DTYPE_BYTES, TensorType, tensor
from pcg.passes.storages import TOKENS_OF_BATCH, Storages


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that the training program keeps.

    Attributes:
        tensor: its graph and value, as `block_0.q_proj`.
        op: the operator that made it; "input" for what the graph is given.
        type: of the tensor.
        size_bytes: formula in B and S.
        needed_by: operators of the backward graph that read it, with their modules.
        layers: how many of it there are.
        views: kept values that are views of it.
    """

    tensor: str
    op: str
    type: TensorType
    size_bytes: sympy.Expr
    needed_by: tuple[str, ...]
    layers: int
    views: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeptMemory:
    """What the training program keeps for one step.

    Attributes:
        layers: bytes of each layer, formulas in B and S.
        outside: of what layers share and what the loss reads.
        tensors: each kept tensor, those of equal layers once.
    """

    layers: tuple[sympy.Expr, ...]
    outside: sympy.Expr
    tensors: tuple[KeptTensor, ...]

    @property
    def total(self) -> sympy.Expr:
        return sympy.Add(*self.layers, self.outside)


def kept_memory(model: ModelGraph, blocks: Sequence[TrainingGraph]) -> KeptMemory:
    """What the training program keeps.

    Args:
        model: with bypass networks attached.
        blocks: its blocks, differentiated.
    """
    found = [
        _block_tensors(block, training, model.layers.count(index))
        for index, (block, training) in enumerate(zip(model.blocks, blocks, strict=True))
    ]
    keeps_output = [
        _keeps_output(block, training, rows)
        for block, training, rows in zip(model.blocks, blocks, found, strict=True)
    ]
    shared: dict[str, KeptTensor] = {}
    sizes: dict[tuple[int, bool], sympy.Expr] = {}
    layers: list[sympy.Expr] = []
    kept_before = False
    for index in model.layers:
        key = (index, kept_before)
        if key not in sizes:
            block = model.blocks[index]
            names = {f"{block.name}.{value.name}" for value in block.inputs[len(block.outputs) :]}
            for row in found[index]:
                if row.tensor in names:
                    shared.setdefault(row.tensor.partition(".")[2], row)
            skipped = {f"{block.name}.{block.inputs[0].name}"} if kept_before else set()
            own = [row for row in found[index] if row.tensor not in names | skipped]
            sizes[key] = sympy.Add(*(row.size_bytes for row in own))
        layers.append(sizes[key])
        kept_before = keeps_output[index]
    outside = [_shared(name, row) for name, row in shared.items()]
    outside += _read_by_loss(model, skip_first=kept_before)
    block_rows = [
        row
        for block, rows in zip(model.blocks, found, strict=True)
        for row in rows
        if row.tensor not in {f"{block.name}.{name}" for name in shared}
    ]
    total = sympy.Add(*(row.size_bytes for row in outside))
    return KeptMemory(tuple(layers), total, (*block_rows, *outside))


def _keeps_output(block: Graph, training: TrainingGraph, rows: Sequence[KeptTensor]) -> bool:
    """Whether the memory of the first output is kept in the block that makes it."""
    output = Storages.of(training.forward)[block.outputs[0]].name
    return any(row.tensor == f"{block.name}.{output}" for row in rows)


def _block_tensors(block: Graph, training: TrainingGraph, layers: int) -> list[KeptTensor]:
    storages = Storages.of(training.forward)
    names: dict[str, list[str]] = {}
    for name in training.kept:
        storage = storages[name]
        if not storage.is_parameter:
            names.setdefault(storage.name, []).append(name)
    tensors = []
    for name, values in names.items():
        storage = storages[name]
        tensors.append(
            KeptTensor(
                f"{block.name}.{name}",
                storage.op,
                storage.type,
                storage.size_bytes(TOKENS_OF_BATCH),
                _readers(training.backward, values),
                layers,
                tuple(value for value in values if value != name),
            )
        )
    return tensors


def _readers(backward: Graph, names: Iterable[str]) -> tuple[str, ...]:
    nodes = [node for name in names for node in backward.consumers.get(name, ())]
    texts = [f"{node.op} ({node.scope})" if node.scope else node.op for node in nodes]
    return tuple(dict.fromkeys(texts))


def _shared(name: str, row: KeptTensor) -> KeptTensor:
    return KeptTensor(
        f"prologue.{name}", row.op, row.type, row.size_bytes, row.needed_by, 1, row.views
    )


def _read_by_loss(model: ModelGraph, *, skip_first: bool) -> list[KeptTensor]:
    """The last layer's outputs, until the loss has read them, and the targets."""
    carried = model.epilogue.inputs[: len(model.blocks[0].outputs)]
    values = [(v.name, v.type, "input") for v in carried[int(skip_first) :]]
    values.append(("targets", tensor("i64", *model.prologue.inputs[0].type.shape), "input"))
    return [
        KeptTensor(
            f"epilogue.{name}",
            op,
            type_,
            prod(type_.features) * DTYPE_BYTES[type_.dtype] * TOKENS_OF_BATCH,
            ("cross_entropy",),
            1,
        )
        for name, type_, op in values
    ]


# ------------------------------------------------------------------------------------ transients


@dataclass(frozen=True)
class Transient:
    """The most that one graph needs at once, beside what is counted elsewhere.

    bytes = per_token · tokens + fixed
    """

    graph: str
    per_token: int
    fixed: int

    def size_bytes(self, tokens: int) -> int:
        return self.per_token * tokens + self.fixed

    def formula(self, tokens: sympy.Expr) -> sympy.Expr:
        return self.per_token * tokens + self.fixed


def training_transients(
    model: ModelGraph, blocks: Sequence[TrainingGraph], tokens: int
) -> list[Transient]:
    """Of each block's forward and backward, at so many tokens."""
    found = []
    for block, training in zip(model.blocks, blocks, strict=True):
        storages = Storages.of(training.forward)
        kept = {storages[name].name for name in training.kept}
        found.append(transient(training.forward, tokens, kept))
        gradients = training.backward.outputs[len(block.outputs) :]
        found.append(transient(training.backward, tokens, {*training.kept, *gradients}))
    return found


def transient(graph: Graph, tokens: int, counted: Iterable[str] = ()) -> Transient:
    """The most bytes alive at one node of a graph.

    Args:
        graph: parameters are not counted.
        tokens: at which the nodes are compared.
        counted: values whose memory is counted elsewhere.
    """
    storages = Storages.of(graph)
    elsewhere = {storages[name].name for name in counted if name in graph.types}
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for name in (*node.inputs, *(value.name for value in node.outputs)):
            last[storages[name].name] = index
    last.update((storages[name].name, len(graph.nodes)) for name in graph.outputs)
    alive = {value.name for value in graph.inputs if value.name in last} - elsewhere
    sizes = _sizes(storages, {*last})
    best = Transient(graph.name, 0, 0)
    for index, node in enumerate(graph.nodes):
        made = {storages[value.name].name for value in node.outputs}
        alive |= {name for name in made if not storages[name].is_parameter} - elsewhere
        now = Transient(
            graph.name,
            sum(sizes[name][0] for name in alive),
            sum(sizes[name][1] for name in alive),
        )
        if now.size_bytes(tokens) > best.size_bytes(tokens):
            best = now
        alive = {name for name in alive if last[name] > index}
    return best


def _sizes(storages: Storages, names: Iterable[str]) -> Mapping[str, tuple[int, int]]:
    """Bytes a token, and bytes whatever the tokens, of each storage."""
    sizes = {}
    for name in names:
        type_ = storages[name].type
        size = prod(type_.features) * DTYPE_BYTES[type_.dtype]
        sizes[name] = (size, 0) if type_.is_token_wise else (0, size)
    return sizes
