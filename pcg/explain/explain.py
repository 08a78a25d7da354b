"""`pcg.explain`: the pipeline without weights or emitted source, and a report of what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from pcg.errors import ParallelError, UnsupportedError
from pcg.explain.adapter_use import AdapterUse, adapter_use
from pcg.explain.capacity import capacity
from pcg.explain.degree_formulas import AtDegree, in_degree
from pcg.explain.parallel_report import parallel_rows, token_regions
from pcg.explain.plan_validity import MOST_RANK, MOST_TOKENS, valid_range
from pcg.explain.rank_formulas import in_rank, rank_of, with_rank
from pcg.explain.report import Report
from pcg.explain.report_builder import build_report, formula_text
from pcg.explain.step_memory import PlannedModel, Setup, peak_moment, step_formulas, storage_key
from pcg.ir.program.program import ModelGraph
from pcg.keywords import takes
from pcg.options import ExplainOptions, MemoryBudget, dtype_name
from pcg.parallel.costs.accelerators import Accelerator, find_accelerator
from pcg.parallel.costs.catalog import SheetModel, costs_name, find_cost_model
from pcg.parallel.search import Search
from pcg.passes.bypasses import Bypasses
from pcg.passes.memory.plan import MemoryPlan, frontiers, replanned
from pcg.passes.pipeline import Compilation, made, run_passes
from pcg.passes.sharding.parallelize import search_layer
from pcg.passes.training_graphs import LayerKind
from pcg.peft.reader import recipes_of
from pcg.peft.recipe import Recipe
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.source import resolve


@dataclass(frozen=True)
class ExplainArguments(ExplainOptions):
    """Arguments of `explain`.

    Attributes:
        model: a directory, a hub id, an id that ships with pcg, a config, or a transformers model;
            no weights are needed.
        peft: None, "lora" or another word of `pcg.peft.registry.SHORTHANDS`, a configuration of
            peft's, or {name: one of these, or an adapter directory}.
    """

    model: Any
    peft: object = "lora"


@takes(ExplainArguments)
def explain(given: ExplainArguments) -> Report:
    """Account for the memory of a finetuning step: what is saved for backward, and why.

    Raises:
        PcgError: what cannot be read, traced or attached is named.
    """
    return compared(given.model, {"": given.peft}, given)[""]


def _with_peers(report: Report, config: Mapping[str, Any], recipes: Mapping[str, Recipe]) -> Report:
    """The report with what torch's partitioner keeps."""
    from pcg.explain.peers import with_peers  # imports functorch and inductor, which takes seconds

    if report.tp > 1:
        raise UnsupportedError(
            f"peers: torch's partitioner divides the graph of one rank, not of {report.tp}; "
            "use tp=1"
        )
    adapters = {
        name: recipe.config_fields(recipe.target_modules, "", {})
        for name, recipe in recipes.items()
    }
    return with_peers(report, config, recipes, adapters)


@dataclass(frozen=True)
class CompareArguments(ExplainOptions):
    """Arguments of `compare`.

    Attributes:
        model: as for `explain`.
        pefts: what `explain` takes as `peft`, by name.
    """

    model: Any
    pefts: Mapping[str, object]


@takes(CompareArguments)
def compare(given: CompareArguments) -> dict[str, Report]:
    """Explain several recipes over one model, which is traced once; by their names.

    Raises:
        PcgError: what cannot be read, traced or attached is named.
    """
    return compared(given.model, given.pefts, given)


def compared(model: Any, pefts: Mapping[str, object], options: ExplainOptions) -> dict[str, Report]:
    """`compare` with its options as one object."""
    if isinstance(model, torch.nn.Module):
        model = model.config.to_dict()  # type: ignore[union-attr,operator]
    devices = [find_accelerator(name) for name in options.gpus]
    recipes = {name: recipes_of(peft) for name, peft in pefts.items()}
    updates = Optimizer.of(options.optimizer, options.optimizer_options)
    updates.check_parted(options.tp)
    source = resolve(model)
    state = Compilation(
        source.name,
        source.config,
        lambda base: Bypasses(),
        dtype_name(options.dtype),
        budget=options.budget,
        tp=options.tp,
        costs=find_cost_model(costs_name(options.costs, options.gpus)) if options.tp > 1 else None,
        tp_plan=options.styles,
        sequence_parallel=options.sequence_parallel,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
    )
    folded = run_passes(state, last="fold")
    reports = {
        name: _explained(folded, found, updates, devices, options.find_region)
        for name, found in recipes.items()
    }
    if not options.peers:
        return reports
    return {
        name: _with_peers(report, source.config, recipes[name]) for name, report in reports.items()
    }


def _explained(
    folded: Compilation,
    recipes: Mapping[str, Recipe],
    optimizer: Optimizer,
    devices: Sequence[Accelerator],
    find_region: bool,
) -> Report:
    """The report of a folded model and recipes."""
    planned = _planned(folded, recipes, windows=True)
    setup = Setup(folded.name, folded.config, recipes, folded.budget, folded.tp, optimizer)
    report = build_report(planned, setup)
    if find_region and planned.frontiers is not None:
        report = _with_regions(report, folded, planned, setup)
    if planned.sharded is not None and folded.costs is not None:
        rows = parallel_rows(planned.sharded, made(folded.device_costs()))
        if find_region:
            rows["regions"] = _parallel_regions(folded, recipes)
        report = dataclasses.replace(report, parallel=rows)
    return dataclasses.replace(
        report, fits=tuple(capacity(planned, setup, device) for device in devices)
    )


