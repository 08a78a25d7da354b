"""The memory of one finetuning step, moment by moment.

    forward i    saved = shared + Σ_{j <= i} layer j    tensors saved by forward i count at its end
    loss         saved = shared + Σ layers + what the loss reads
    again i      saved = shared + Σ_{j < i} layer j + recomputed inputs of layers of i's segment
    backward i   saved = the same; its own tensors are freed as they are read

Besides, each moment has a workspace: the most bytes of its own values that are alive at once. The
adapters' gradients are counted for the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import sympy

from pcg.ir.analysis.saved_memory import SavedMemory, training_transients
from pcg.ir.analysis.storages import TOKENS_OF_BATCH
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TOKENS
from pcg.passes.memory.plan import MemoryPlan


@dataclass(frozen=True)
class MomentSizes:
    """The bytes of one moment of a step: formulas in B and S.

    Attributes:
        label: the moment's label.
        saved: the bytes saved for backward.
        workspace: the other bytes.
    """

    label: str
    saved: sympy.Expr
    workspace: sympy.Expr


def timeline(
    model: ModelGraph,
    plan: MemoryPlan,
    saved: SavedMemory,
    loss_workspace: sympy.Expr,
    batch: int,
    seq: int,
) -> list[MomentSizes]:
    """Return the moments of a step: forward layer by layer, the loss, backward layer by layer.

    A layer that trains nothing has no backward.

    Args:
        model: the model with bypass networks.
        plan: the memory plan of its layers.
        saved: the bytes that they save.
        loss_workspace: the workspace of the loss; a formula.
        batch: the number of sequences at which nodes are compared.
        seq: the number of tokens of each at which nodes are compared.
    """
    workspaces = [
        [None if one is None else one.formula(TOKENS_OF_BATCH) for one in pair]
        for pair in training_transients(model, plan.plans, batch * seq, seq)
    ]
    shared = sympy.Add(
        *(row.size_bytes for row in saved.outside if row.tensor.startswith("prologue."))
    )
    until = list(accumulate(saved.layers, initial=shared))
    moments = [
        MomentSizes(f"forward {layer}", until[layer + 1], workspaces[index][0])
        for layer, index in enumerate(plan.layers)
    ]
    moments.append(MomentSizes("loss", saved.total, loss_workspace))
    held = _recomputed_inputs(model, plan)
    for layer, index in reversed(list(enumerate(plan.layers))):
        if workspaces[index][1] is None:
            break
        if layer in plan.restored and layer + 1 not in plan.restored:
            gradient = _input_bytes(model, layer)
            again = workspaces[plan.layers[layer - 1]][0] + gradient
            moments.append(MomentSizes(f"again {layer}", until[layer] + held[layer], again))
        moments.append(
            MomentSizes(f"backward {layer}", until[layer] + held[layer], workspaces[index][1])
        )
    return moments


def _recomputed_inputs(model: ModelGraph, plan: MemoryPlan) -> list[sympy.Expr]:
    """Return the bytes of recomputed inputs that are alive, beside its own, in each backward."""
    held: list[sympy.Expr] = []
    for layer in range(len(plan.layers)):
        in_segment = layer in plan.restored and layer - 1 in plan.restored
        held.append(held[-1] + _input_bytes(model, layer - 1) if in_segment else sympy.Integer(0))
    return held


def _input_bytes(model: ModelGraph, layer: int) -> sympy.Expr:
    return model.blocks[model.layers[layer]].inputs[0].type.size_bytes.subs(TOKENS, TOKENS_OF_BATCH)
