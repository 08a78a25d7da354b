"""The memory of a finetuning step by kind, and moment by moment: formulas in B and S.

    total = weights + adapters + gradients + optimizer + KV cache + activations + workspace

What each counts is said in `pcg.explain.report.Report`. Activations are what is kept for backward;
the workspace is what the fullest moment of the step needs beside them (`pcg.explain.timeline`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import sympy

from pcg.explain.adapter_use import AdapterUse
from pcg.explain.report_data import KINDS, Moment
from pcg.explain.timeline import MomentSizes, timeline
from pcg.ir.analysis.saved_memory import SavedMemory, saved_memory, transient
from pcg.ir.analysis.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.ir.analysis.trainable import trained
from pcg.ir.graph import Graph
from pcg.ir.layouts import layout_of
from pcg.ir.program.program import ModelGraph
from pcg.ir.shapes import Shapes, elements
from pcg.ir.types import CONTEXT, DTYPE_BYTES, TOKENS
from pcg.options import MemoryBudget
from pcg.passes.layer_kind import LayerKind
from pcg.passes.memory.plan import Frontiers, MemoryPlan
from pcg.passes.stages import Sharded
from pcg.peft.recipe import Recipe
from pcg.runtime.training.torch_optimizers import Optimizer

LOSS_CHUNK_BYTES = 16 * 2**20
"""Logits in fp32 of one chunk of the loss; `pcg.runtime.training.runner.CHUNK_BYTES`."""


@dataclass(frozen=True)
class Setup:
    """What a report is about.

    Attributes:
        model: its name.
        config: its config.json.
        recipes: of the adapters, by name.
        budget: what is kept for backward, and the batch of a step.
        tp: tensor-parallel degree.
        optimizer: that updates the adapters.
    """

    model: str
    config: Mapping[str, Any]
    recipes: Mapping[str, Recipe]
    budget: MemoryBudget
    tp: int = 1
    optimizer: Optimizer = field(default_factory=Optimizer.default)

    @property
    def batch(self) -> int:
        return self.budget.batch

    @property
    def seq(self) -> int:
        return self.budget.seq

    @property
    def at(self) -> dict[sympy.Symbol, int]:
        """What the symbols of formulas stand for."""
        return {SEQUENCES: self.batch, CONTEXT: self.seq}


@dataclass(frozen=True)
class PlannedModel:
    """What is accounted for.

    Attributes:
        unraised: the folded model, one node an ATen operator.
        whole: the same, raised.
        base: of that, what one rank has.
        training: of one rank, with bypass networks attached; None without adapters.
        kinds: its layers, differentiated; empty where pcg cannot train the model.
        frontiers: what they can keep, compressed; None likewise.
        plan: what they keep; None likewise.
        epilogue: the loss, forward and backward in one graph; None likewise.
        use: what the recipes train.
        adapter_dtype: of the adapters' parameters.
        attention: as `pcg.trace.TracedModel.attention`.
        refusal: why pcg cannot train the model; empty where it can.
        sharded: the model over ranks; None for one rank.
        windowed: the plan of sequences that come window by window, through the KV cache; None where
            it was not asked for.
    """

    unraised: ModelGraph
    whole: ModelGraph
    base: ModelGraph
    training: ModelGraph | None
    kinds: Sequence[LayerKind]
    frontiers: Frontiers | None
    plan: MemoryPlan | None
    epilogue: Graph | None
    use: AdapterUse
    adapter_dtype: str
    attention: str
    refusal: str = ""
    sharded: Sharded | None = None
    windowed: MemoryPlan | None = None


def memory_bytes(planned: PlannedModel, setup: Setup) -> dict[str, int]:
    """The kinds of memory and their total; activations are pcg's, or none where it cannot train."""
    kept = None
    if planned.training is not None and planned.plan is not None:
        kept = saved_memory(planned.training, planned.plan)
    activations = kept.total if kept is not None else sympy.Integer(0)
    formulas, _ = step_memory(planned, setup, kept, activations)
    return {kind: bytes_at(formula, setup.at) for kind, formula in formulas.items()}


def step_formulas(planned: PlannedModel, setup: Setup) -> dict[str, sympy.Expr]:
    """The formula of each kind of memory and of their total, as pcg trains with a plan."""
    assert planned.training is not None
    assert planned.plan is not None
    kept = saved_memory(planned.training, planned.plan)
    formulas, _ = step_memory(planned, setup, kept, kept.total)
    return formulas


def peak_moment(planned: PlannedModel, setup: Setup) -> str:
    """The moment of the step that the workspace is of, as pcg trains with a plan."""
    assert planned.training is not None
    assert planned.plan is not None
    kept = saved_memory(planned.training, planned.plan)
    _, moments = step_memory(planned, setup, kept, kept.total)
    return max(moments, key=lambda moment: moment.kept_bytes + moment.workspace_bytes).label


def storage_key(planned: PlannedModel) -> Hashable:
    """Equal at degrees at which ranks keep the same tensors, and hold all in the same layouts."""
    assert planned.plan is not None
    assert planned.sharded is not None
    layouts = tuple(
        (name, layout_of(type_))
        for graph in planned.sharded.typed.graphs
        for name, type_ in graph.types.items()
    )
    saved = tuple(choice.saved for choice in planned.plan.choices)
    return layouts, saved, planned.plan.layers, planned.plan.restored


