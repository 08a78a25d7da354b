"""`pcg.explain`: run the pipeline without weights or emitted source, and report its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from pcg.errors import UnsupportedError
from pcg.explain.baseline_stages import with_peers
from pcg.explain.capacity import capacities, gpus_that_hold
from pcg.explain.parallel_report import context_rows, parallel_rows, serving_rows
from pcg.explain.plan_validity import parallel_regions, with_formulas
from pcg.explain.planned_model import ContextStep, Setup, plan_model
from pcg.explain.report.report import Report
from pcg.explain.report_builder import build_report
from pcg.explain.stage_memory import pipeline_step, with_stages
from pcg.given_module import source_of
from pcg.ir.analysis.storages import TOKENS_OF_BATCH
from pcg.ir.program.program import is_classifier
from pcg.keywords import takes
from pcg.options import ExplainOptions
from pcg.parallel.costs.accelerators import Accelerator, find_accelerator
from pcg.parallel.costs.catalog import costs_name, find_cost_model
from pcg.passes.pipeline import Settings, pipeline
from pcg.peft.adapter_files import recipes_of
from pcg.ranks.mesh import MeshSizes
from pcg.ranks.step_parts import most_rows
from pcg.runtime.memory.recurrent_states import check_whole_sequences
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.source import COMPOSITE


@dataclass(frozen=True)
class ExplainArguments(ExplainOptions):
    """Arguments of `explain`.

    Attributes:
        model: a directory, a hub id, an id that ships with pcg, a config, or a transformers model;
            no weights are needed.
        peft: None, "lora" or another word of `pcg.peft.registry.SHORTHANDS`, a peft configuration,
            an adapter directory, or {name: any of these except None}.
    """

    model: Any
    peft: object = "lora"


@takes(ExplainArguments)
def explain(arguments: ExplainArguments) -> Report:
    """Account for the memory of a finetuning step: the saved tensors, with reasons.

    Raises:
        PcgError: the model cannot be read or traced, or a recipe cannot be attached.
    """
    return compared(arguments.model, {"": arguments.peft}, arguments)[""]


@dataclass(frozen=True)
class CompareArguments(ExplainOptions):
    """Arguments of `compare`.

    Attributes:
        model: as for `explain`.
        pefts: values for `peft` of `explain`, by name.
    """

    model: Any
    pefts: Mapping[str, object]


@takes(CompareArguments)
def compare(arguments: CompareArguments) -> dict[str, Report]:
    """Explain several recipes over a model, which is traced once; return reports by name.

    Raises:
        PcgError: the model cannot be read or traced, or a recipe cannot be attached.
    """
    return compared(arguments.model, arguments.pefts, arguments)


def compared(model: Any, pefts: Mapping[str, object], options: ExplainOptions) -> dict[str, Report]:
    """Explain several recipes over a model, as `compare` does, with an options object."""
    devices = [find_accelerator(name) for name in options.gpus]
    optimizer = Optimizer.of(
        options.optimizer, options.optimizer_options, options.offload_optimizer
    )
    optimizer.check_parted(options.tp)
    source, to_trace = source_of(model, options.labels)
    composite, of_labels = source.config.get(COMPOSITE, ""), is_classifier(source.config)
    recipes = {n: recipes_of(peft, composite, of_labels=of_labels) for n, peft in pefts.items()}
    costs = find_cost_model(costs_name(options.costs, options.gpus)) if options.tp > 1 else None
    context, staged, step = None, None, options
    if options.pp > 1:
        staged = pipeline_step(options)
        most = -(-options.batch * options.gradient_accumulation_steps // staged.micro_batches)
        step = dataclasses.replace(options, batch=most)
    if MeshSizes(cp=options.cp).world > 1:
        _check_parts(options)
        context = ContextStep(options.cp, options.seq)
        step = dataclasses.replace(options, seq=most_rows([options.seq], options.cp))
    settings = Settings(step, source.name, costs=costs, parts=options.cp)
    passes = pipeline(settings)
    traced = passes.trace.run(to_trace)
    folded = passes.fold.run(traced)
    check_whole_sequences(folded.model, options.cp)
    reports = {}
    for name, adapters in recipes.items():
        served = TOKENS_OF_BATCH if not adapters else sympy.S.Zero
        if options.serve_tokens is not None:
            served = sympy.Integer(options.serve_tokens)
        model_setup = (source.config, to_trace, settings, traced, folded)
        serves = options if options.serve_tokens and adapters else None
        if context is not None and not adapters:
            raise UnsupportedError(
                f"cp={context.cp} shares the tokens of sequences that are finetuned; give a recipe "
                "(--peft lora), or leave cp out"
            )
        place = (options.device, serves, context, options.shard_base, staged)
        setup = Setup(*model_setup, adapters, optimizer, served, *place)
        reports[name] = _explained(setup, devices, options.find_region)
        if options.peers:
            reports[name] = with_peers(reports[name], setup)
    return reports


def _check_parts(options: ExplainOptions) -> None:
    """Refuse options that reports of context parallelism do not support."""
    for name in ("gpus", "serve_tokens", "find_region", "peers"):
        if getattr(options, name):
            raise UnsupportedError(
                f"{name}={getattr(options, name)!r} with cp={options.cp}: it is not known of "
                f"sequences whose tokens ranks share; leave {name} out, or use cp=1"
            )


def _explained(setup: Setup, devices: Sequence[Accelerator], find_region: bool) -> Report:
    planned = plan_model(setup, windows=setup.context is None)
    if setup.context is not None and planned.trained is None:
        raise UnsupportedError(f"cp={setup.cp}: pcg does not finetune this yet ({planned.refusal})")
    report = build_report(planned)
    if find_region and planned.trained is not None:
        report = with_formulas(report, planned)
    costs = setup.settings.device_costs
    if planned.sharded is not None and costs is not None:
        rows = parallel_rows(planned.sharded, costs, planned.trained, setup.device)
        if setup.serves is not None:
            rows["serving"] = serving_rows(planned.sharded, setup.settings.serving_costs)
        if find_region:
            rows["regions"] = parallel_regions(setup)
        report = dataclasses.replace(report, parallel=rows)
    if setup.context is not None:
        report = dataclasses.replace(report, context=context_rows(planned, setup.context))
    if setup.pipeline is not None:
        return with_stages(report, planned)
    return dataclasses.replace(
        report,
        fits=capacities(planned, devices),
        gpus=gpus_that_hold(planned) if setup.device == "cuda" else (),
    )