def _with_regions(
    report: Report, folded: Compilation, planned: PlannedModel, setup: Setup
) -> Report:
    """The report with formulas in the rank and the degree, and where its plan stays the optimum."""
    budget, kinds = folded.budget, made(planned.frontiers).kinds
    rank = rank_of(setup.recipes)

    def at_length(seq: int) -> MemoryPlan:
        found = frontiers(made(planned.training), kinds, budget.batch, seq)
        return found.plan(dataclasses.replace(budget, seq=seq))

    def at_degree(degree: int) -> AtDegree:
        state, then = dataclasses.replace(folded, tp=degree), dataclasses.replace(setup, tp=degree)
        found = planned if degree == folded.tp else _planned(state, setup.recipes)
        peak = peak_moment(found, then)
        return AtDegree(_formulas(found, state, then), storage_key(found), peak)

    degrees: dict[str, tuple[int, ...]] = {}
    if folded.tp > 1:
        formulas, degrees = in_degree(at_degree, folded.tp)
    else:
        formulas = _formulas(planned, folded, setup)
    ranks = None
    if rank is not None:

        def at_rank(other: int) -> MemoryPlan:
            return made(_planned(folded, with_rank(setup.recipes, other)).plan)  # type: ignore[no-any-return]

        ranks = valid_range(at_rank, rank, MOST_RANK)
    return dataclasses.replace(
        report,
        formulas={name: formula_text(formula) for name, formula in formulas.items()},
        region=valid_range(at_length, budget.seq, MOST_TOKENS),
        rank_region=ranks,
        formula_degrees=degrees,
    )


def _formulas(planned: PlannedModel, folded: Compilation, setup: Setup) -> dict[str, sympy.Expr]:
    """The bytes of a step in B and S, and in the rank where there is one, with the same kept."""
    rank = rank_of(setup.recipes)
    if rank is None:
        return step_formulas(planned, setup)
    # The plan is given, and need not be within the budget at other ranks.
    state = dataclasses.replace(folded, budget=MemoryBudget(batch=setup.batch, seq=setup.seq))

    def at_rank(other: int) -> dict[str, sympy.Expr] | None:
        if other == rank:
            return step_formulas(planned, setup)
        found = _planned(state, with_rank(setup.recipes, other))
        plan = replanned(made(planned.plan), made(found.frontiers))
        if plan is None:
            return None
        return step_formulas(dataclasses.replace(found, plan=plan), setup)

    return made(in_rank(at_rank, rank))  # type: ignore[no-any-return]


def _parallel_regions(
    folded: Compilation, recipes: Mapping[str, Recipe]
) -> dict[str, list[dict[str, Any]]]:
    """Where the best strategies change with tokens: as asked, and with one thing otherwise."""

    def at(state: Compilation, then: Mapping[str, Recipe]) -> list[dict[str, Any]]:
        bypasses = _use_of(state, then)
        attached = run_passes(
            dataclasses.replace(state, bypasses=lambda base: bypasses(base).bypasses),
            first="raise",
            last="attach",
        )
        pairs = zip(made(attached.training_model).blocks, made(attached.base).blocks, strict=True)
        layers = list(pairs)

        def searches_at(tokens: int, context: int) -> list[Search]:
            costs = state.device_costs_at(made(state.costs), tokens, context)
            given = (state.tp, costs, True, state.tp_plan, state.sequence_parallel)
            return [search_layer(block, plain, *given) for block, plain in layers]

        return token_regions(searches_at, state.budget.seq)

    found = {"as asked": at(folded, recipes)}
    rank = rank_of(recipes)
    for other in (8, 64, 256):
        if rank is not None and other != rank:
            found[f"rank {other}"] = at(folded, with_rank(recipes, other))
    for degree in (2, 4, 8):
        if degree != folded.tp:
            try:
                found[f"tp {degree}"] = at(dataclasses.replace(folded, tp=degree), recipes)
            except ParallelError:
                continue  # it does not divide the model
    model = folded.costs
    if isinstance(model, SheetModel):
        for link in model.sheet.links:
            if link != model.link_name:
                costs = SheetModel(model.name, model.sheet, link, model.achieved)
                found[link] = at(dataclasses.replace(folded, costs=costs), recipes)
    return found


def _planned(
    folded: Compilation, recipes: Mapping[str, Recipe], windows: bool = False
) -> PlannedModel:
    """What a report of a folded model and recipes accounts for; with windows, of these too."""
    use_of = _use_of(folded, recipes)
    state = dataclasses.replace(folded, bypasses=lambda base: use_of(base).bypasses)
    attached = run_passes(state, first="raise", last="parallelize")
    refusal = ""
    kinds: tuple[LayerKind, ...] = ()
    windowed: MemoryPlan | None = None
    try:
        attached = run_passes(attached, first="differentiate", last="prune")
        kinds = attached.kinds
        if windows:
            through_cache = dataclasses.replace(attached, windows=True)
            windowed = run_passes(through_cache, first="compress", last="rematerialize").plan
        attached = run_passes(attached, first="compress", last="rematerialize")
    except UnsupportedError as error:
        refusal = str(error)
    unraised = made(folded.base)
    return PlannedModel(
        unraised,
        made(attached.base),
        made(attached.local_base),
        attached.training_model,
        kinds,
        attached.frontiers,
        attached.plan,
        attached.training_epilogue[0] if attached.training_epilogue else None,
        use_of(unraised),
        unraised.adapter_dtype,
        made(folded.traced).attention,
        refusal,
        attached.sharded,
        windowed,
    )


def _use_of(
    folded: Compilation, recipes: Mapping[str, Recipe]
) -> Callable[[ModelGraph], AdapterUse]:
    """What the recipes train of a base, by a function of it."""
    model_type = str(folded.config["model_type"])
    return lambda base: adapter_use(base, recipes, model_type, base.adapter_dtype)
