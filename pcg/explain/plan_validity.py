"""Formulas in ranks and degrees, and the regions in which plans and strategies stay optimal.

formulas    in B and S, the rank of adapters, and the tensor-parallel degree
plans       the sequence lengths, and the ranks, with the same memory plan. The plan depends on the
            length, as attention's memory is quadratic in it and most other memory linear, and on
            the rank, by the tensors that bypass networks save and recompute
strategies  the numbers of tokens with the same parallel strategies, as requested and with another
            rank, degree or link
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Any

import sympy

from pcg.errors import MemoryBudgetError, ParallelError
from pcg.explain.formulas import (
    AtDegree,
    in_degree,
    in_rank,
    lengths_of_pieces,
    piecewise_in_length,
    rank_of,
    with_rank,
)
from pcg.explain.parallel_report import token_regions
from pcg.explain.planned_model import PlannedModel, Setup, plan_model
from pcg.explain.report.report import Report
from pcg.explain.step_memory import (
    bytes_at,
    formula_text,
    memory_bytes,
    step_memory,
    storage_key,
)
from pcg.ir.types import RANK
from pcg.parallel.costs.cost_model import SheetModel
from pcg.parallel.search import Search
from pcg.passes.memory.plan import MemoryPlan, replanned
from pcg.passes.shard import Shard

MOST_TOKENS = 2**20
MOST_RANK = 2**12


def with_formulas(report: Report, planned: PlannedModel) -> Report:
    """Return the report with formulas in the rank and the degree, and its plan's region."""
    setup, training = planned.setup, planned.training
    rank = rank_of(setup.recipes)

    def at_length(seq: int) -> MemoryPlan:
        frontiers = training.frontiers.at(setup.options.batch, seq)
        return frontiers.plan(setup.having(seq=seq).options.budget)

    def at_rank(other: int) -> MemoryPlan:
        return plan_model(_with_rank(setup, other)).training.plan

    def at_degree(degree: int) -> AtDegree:
        parted = planned if degree == setup.options.tp else plan_model(setup.having(tp=degree))
        _, moments = step_memory(parted)
        peak = max(moments, key=lambda moment: moment.total_bytes)
        return AtDegree(_formulas(parted), storage_key(parted), peak.label)

    degrees: dict[str, tuple[int, ...]] = {}
    region = valid_range(at_length, setup.options.seq, MOST_TOKENS)
    runs = _runs(planned, *region)
    if setup.options.tp > 1:
        formulas, degrees = in_degree(at_degree, setup.options.tp)
        region = next((low, high) for low, high in runs if low <= setup.options.seq <= high)
    else:
        formulas = piecewise_in_length({run: _formulas(_within(planned, run)) for run in runs})
    rank_region = None
    if rank is not None:
        rank_region = valid_range(at_rank, rank, MOST_RANK)
        if setup.options.tp == 1:
            rank_region = _exact_ranks(planned, formulas, rank, rank_region)
    return dataclasses.replace(
        report,
        formulas={name: formula_text(formula) for name, formula in formulas.items()},
        region=region,
        rank_region=rank_region,
        formula_degrees=degrees,
    )


def _runs(planned: PlannedModel, low: int, high: int) -> list[tuple[int, int]]:
    """Return the runs of lengths in which the planned step has its peak at the same moment."""
    return lengths_of_pieces(
        lambda seq: step_memory(_at_length(planned, seq))[0]["workspace"],
        low,
        high,
        planned.setup.options.batch,
    )


def _at_length(planned: PlannedModel, seq: int) -> PlannedModel:
    return dataclasses.replace(planned, setup=planned.setup.having(seq=seq))


def _within(planned: PlannedModel, run: tuple[int, int]) -> PlannedModel:
    """Return the same plan at a length of a run; the requested length if the run contains it."""
    low, high = run
    is_asked = low <= planned.setup.options.seq <= high
    return planned if is_asked else _at_length(planned, isqrt(low * high))


