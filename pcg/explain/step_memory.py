"""Memory of a finetuning step by kind and by moment: formulas in B and S.

    total = weights + adapters + gradients + optimizer + served adapters + KV cache + activations
            + workspace

`pcg.explain.report.report_data.ReportData` defines each kind. Activations are the bytes saved for
backward; the workspace is the rest of the peak over the step's moments:

    forward i    saved = shared + Σ_{j <= i} layer j    tensors saved by forward i count at its end
    loss         saved = shared + Σ layers + inputs of the loss
    again i      saved = shared + Σ_{j < i} layer j + recomputed inputs of layers of i's segment
    backward i   saved = as of again i; its own tensors are freed as they are read
    update       saved = 0; only for an optimizer in host memory: a parameter's states on the device

Each moment adds a workspace: the most bytes of its own values that are alive at the same time. The
adapters' gradients count for the whole step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import sympy
import torch

from pcg.explain.base_memory import base_bytes, packed_bytes
from pcg.explain.planned_model import PlannedModel
from pcg.explain.report.report_data import KINDS, Moment
from pcg.formats.registry import FORMATS
from pcg.ir.analysis.dataflow import trained
from pcg.ir.analysis.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.ir.layouts import layout_of
from pcg.ir.program.program import ModelGraph
from pcg.ir.program.saved_memory import SavedMemory, training_transients, transient
from pcg.ir.shapes import Shapes, elements
from pcg.ir.types import CONTEXT, DTYPE_BYTES, TOKENS, TORCH_NAMES
from pcg.passes.memory.plan import MemoryPlan
from pcg.runtime.memory.kv_cache import bytes_of_token
from pcg.runtime.memory.recurrent_states import bytes_of_states
from pcg.runtime.training.torch_optimizers import StateMemory


def memory_bytes(planned: PlannedModel) -> dict[str, int]:
    """Return the bytes of each kind of memory and their total."""
    formulas, _ = step_memory(planned)
    return {kind: bytes_at(formula, planned.setup.at) for kind, formula in formulas.items()}


def storage_key(planned: PlannedModel) -> Hashable:
    """Return a key, equal at degrees where ranks save the same tensors in the same layouts."""
    assert planned.sharded is not None
    plan = planned.training.plan
    layouts = tuple(
        (name, layout_of(type_))
        for graph in planned.sharded.typed.graphs
        for name, type_ in graph.types.items()
    )
    graphs = planned.sharded.typed.graphs
    shared = tuple(p.source for graph in graphs for p in graph.parameters if p.copies > 1)
    saved = tuple(choice.saved for choice in plan.choices)
    return layouts, shared, saved, plan.layers, plan.restored


def step_memory(
    planned: PlannedModel, untrained: sympy.Expr = sympy.S.Zero
) -> tuple[dict[str, sympy.Expr], list[Moment]]:
    """Return the formulas of the kinds of memory and of their total, and the moments of the step.

    Args:
        untrained: the activations of a model that pcg cannot train.
    """
    moments: list[Moment] = []
    at, saved, states = planned.setup.at, planned.saved, state_memory(planned)
    if saved is None:
        activations, workspace = untrained, _serving_workspace(planned)
    else:
        sizes = timeline(planned, saved)
        if states.update_bytes:
            sizes.append(_MomentSizes("update", sympy.S.Zero, sympy.Integer(states.update_bytes)))
        moments = [
            Moment(moment.label, bytes_at(moment.saved, at), bytes_at(moment.workspace, at))
            for moment in sizes
        ]
        totals = [moment.total_bytes for moment in moments]
        peak = sizes[totals.index(max(totals))]
        activations = saved.total
        workspace = peak.saved + peak.workspace - activations
    size = DTYPE_BYTES[planned.unraised.adapter_dtype]
    adapters = sympy.Integer(size * elements(_trained_shapes(planned)))
    on_gpu = planned.setup.device == "cuda"
    kinds = (
        sympy.Integer(
            base_bytes(planned.base, planned.setup.parts)
            + packed_copies(planned)
            + latent_copies(planned.serving)
        ),
        adapters,
        adapters,
        sympy.Integer(states.device_bytes + (0 if on_gpu else states.host_bytes)),
        sympy.Integer(planned.copies_bytes + (0 if on_gpu else version_bytes(planned))),
        served_bytes(planned.serving, planned.setup.served_tokens),
        activations,
        workspace,
    )
    formulas = dict(zip(KINDS, kinds, strict=True))
    return formulas | {"total": sympy.Add(*kinds)}, moments


def served_bytes(model: ModelGraph, tokens: sympy.Expr) -> sympy.Expr:
    """Return the bytes of the keys, values and recurrent states of sequences of S tokens."""
    states = bytes_of_states(model)
    sequences = sympy.ceiling(tokens / CONTEXT) if states else 0
    return bytes_of_token(model) * tokens + states * sequences


def latent_copies(model: ModelGraph) -> int:
    """Return the bytes of the float copies of quantized weights that latents are expanded by."""
    size_bytes = 0
    for index in model.layers:
        block = model.blocks[index]
        for node in block.nodes:
            if node.op == "latent_attention" and block.types[node.inputs[3]].dtype in FORMATS:
                size = DTYPE_BYTES[block.types[node.inputs[0]].dtype]
                size_bytes += size * prod(block.types[node.inputs[3]].features)
    return size_bytes


def version_bytes(planned: PlannedModel) -> int:
    """Return the host bytes of the served adapter versions during training."""
    is_served = planned.setup.serves is not None
    size = DTYPE_BYTES[planned.unraised.adapter_dtype]
    return size * planned.use.trainable if is_served else 0


def packed_copies(planned: PlannedModel) -> int:
    """Return the bytes of the packed copies of a rank's part of the base."""
    packs = planned.setup.options.packed_weights
    if not packs:
        return 0
    return packed_bytes(planned.base, torch.device(planned.setup.device), planned.setup.parts)


