"""The memory of one finetuning step, moment by moment.

    forward i    kept = shared + Σ_{j <= i} layer j    what forward i keeps is there when it ends
    loss         kept = shared + Σ layers + what the loss reads
    again i      kept = shared + Σ_{j < i} layer j + inputs made again of layers of i's segment
    backward i   kept = the same; its own is freed as it is read

Beside that, each moment has a workspace: the most of its own values that are alive at once. The
adapters' gradients are counted with the optimizer, for the whole step.
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
    """What one moment of a step needs, in bytes: formulas in B and S.

    Attributes:
        label: of the moment.
        kept: for backward.
        workspace: beside that.
    """

    label: str
    kept: sympy.Expr
    workspace: sympy.Expr


def timeline(
    model: ModelGraph,
    plan: MemoryPlan,
    kept: SavedMemory,
    loss_workspace: sympy.Expr,
    batch: int,
    seq: int,
) -> list[MomentSizes]:
    """The moments of a step: forward layer by layer, the loss, backward layer by layer.

    A layer that trains nothing has no backward, and no moment of it.

    Args:
        model: with bypass networks attached.
        plan: how the layers are trained.
        kept: what they keep.
        loss_workspace: what the loss needs at once; a formula.
        batch: sequences, at which nodes are compared.
        seq: tokens of each, likewise.
    """
    workspaces = [
        [None if one is None else one.formula(TOKENS_OF_BATCH) for one in pair]
        for pair in training_transients(model, plan.plans, batch * seq, seq)
    ]
    shared = sympy.Add(
        *(row.size_bytes for row in kept.outside if row.tensor.startswith("prologue."))
    )
    until = list(accumulate(kept.layers, initial=shared))
    moments = [
        MomentSizes(f"forward {layer}", until[layer + 1], workspaces[index][0])
        for layer, index in enumerate(plan.layers)
    ]
    moments.append(MomentSizes("loss", kept.total, loss_workspace))
    held = _inputs_made_again(model, plan)
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


def _inputs_made_again(model: ModelGraph, plan: MemoryPlan) -> list[sympy.Expr]:
    """Bytes of inputs made again that are there, beside its own, as each layer runs backward."""
    held: list[sympy.Expr] = []
    for layer in range(len(plan.layers)):
        in_segment = layer in plan.restored and layer - 1 in plan.restored
        held.append(held[-1] + _input_bytes(model, layer - 1) if in_segment else sympy.Integer(0))
    return held


def _input_bytes(model: ModelGraph, layer: int) -> sympy.Expr:
    return model.blocks[model.layers[layer]].inputs[0].type.size_bytes.subs(TOKENS, TOKENS_OF_BATCH)
