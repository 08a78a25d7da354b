"""Stages of a report that other software saves for backward: measured, not modelled.

eager: transformers + peft. peft trains one adapter at a time; of several adapters, the largest
account counts. torch-partitioner: torch.compile, by `pcg explain --peers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

from pcg.errors import TraceError, UnsupportedError
from pcg.explain.baselines.eager_memory import EagerMemory, EagerModel
from pcg.explain.planned_model import PlannedModel, Setup
from pcg.explain.report.report import Report
from pcg.explain.report.report_data import PeerPoint, Stage
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.types import CONTEXT, TORCH_NAMES
from pcg.peft.recipe import Recipe

if TYPE_CHECKING:
    from pcg.explain.baselines.peers import PartitionedModel


@dataclass(frozen=True)
class EagerAccount:
    """The bytes that eager code saves for the step of a report, and for other steps.

    Attributes:
        memory: the bytes of the step.
        has_prefix: True if the adapter trains keys and values; peft then refuses checkpointing.
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
        """Return the bytes as a polynomial in B and S, interpolated between larger steps.

        A single sequence is a separate case if eager code then makes views instead of copies.
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
    """Measure the bytes that eager code saves; return None, with a note, if it cannot run.

    Args:
        planned: the model, its recipes and the step.
        notes: the report's notes; receives the reason, and differences from pcg.
    """
    setup = planned.setup
    if not planned.use.trainable:
        return None
    if setup.options.tp > 1:
        notes.append("eager and checkpointing are measured on one rank alone: --tp 1")
        return None
    try:
        accounts = [_measured(planned, recipe) for recipe in setup.recipes.values()]
    except (TraceError, UnsupportedError) as error:
        notes.append(f"eager: not measured here ({error})")
        return None
    most = max(accounts, key=lambda account: account.memory.total)
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


# -------------------------------------------------------------------------------------------- peers


STAGE = "torch-partitioner"


def with_peers(report: Report, setup: Setup) -> Report:
    """Add torch's partitioner under several budgets to the report, or a note with the reason."""
    # The import loads functorch and inductor, which takes seconds.
    from pcg.explain.baselines.peers import BUDGETS, MASKLESS, torch_partitioner

    if not setup.recipes:
        return report
    if report.tp > 1:
        raise UnsupportedError(
            f"peers: torch's partitioner divides the graph of one rank, not of {report.tp}; "
            "use tp=1"
        )
    try:
        recipe = _recipe(setup.recipes)
        adapter = recipe.config_fields(recipe.target_modules, "", {})
        step = (setup.config, report.dtype, adapter, report.batch, report.seq)
        points = tuple(map(peer_point, torch_partitioner(*step)))
        (maskless,) = map(
            peer_point, torch_partitioner(*step, budgets=BUDGETS[:1], attention=MASKLESS)
        )
    except (TraceError, UnsupportedError) as error:
        note = f"{STAGE}: not followed here ({error})"
        return dataclasses.replace(report, notes=(*report.notes, note))
    default = points[0]
    stage = Stage(STAGE, default.bytes, default.bytes_per_block, default.recompute_flops_ratio)
    return dataclasses.replace(
        report,
        activations=(*report.activations, stage),
        peers=points,
        notes=(*report.notes, _note(default, maskless)),
    )


def peer_point(model: PartitionedModel) -> PeerPoint:
    """Return a report's entry for a model partitioned under a budget."""
    inner = model.layer_bytes[1:] or model.layer_bytes
    return PeerPoint(
        model.budget,
        sum(model.layer_bytes) + model.outside_bytes,
        model.outside_bytes,
        round(sum(inner) / len(inner)),
        model.recomputed_flops / (model.forward_flops or 1),
    )


def _recipe(recipes: Mapping[str, Recipe]) -> Recipe:
    """Return the only recipe; refuse a recipe that torch's run would not follow."""
    if len(recipes) > 1:
        raise UnsupportedError(f"{len(recipes)} adapters train at once; peft trains one")
    (recipe,) = recipes.values()
    if recipe.dropout:
        raise UnsupportedError(f"dropout={recipe.dropout}; it is run without dropout")
    if recipe.prompt_tokens:
        raise UnsupportedError(f"{recipe.method} trains what comes before the layers")
    return recipe


def _note(default: PeerPoint, maskless: PeerPoint) -> str:
    text = (
        f"{STAGE}: bytes that torch.compile passes from forward to backward of transformers + "
        "peft, divided layer by layer; logits and loss under the default budget"
    )
    more = default.bytes_per_block - maskless.bytes_per_block
    if not more:
        return text
    return (
        f"{text}; with the attention mask that transformers builds when traced, for which it "
        f"repeats keys and values: {more:,} bytes a layer"
    )