def state_memory(planned: PlannedModel) -> StateMemory:
    """Return the bytes of a rank's optimizer states."""
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[planned.unraised.adapter_dtype])
    return planned.setup.optimizer.state_memory(_trained_shapes(planned), dtype)


def _trained_shapes(planned: PlannedModel) -> Shapes:
    is_whole = planned.setup.options.tp == 1 and planned.setup.pipeline is None
    if is_whole or planned.attached is None:
        return planned.use.trained
    names = {name for graph in planned.attached.graphs for name in trained(graph)}
    shapes = {
        (parameter.source, parameter.rows, layer): parameter.type.features
        for parameter, layer in planned.attached.parameters()
        if parameter.name in names
    }
    return tuple(shapes.values())


@dataclass(frozen=True)
class _MomentSizes:
    """The bytes of a moment of a step, as formulas in B and S; `Moment` has the numbers."""

    label: str
    saved: sympy.Expr
    workspace: sympy.Expr


def timeline(
    planned: PlannedModel, saved: SavedMemory, has_loss: bool = True
) -> list[_MomentSizes]:
    """Return the moments of a step: forward layer by layer, the loss, backward layer by layer.

    A layer that trains nothing has no backward; only the last pipeline stage has the loss.
    """
    model, plan, setup = planned.training.model, planned.training.plan, planned.setup
    workspaces = [
        [None if part is None else part.formula(TOKENS_OF_BATCH) for part in pair]
        for pair in training_transients(
            model, plan.plans, setup.options.batch * setup.options.seq, setup.options.seq, setup.cp
        )
    ]
    shared = sympy.Add(
        *(row.size_bytes for row in saved.outside if row.tensor.startswith("prologue."))
    )
    until = list(accumulate(saved.layers, initial=shared))
    moments = [
        _MomentSizes(f"forward {layer}", until[layer + 1], workspaces[index][0])
        for layer, index in enumerate(plan.layers)
    ]
    if has_loss:
        moments.append(_MomentSizes("loss", saved.total, _loss_workspace(planned)))
    held = _recomputed_inputs(model, plan)
    for layer, index in reversed(list(enumerate(plan.layers))):
        if workspaces[index][1] is None:
            break
        alive = until[layer] + held[layer]
        if layer in plan.restored and layer + 1 not in plan.restored:
            again = workspaces[plan.layers[layer - 1]][0] + _input_bytes(model, layer)
            moments.append(_MomentSizes(f"again {layer}", alive, again))
        moments.append(_MomentSizes(f"backward {layer}", alive, workspaces[index][1]))
    return moments