def step_memory(
    planned: PlannedModel, setup: Setup, kept: SavedMemory | None, activations: sympy.Expr
) -> tuple[dict[str, sympy.Expr], list[Moment]]:
    """The formula of each kind of memory and of their total, and the moments of the step."""
    moments: list[Moment] = []
    if kept is None:
        workspace = _serving_workspace(planned.training or planned.base, setup)
    else:
        sizes = _moments(planned, setup, kept)
        moments = [_moment(one, setup.at) for one in sizes]
        totals = [moment.kept_bytes + moment.workspace_bytes for moment in moments]
        fullest = sizes[totals.index(max(totals))]
        workspace = fullest.saved + fullest.workspace - activations
    _, weights = base_weights(planned.base)
    trained, size = _trained_shapes(planned, setup), DTYPE_BYTES[planned.adapter_dtype]
    adapters = sympy.Integer(size * elements(trained))
    kinds = (
        sympy.Integer(weights),
        adapters,
        adapters,
        sympy.Integer(setup.optimizer.state_bytes(trained, size)),
        _kv_cache(planned.base) * TOKENS_OF_BATCH,
        activations,
        workspace,
    )
    formulas = dict(zip(KINDS, kinds, strict=True))
    return formulas | {"total": sympy.Add(*kinds)}, moments


def _trained_shapes(planned: PlannedModel, setup: Setup) -> Shapes:
    """Of the trained tensors that one rank has."""
    if setup.tp == 1 or planned.training is None:
        return planned.use.trained
    names = {name for graph in planned.training.graphs for name in trained(graph)}
    found = {
        (parameter.source, parameter.rows, layer): parameter.type.features
        for parameter, layer in planned.training.parameters()
        if parameter.name in names
    }
    return tuple(found.values())


def base_weights(model: ModelGraph) -> tuple[int, int]:
    """Number and bytes of the base's parameters, a tied one once."""
    counts: dict[str, tuple[int, int]] = {}
    for index, graph in enumerate((*model.blocks, model.prologue, model.epilogue)):
        layers = model.layers.count(index) if index < len(model.blocks) else 1
        for parameter in graph.parameters:
            if parameter.role == "frozen":
                elements = prod(parameter.type.features)
                repeats = layers if "{layer}" in parameter.source else 1
                is_layers = "{layer}" in parameter.source
                name = f"{parameter.source} {parameter.rows or ''}"
                key = f"{index}:{name}" if is_layers else name
                size = elements * DTYPE_BYTES[parameter.type.dtype]
                counts[key] = (elements * repeats, size * repeats)
    return sum(n for n, _ in counts.values()), sum(size for _, size in counts.values())


def _kv_cache(model: ModelGraph) -> int:
    """Bytes of keys and values of one token, in all layers."""
    of_block = []
    for block in model.blocks:
        types = [
            block.types[name]
            for node in block.nodes
            if node.op == "attention"
            for name in node.inputs[1:3]
        ]
        of_block.append(sum(prod(t.features) * DTYPE_BYTES[t.dtype] for t in types))
    return sum(of_block[index] for index in model.layers)


def _moments(planned: PlannedModel, setup: Setup, kept: SavedMemory) -> list[MomentSizes]:
    assert planned.training is not None
    assert planned.plan is not None
    assert planned.epilogue is not None
    loss = _loss_workspace(planned.base, planned.epilogue, setup)
    return timeline(planned.training, planned.plan, kept, loss, setup.batch, setup.seq)


def _loss_workspace(base: ModelGraph, epilogue: Graph, setup: Setup) -> sympy.Expr:
    """What the loss needs at once: one chunk of tokens, beside the gradients of all."""
    tokens = setup.batch * setup.seq
    vocabulary = int(base.epilogue.types[base.epilogue.outputs[0]].shape[-1])
    chunk = min(tokens, max(16, LOSS_CHUNK_BYTES // (4 * vocabulary)))
    symbol = TOKENS_OF_BATCH if chunk == tokens else sympy.Integer(chunk)
    return transient(epilogue, chunk, setup.seq).formula(symbol) + carried_bytes(base)


def _serving_workspace(model: ModelGraph, setup: Setup) -> sympy.Expr:
    """The most that one layer's forward needs at once, or the logits, where nothing is trained."""
    tokens = setup.batch * setup.seq
    found = [transient(block, tokens, setup.seq).formula(TOKENS_OF_BATCH) for block in model.blocks]
    # Only the last token of each sequence gets logits.
    found.append(transient(model.epilogue, setup.batch, setup.seq).formula(SEQUENCES))
    return max(found, key=lambda formula: bytes_at(formula, setup.at))


def _moment(sizes: MomentSizes, at: Mapping[sympy.Symbol, int]) -> Moment:
    return Moment(sizes.label, bytes_at(sizes.saved, at), bytes_at(sizes.workspace, at))


def carried_bytes(model: ModelGraph) -> sympy.Expr:
    """Bytes of what a layer hands the next; a formula in B and S."""
    carried = model.epilogue.inputs[: len(model.blocks[0].outputs)]
    return sympy.Add(*(v.type.size_bytes.subs(TOKENS, TOKENS_OF_BATCH) for v in carried))


def bytes_at(formula: sympy.Expr, at: Mapping[sympy.Symbol, int]) -> int:
    """A formula at what its symbols stand for."""
    return int(formula.subs(at))
