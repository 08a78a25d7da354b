"""Explanation of a cut: place a model's pruned gradients for several links."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pcg.errors import UnsupportedError
from pcg.explain.planned_model import adapter_use
from pcg.explain.report.split_report import LinkSpeed, SplitReport, tokens_per_s
from pcg.explain.report_builder import recipes_text
from pcg.given_module import source_of
from pcg.ir.types import TORCH_NAMES
from pcg.keywords import takes
from pcg.options import SPLIT_LINKS, PlanOptions, SplitLink, SplitOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.passes.graphs.pass_base import run_pass
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.place import Place, Placed
from pcg.passes.stages import Base, Gradients
from pcg.peft.adapter_files import recipes_of


@dataclass(frozen=True)
class SplitArguments(SplitOptions):
    """Arguments of `explain_split`.

    Attributes:
        model: as for `pcg.explain`.
        peft: as for `pcg.explain`.
        batch: sequences of a step.
        seq: tokens of a sequence.
        dtype: float32, bfloat16, float16 or float64; the configuration's dtype by default.
    """

    model: Any
    peft: object = "lora"
    batch: int = 1
    seq: int = 1024
    dtype: str | None = None


@takes(SplitArguments)
def explain_split(arguments: SplitArguments) -> SplitReport:
    """Return the cheapest cut of a model between base and client, and Symbiosis' fixed cut.

    Raises:
        PcgError: the model or recipe cannot be read, traced, attached or costed.
    """
    options = PlanOptions(batch=arguments.batch, seq=arguments.seq, dtype=arguments.dtype)
    _ = options.budget  # checks the batch and the length
    link = arguments.between
    base_costs, client_costs = find_cost_model(arguments.base), find_cost_model(arguments.client)
    recipes = recipes_of(arguments.peft)
    source, to_trace = source_of(arguments.model)
    kind = str(source.config["model_type"])
    settings = Settings(
        options,
        source.name,
        lambda base: adapter_use(base, recipes, kind, base.adapter_dtype).bypasses,
    )
    passes = pipeline(settings)
    base: Base = passes.base(to_trace)
    attached = passes.attach.run(base)
    notes: list[str] = []
    try:
        pruned = passes.prune.run(passes.differentiate.run(attached))
    except UnsupportedError as error:
        notes.append(f"training: pcg does not finetune this yet ({error})")
        pruned = Gradients(attached.serving, None)
    place = Place(base_costs, client_costs, link, arguments.batch, arguments.seq, arguments.privacy)
    placed: Placed = run_pass(place, pruned)
    named = {name: SplitLink(name, *numbers) for name, numbers in SPLIT_LINKS.items()}
    speeds = []
    for other in {**named, link.name: link}.values():
        cut = placed if other == link else run_pass(dataclasses.replace(place, link=other), pruned)
        speeds.append(_speed(other, cut))
    steps = {"decode": placed.decode, "prefill": placed.prefill}
    if placed.training is not None:
        steps["training"] = placed.training
    return SplitReport(
        model=source.name,
        architecture=str((source.config.get("architectures") or [kind])[0]),
        peft=recipes_text(recipes),
        layers=len(base.model.layers),
        dtype=TORCH_NAMES[base.model.dtype],
        batch=arguments.batch,
        seq=arguments.seq,
        base=base_costs.name,
        client=client_costs.name,
        link=link,
        privacy=arguments.privacy,
        steps=steps,
        links=tuple(speeds),
        notes=tuple(notes),
    )


def _speed(link: SplitLink, placed: Placed) -> LinkSpeed:
    decode, training = placed.decode, placed.training
    return LinkSpeed(
        link.name,
        tokens_per_s(decode, decode.costs),
        tokens_per_s(decode, decode.fixed),
        None if training is None else tokens_per_s(training, training.costs),
        None if training is None else tokens_per_s(training, training.fixed),
    )