def _exact_ranks(
    planned: PlannedModel,
    formulas: Mapping[str, sympy.Expr],
    rank: int,
    region: tuple[int, int],
) -> tuple[int, int]:
    """Return the ranks of a region at which the formulas are exact for the requested length."""
    setup = planned.setup

    def is_exact(other: int) -> bool:
        at = {**setup.at, RANK: other}
        sizes = memory_bytes(plan_model(_with_rank(setup, other)))
        return all(bytes_at(formula, at) == sizes[name] for name, formula in formulas.items())

    def end(outer: int) -> int:
        inner = rank
        while inner != outer and not is_exact(outer):
            outer = (inner + outer) // 2 if abs(outer - inner) > 1 else inner
        return outer

    return end(region[0]), end(region[1])


def _with_rank(setup: Setup, rank: int) -> Setup:
    return dataclasses.replace(setup, recipes=with_rank(setup.recipes, rank))


def _formulas(planned: PlannedModel) -> dict[str, sympy.Expr]:
    """Return a plan's bytes in B and S, and in the rank if all recipes share it."""
    rank = rank_of(planned.setup.recipes)
    if rank is None:
        return step_memory(planned)[0]
    # Keep the plan, even if it exceeds the budget at other ranks.
    setup = planned.setup.having(memory_budget=None)

    def at_rank(other: int) -> dict[str, sympy.Expr] | None:
        if other == rank:
            return step_memory(planned)[0]
        ranked = plan_model(_with_rank(setup, other))
        frontiers = ranked.training.frontiers
        plan = replanned(planned.training.plan, frontiers)
        if plan is None:
            return None
        return step_memory(ranked.replanned(ranked.setup, frontiers, plan))[0]

    formulas = in_rank(at_rank, rank)
    assert formulas is not None
    return formulas


def valid_range(plan_at: Callable[[int], MemoryPlan], here: int, most: int) -> tuple[int, int]:
    """Return the least and the largest number, of tokens or a rank, with the same plan.

    The search doubles, then bisects, from the requested number.

    Args:
        plan_at: returns the plan for a number.
        here: the requested number.
        most: the end of the search.
    """

    def saved(number: int) -> object:
        try:
            plan = plan_at(number)
        except MemoryBudgetError:
            return None  # the budget in bytes is too small for any plan
        return plan.layers, [choice.saved for choice in plan.choices], plan.restored

    wanted = saved(here)
    low, high = here, here
    while low > 1 and saved(low // 2) == wanted:
        low //= 2
    other = low // 2
    while low - other > 1:
        middle = (low + other) // 2
        low, other = (middle, other) if saved(middle) == wanted else (low, middle)
    while high < most and saved(high * 2) == wanted:
        high *= 2
    other = high * 2
    while high < most and other - high > 1:
        middle = (high + other) // 2
        high, other = (middle, other) if saved(middle) == wanted else (high, middle)
    return low, max(min(high, most), here)


def parallel_regions(setup: Setup) -> dict[str, list[dict[str, Any]]]:
    """Return the token ranges of the best strategies, as requested and with one setting changed."""
    regions = {"as asked": _token_regions(setup)}
    rank = rank_of(setup.recipes)
    for other in (8, 64, 256):
        if rank is not None and other != rank:
            regions[f"rank {other}"] = _token_regions(_with_rank(setup, other))
    for degree in (2, 4, 8):
        if degree != setup.options.tp:
            try:
                regions[f"tp {degree}"] = _token_regions(setup.having(tp=degree))
            except ParallelError:
                continue  # it does not divide the model
    model = setup.settings.costs
    if isinstance(model, SheetModel):
        for link in model.sheet.links:
            if link != model.link_name:
                costs = SheetModel(model.name, model.sheet, link, model.achieved)
                settings = dataclasses.replace(setup.settings, costs=costs)
                regions[link] = _token_regions(dataclasses.replace(setup, settings=settings))
    return regions


def _token_regions(setup: Setup) -> list[dict[str, Any]]:
    passes, _, attached = setup.attached()
    prepared = passes.parallelize.until(Shard).run(attached)
    settings, model, machine = setup.settings, prepared.training, setup.settings.costs
    assert model is not None
    assert machine is not None

    def searches_at(tokens: int, context: int) -> Sequence[Search]:
        costs = settings.device_costs_at(machine, tokens, context)
        sharding = Shard(setup.options.tp, costs, settings.options.sequence_parallel)
        return sharding.searches(model, prepared, trains=True)

    return token_regions(searches_at, setup.options.seq)
