"""The memory of a finetuning step by kind, and moment by moment: formulas in B and S.

    total = weights + adapters + gradients + optimizer + KV cache + activations + workspace

`pcg.explain.report_data.ReportData` defines each. Activations are the bytes saved for backward, the
workspace the other bytes of the step's peak (`pcg.explain.timeline`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import prod

import sympy

from pcg.explain.planned_model import PlannedModel
from pcg.explain.report_data import KINDS, Moment
from pcg.explain.timeline import MomentSizes, timeline
from pcg.ir.analysis.saved_memory import SavedMemory, transient
from pcg.ir.analysis.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.ir.analysis.trainable import trained
from pcg.ir.graph import Graph
from pcg.ir.layouts import layout_of
from pcg.ir.program.program import ModelGraph
from pcg.ir.shapes import Shapes, elements
from pcg.ir.types import DTYPE_BYTES, TOKENS


def memory_bytes(planned: PlannedModel) -> dict[str, int]:
    """Return the bytes of each kind of memory and their total; without a plan none are saved."""
    saved = planned.saved
    activations = sympy.Integer(0) if saved is None else saved.total
    formulas, _ = step_memory(planned, activations)
    return {kind: bytes_at(formula, planned.setup.at) for kind, formula in formulas.items()}


def step_formulas(planned: PlannedModel) -> dict[str, sympy.Expr]:
    """Return the formula of each kind of memory and of their total, as pcg trains the model."""
    assert planned.saved is not None
    formulas, _ = step_memory(planned, planned.saved.total)
    return formulas


def peak_moment(planned: PlannedModel) -> str:
    """Return the label of the moment that needs the most memory, as pcg trains the model."""
    assert planned.saved is not None
    _, moments = step_memory(planned, planned.saved.total)
    return max(moments, key=lambda moment: moment.total_bytes).label


def storage_key(planned: PlannedModel) -> Hashable:
    """Return a key, equal at degrees at which ranks save the same tensors in the same layouts."""
    assert planned.sharded is not None
    plan = planned.training.plan
    layouts = tuple(
        (name, layout_of(type_))
        for graph in planned.sharded.typed.graphs
        for name, type_ in graph.types.items()
    )
    return layouts, tuple(choice.saved for choice in plan.choices), plan.layers, plan.restored


def step_memory(
    planned: PlannedModel, activations: sympy.Expr
) -> tuple[dict[str, sympy.Expr], list[Moment]]:
    """Return the formulas of the kinds of memory and of their total, and the moments of the step.

    Args:
        planned: the model.
        activations: the bytes saved for backward.
    """
    moments: list[Moment] = []
    if planned.saved is None:
        workspace = _serving_workspace(planned)
    else:
        sizes = _moments(planned, planned.saved)
        moments = [_moment(one, planned.setup.at) for one in sizes]
        totals = [moment.total_bytes for moment in moments]
        peak = sizes[totals.index(max(totals))]
        workspace = peak.saved + peak.workspace - activations
    _, weights = base_weights(planned.base)
    shapes, size = _trained_shapes(planned), DTYPE_BYTES[planned.unraised.adapter_dtype]
    adapters = sympy.Integer(size * elements(shapes))
    kinds = (
        sympy.Integer(weights),
        adapters,
        adapters,
        sympy.Integer(planned.setup.optimizer.state_bytes(shapes, size)),
        _kv_cache(planned.base) * TOKENS_OF_BATCH,
        activations,
        workspace,
    )
    formulas = dict(zip(KINDS, kinds, strict=True))
    return formulas | {"total": sympy.Add(*kinds)}, moments


def _trained_shapes(planned: PlannedModel) -> Shapes:
    """Return the shapes of the trained tensors of one rank."""
    if planned.setup.tp == 1 or planned.attached is None:
        return planned.use.trained
    names = {name for graph in planned.attached.graphs for name in trained(graph)}
    found = {
        (parameter.source, parameter.rows, layer): parameter.type.features
        for parameter, layer in planned.attached.parameters()
        if parameter.name in names
    }
    return tuple(found.values())


def base_weights(model: ModelGraph) -> tuple[int, int]:
    """Return the number and bytes of the base's parameters, with tied ones once."""
    counts: dict[str, tuple[int, int]] = {}
    for index, graph in enumerate((*model.blocks, model.prologue, model.epilogue)):
        layers = model.layers.count(index) if index < len(model.blocks) else 1
        for parameter in graph.parameters:
            if parameter.role == "frozen":
                is_layers = "{layer}" in parameter.source
                count = prod(parameter.type.features) * (layers if is_layers else 1)
                name = f"{parameter.source} {parameter.rows or ''}"
                key = f"{index}:{name}" if is_layers else name
                counts[key] = (count, count * DTYPE_BYTES[parameter.type.dtype])
    return sum(n for n, _ in counts.values()), sum(size for _, size in counts.values())


def _kv_cache(model: ModelGraph) -> int:
    """Return the bytes of keys and values of one token, in all layers."""
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


def _moments(planned: PlannedModel, saved: SavedMemory) -> list[MomentSizes]:
    training, setup = planned.training, planned.setup
    loss = _loss_workspace(planned.base, training.epilogue, setup.batch * setup.seq, setup.seq)
    return timeline(training.model, training.plan, saved, loss, setup.batch, setup.seq)


def _loss_workspace(base: ModelGraph, epilogue: Graph, tokens: int, seq: int) -> sympy.Expr:
    """Return the workspace of the loss: that of one chunk of tokens, and the gradients of all."""
    chunk = min(tokens, base.loss_chunk)
    symbol = TOKENS_OF_BATCH if chunk == tokens else sympy.Integer(chunk)
    return transient(epilogue, chunk, seq).formula(symbol) + carried_bytes(base)


def _serving_workspace(planned: PlannedModel) -> sympy.Expr:
    """Return the largest workspace of a layer's forward, or of the logits, without training."""
    model, batch, seq = planned.attached or planned.base, planned.setup.batch, planned.setup.seq
    found = [transient(one, batch * seq, seq).formula(TOKENS_OF_BATCH) for one in model.blocks]
    # Only the last token of each sequence gets logits.
    found.append(transient(model.epilogue, batch, seq).formula(SEQUENCES))
    return max(found, key=lambda formula: bytes_at(formula, planned.setup.at))


def _moment(sizes: MomentSizes, at: Mapping[sympy.Symbol, int]) -> Moment:
    return Moment(sizes.label, bytes_at(sizes.saved, at), bytes_at(sizes.workspace, at))


def carried_bytes(model: ModelGraph) -> sympy.Expr:
    """Return the bytes that a layer passes to the next; a formula in B and S."""
    carried = model.epilogue.inputs[: len(model.blocks[0].outputs)]
    return sympy.Add(*(v.type.size_bytes.subs(TOKENS, TOKENS_OF_BATCH) for v in carried))


def bytes_at(formula: sympy.Expr, at: Mapping[sympy.Symbol, int]) -> int:
    """Return a formula's value at the values of its symbols."""
    return int(formula.subs(at))
