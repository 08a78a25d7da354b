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
from pcg.options import ExplainOptions, MemoryBudget
from pcg.parallel.costs.accelerators import Accelerator, find_accelerator
from pcg.parallel.costs.catalog import costs_name, find_cost_model
from pcg.parallel.costs.cost_model import SheetModel
from pcg.parallel.search import Search
from pcg.passes.layer_kind import LayerKind
from pcg.passes.memory.plan import MemoryPlan, frontiers, replanned
from pcg.passes.pipeline import Pipeline, Settings, in_order, pipeline
from pcg.passes.sharding.shard import Shard
from pcg.passes.stages import Attached, Base, Sharded, Traced, TrainedModel
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
    costs = find_cost_model(costs_name(options.costs, options.gpus)) if options.tp > 1 else None
    settings = Settings(options, source.name, costs=costs)
    passes = pipeline(settings)
    traced = passes.trace.run(source.config)
    folded = _Folded(source.config, settings, traced, passes.fold.run(traced))
    reports = {
        name: _explained(folded, found, updates, devices, options.find_region)
        for name, found in recipes.items()
    }
    if not options.peers:
        return reports
    return {
        name: _with_peers(report, source.config, recipes[name]) for name, report in reports.items()
    }


@dataclass(frozen=True)
class _Folded:
    """A folded model, before any recipe, and what it is explained for."""

    config: Mapping[str, Any]
    settings: Settings
    traced: Traced
    base: Base

    @property
    def budget(self) -> MemoryBudget:
        return self.settings.options.budget

    @property
    def tp(self) -> int:
        return self.settings.options.tp

    def having(self, **options: Any) -> _Folded:
        """The same explained for other options."""
        changed = dataclasses.replace(self.settings.options, **options)
        return dataclasses.replace(
            self, settings=dataclasses.replace(self.settings, options=changed)
        )

    def attached(self, recipes: Mapping[str, Recipe]) -> tuple[Pipeline, Base, Attached]:
        """The pipeline for these recipes, and the model without and with their bypass networks."""
        use = self.use_of(recipes)
        settings = dataclasses.replace(self.settings, bypasses=lambda base: use(base).bypasses)
        passes = pipeline(settings)
        base = passes.raise_operators.run(self.base)
        return passes, base, passes.attach.run(base)

    def use_of(self, recipes: Mapping[str, Recipe]) -> Callable[[ModelGraph], AdapterUse]:
        """What the recipes train of a base, by a function of it."""
        model_type = str(self.config["model_type"])
        return lambda base: adapter_use(base, recipes, model_type, base.adapter_dtype)


def _explained(
    folded: _Folded,
    recipes: Mapping[str, Recipe],
    optimizer: Optimizer,
    devices: Sequence[Accelerator],
    find_region: bool,
) -> Report:
    """The report of a folded model and recipes."""
    planned = _planned(folded, recipes, windows=True)
    setup = Setup(
        folded.settings.model, folded.config, recipes, folded.budget, folded.tp, optimizer
    )
    report = build_report(planned, setup)
    if find_region and planned.frontiers is not None:
        report = _with_regions(report, folded, planned, setup)
    costs = folded.settings.device_costs
    if planned.sharded is not None and costs is not None:
        rows = parallel_rows(planned.sharded, costs)
        if find_region:
            rows["regions"] = _parallel_regions(folded, recipes)
        report = dataclasses.replace(report, parallel=rows)
    return dataclasses.replace(
        report, fits=tuple(capacity(planned, setup, device) for device in devices)
    )


def _with_regions(report: Report, folded: _Folded, planned: PlannedModel, setup: Setup) -> Report:
    """The report with formulas in the rank and the degree, and where its plan stays the optimum."""
    budget, model, known = folded.budget, planned.training, planned.frontiers
    assert model is not None
    assert known is not None
    rank = rank_of(setup.recipes)

    def at_length(seq: int) -> MemoryPlan:
        found = frontiers(model, known.kinds, budget.batch, seq)
        return found.plan(dataclasses.replace(budget, seq=seq))

    def at_degree(degree: int) -> AtDegree:
        state, then = folded.having(tp=degree), dataclasses.replace(setup, tp=degree)
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
            plan = _planned(folded, with_rank(setup.recipes, other)).plan
            assert plan is not None
            return plan

        ranks = valid_range(at_rank, rank, MOST_RANK)
    return dataclasses.replace(
        report,
        formulas={name: formula_text(formula) for name, formula in formulas.items()},
        region=valid_range(at_length, budget.seq, MOST_TOKENS),
        rank_region=ranks,
        formula_degrees=degrees,
    )