def _recomputed_inputs(model: ModelGraph, plan: MemoryPlan) -> list[sympy.Expr]:
    """Return the bytes of other live recomputed inputs during each layer's backward."""
    held: list[sympy.Expr] = []
    for layer in range(len(plan.layers)):
        in_segment = layer in plan.restored and layer - 1 in plan.restored
        held.append(held[-1] + _input_bytes(model, layer - 1) if in_segment else sympy.Integer(0))
    return held


def _input_bytes(model: ModelGraph, layer: int) -> sympy.Expr:
    return model.blocks[model.layers[layer]].inputs[0].type.size_bytes.subs(TOKENS, TOKENS_OF_BATCH)


def _loss_workspace(planned: PlannedModel) -> sympy.Expr:
    """Return the loss's workspace: that of a chunk of tokens, plus the gradients of all tokens.

    A sequence's last token has no target. Virtual tokens have none either, except for the last if
    it predicts the first token.
    """
    setup, options = planned.setup, planned.setup.options
    silent = min(
        recipe.prompt_tokens + 1 - recipe.learns_first_token for recipe in setup.recipes.values()
    )
    if setup.context is not None or silent >= options.seq:  # a rank may lack the last token
        silent = 0
    targets = options.batch * (options.seq - silent)
    chunk = min(targets, planned.base.loss_chunk)
    symbol = sympy.Integer(chunk)
    if chunk == targets:
        symbol = TOKENS_OF_BATCH - silent * SEQUENCES
    # A chunk's rows are copies, which the caller holds until the chunk ends.
    graph = planned.training.epilogue
    held = graph.replace(outputs=(*graph.outputs, *(value.name for value in graph.inputs)))
    workspace = transient(held, chunk, options.seq)
    return workspace.formula(symbol) + carried_bytes(planned.base)


def _serving_workspace(planned: PlannedModel) -> sympy.Expr:
    """Return the largest workspace of a layer's forward, or of the logits, without training."""
    model, batch, seq = (
        planned.attached or planned.base,
        planned.setup.options.batch,
        planned.setup.options.seq,
    )
    workspaces = [
        transient(block, batch * seq, seq).formula(TOKENS_OF_BATCH) for block in model.blocks
    ]
    # Only the last token of each sequence gets logits.
    workspaces.append(transient(model.epilogue, batch, seq).formula(SEQUENCES))
    return max(workspaces, key=lambda formula: bytes_at(formula, planned.setup.at))


def carried_bytes(model: ModelGraph) -> sympy.Expr:
    """Return the bytes that a layer passes to the next; a formula in B and S."""
    carried = model.epilogue.inputs[: len(model.blocks[0].outputs)]
    return sympy.Add(*(v.type.size_bytes.subs(TOKENS, TOKENS_OF_BATCH) for v in carried))


def bytes_at(formula: sympy.Expr, at: Mapping[sympy.Symbol, int]) -> int:
    """Return a formula's value at the values of its symbols."""
    # `xreplace` is several times faster than `subs`.
    return int(formula.xreplace({symbol: sympy.Integer(size) for symbol, size in at.items()}))


def formula_text(formula: sympy.Expr) -> str:
    """Return a formula as a string that sympy reads back."""
    return str(sympy.expand(formula))
