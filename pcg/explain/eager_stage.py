"""The bytes that eager transformers + peft save for backward, beside pcg: measured, not modelled.

peft trains one adapter at a time. Of several, the one that saves most counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from pcg.errors import TraceError, UnsupportedError
from pcg.explain.baselines.eager_memory import EagerMemory, EagerModel
from pcg.explain.planned_model import PlannedModel
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.types import CONTEXT, TORCH_NAMES
from pcg.peft.recipe import Recipe


@dataclass(frozen=True)
class EagerAccount:
    """The bytes that eager code saves for the step of a report, and for others.

    Attributes:
        memory: the bytes of the step.
        has_prefix: True if the adapter trains keys and values, with which peft checkpoints nothing.
    """

    memory: EagerMemory
    has_prefix: bool
    _model: EagerModel
    _batch: int
    _seq: int
    _virtual: int

    @property
    def trainable(self) -> int:
        """The number of parameters that peft trains."""
        return self._model.trainable

    def formula(self) -> sympy.Expr:
        """Return the bytes in B and S: a polynomial through the numbers of steps that are larger.

        One sequence alone is a case of its own where eager code makes views instead of copies.
        """
        batch = max(self._batch, 2)
        few, more = (self._in_length(size) for size in (batch, batch + 1))
        formula = sympy.expand(few + (more - few) * (SEQUENCES - batch))
        at = {SEQUENCES: self._batch, CONTEXT: self._seq}
        if formula.subs(at) == self.memory.total:
            return formula
        alone = self._in_length(self._batch)
        return sympy.Piecewise((alone, sympy.Eq(SEQUENCES, self._batch)), (formula, True))

    def _in_length(self, batch: int) -> sympy.Expr:
        lengths = (self._seq, self._seq + 1, self._seq + 2)
        totals = [self._model.step(batch, seq - self._virtual).total for seq in lengths]
        return sympy.interpolate(list(zip(lengths, totals, strict=True)), CONTEXT)


def eager_account(planned: PlannedModel, notes: list[str]) -> EagerAccount | None:
    """Return what eager code saves; None, and a note, where that cannot be measured.

    Args:
        planned: the model, its recipes and the step.
        notes: the report's notes, which get the reason, and differences from pcg.
    """
    setup = planned.setup
    if not planned.use.trainable:
        return None
    if setup.options.tp > 1:
        notes.append("eager and checkpointing are measured on one rank alone: --tp 1")
        return None
    try:
        found = [_measured(planned, recipe) for recipe in setup.recipes.values()]
    except (TraceError, UnsupportedError) as error:
        notes.append(f"eager: not measured here ({error})")
        return None
    most = max(found, key=lambda account: account.memory.total)
    notes += _notes(planned, most)
    return most


def _measured(planned: PlannedModel, recipe: Recipe) -> EagerAccount:
    setup, base = planned.setup, planned.unraised
    at = recipe.bypasses_in(base, str(setup.config["model_type"]))
    model = EagerModel(setup.source, TORCH_NAMES[base.dtype], recipe, at)
    batch, seq, virtual = setup.options.batch, setup.options.seq, recipe.prompt_tokens
    memory = model.step(batch, max(seq - virtual, 1))
    has_prefix = recipe.peft_type == "PREFIX_TUNING"
    return EagerAccount(memory, has_prefix, model, batch, seq, virtual)


def _notes(planned: PlannedModel, eager: EagerAccount) -> Iterable[str]:
    if planned.setup.traced.trace.attention.endswith("eager"):
        yield "eager: transformers has no SDPA for this architecture; scores [S, S] are saved"
    if len(planned.setup.recipes) > 1:
        yield "eager: peft trains one adapter at a time; this is the one that saves most"
    elif eager.trainable != planned.use.trainable:
        yield (
            f"eager: with this recipe peft trains {eager.trainable:,} parameters, "
            f"pcg {planned.use.trainable:,}"
        )