def _formulas(planned: PlannedModel, folded: _Folded, setup: Setup) -> dict[str, sympy.Expr]:
    """The bytes of a step in B and S, and in the rank where there is one, with the same kept."""
    rank = rank_of(setup.recipes)
    if rank is None:
        return step_formulas(planned, setup)
    # The plan is given, and need not be within the budget at other ranks.
    state = folded.having(memory_budget=None, batch=setup.batch, seq=setup.seq)

    def at_rank(other: int) -> dict[str, sympy.Expr] | None:
        if other == rank:
            return step_formulas(planned, setup)
        found = _planned(state, with_rank(setup.recipes, other))
        assert planned.plan is not None
        assert found.frontiers is not None
        plan = replanned(planned.plan, found.frontiers)
        if plan is None:
            return None
        return step_formulas(dataclasses.replace(found, plan=in_order(plan)), setup)

    formulas = in_rank(at_rank, rank)
    assert formulas is not None
    return formulas


def _parallel_regions(
    folded: _Folded, recipes: Mapping[str, Recipe]
) -> dict[str, list[dict[str, Any]]]:
    """Where the best strategies change with tokens: as asked, and with one thing otherwise."""

    def at(state: _Folded, then: Mapping[str, Recipe]) -> list[dict[str, Any]]:
        passes, _, attached = state.attached(then)
        prepared = passes.parallelize.until(Shard).run(attached)
        model, machine = prepared.training, state.settings.costs
        assert model is not None
        assert machine is not None

        def searches_at(tokens: int, context: int) -> Sequence[Search]:
            costs = state.settings.device_costs_at(machine, tokens, context)
            sharding = Shard(state.tp, costs, state.settings.options.sequence_parallel)
            return sharding.searches(model, prepared, trains=True)

        return token_regions(searches_at, state.budget.seq)

    found = {"as asked": at(folded, recipes)}
    rank = rank_of(recipes)
    for other in (8, 64, 256):
        if rank is not None and other != rank:
            found[f"rank {other}"] = at(folded, with_rank(recipes, other))
    for degree in (2, 4, 8):
        if degree != folded.tp:
            try:
                found[f"tp {degree}"] = at(folded.having(tp=degree), recipes)
            except ParallelError:
                continue  # it does not divide the model
    model = folded.settings.costs
    if isinstance(model, SheetModel):
        for link in model.sheet.links:
            if link != model.link_name:
                costs = SheetModel(model.name, model.sheet, link, model.achieved)
                settings = dataclasses.replace(folded.settings, costs=costs)
                found[link] = at(dataclasses.replace(folded, settings=settings), recipes)
    return found


def _planned(folded: _Folded, recipes: Mapping[str, Recipe], windows: bool = False) -> PlannedModel:
    """What a report of a folded model and recipes accounts for; with windows, of these too."""
    passes, base, attached = folded.attached(recipes)
    sharded = passes.parallelize.run(attached)
    refusal = ""
    kinds: tuple[LayerKind, ...] = ()
    windowed: MemoryPlan | None = None
    trained: TrainedModel | None = None
    try:
        pruned = passes.prune.run(passes.differentiate.run(sharded))
        kinds = () if pruned.training is None else pruned.training.kinds
        if windows:
            through_cache = pipeline(dataclasses.replace(folded.settings, windows=True))
            compressed = through_cache.compress.run(pruned)
            found = through_cache.rematerialize.run(compressed).training
            windowed = None if found is None else found.plan
        trained = passes.rematerialize.run(passes.compress.run(pruned)).training
    except UnsupportedError as error:
        refusal = str(error)
    unraised = folded.base.model
    return PlannedModel(
        unraised,
        base.model,
        sharded.base,
        sharded.training,
        kinds,
        None if trained is None else trained.frontiers,
        None if trained is None else trained.plan,
        None if trained is None else trained.epilogue,
        folded.use_of(recipes)(unraised),
        unraised.adapter_dtype,
        folded.traced.trace.attention,
        refusal,
        sharded if isinstance(sharded, Sharded) else None,
        windowed,
    )
