"""The columns of the front's table, for text and for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pcg.plan.candidate import Candidate
from pcg.plan.plan_data import PlanData
from pcg.units import gib

Cell = Callable[[Candidate], str]
MACHINE = "machine"
"""The column of names; all others hold numbers."""


def front_columns(plan: PlanData) -> Mapping[str, Cell]:
    """Return the columns that the plan has anything for, by their heads."""
    front, workload = plan.front, plan.workload
    columns: dict[str, Cell] = {
        MACHINE: lambda one: f"{one.machine.gpus}×{one.machine.gpu}",
        "tp": lambda one: str(one.machine.tp),
    }
    if len({one.machine.dtype for one in front}) > 1:
        columns["dtype"] = lambda one: one.machine.dtype
    if any(one.machine.shard_base for one in front):
        columns["base"] = lambda one: (
            f"{one.machine.replicas} parts" if one.machine.shard_base else "whole"
        )
    columns["GiB/rank"] = lambda one: gib(one.memory_bytes["total"])
    if workload.training is not None:
        columns["batch"] = _batch
        if any(one.choice is not None and one.choice.budget < 1 for one in front):
            columns["budget"] = lambda one: f"{one.choice.budget:g}" if one.choice else "–"
        columns["step s"] = lambda one: _number(one.step_s)
        columns["tuned tok/s"] = lambda one: _number(one.finetuning_tokens_per_s)
    if workload.serving is not None:
        columns["TPOT ms"] = lambda one: _number(1e3 * one.load.tpot_s if one.load else None)
        columns["TTFT ms"] = lambda one: _number(1e3 * one.load.ttft_s if one.load else None)
        columns["max req/s"] = lambda one: _number(one.sustained_per_s)
    if any(one.dollars_per_hour is not None for one in front):
        columns["$/h"] = lambda one: _dollars(one.dollars_per_hour)
        columns["$/M tokens"] = lambda one: _dollars(one.dollars_per_million(_made(one)))
    return columns


def price_words(plan: PlanData) -> str:
    """Return what a million tokens are; empty without prices."""
    if all(one.dollars_per_hour is None for one in plan.front):
        return ""
    made = "finetuned" if plan.workload.training is not None else "generated"
    return f"$/M tokens: the whole machine's price for a million {made} tokens"


def _made(one: Candidate) -> float | None:
    """Return the tokens a second that the price of a million is of."""
    return one.output_tokens_per_s if one.choice is None else one.finetuning_tokens_per_s


def _batch(one: Candidate) -> str:
    choice = one.choice
    if choice is None:
        return "–"
    return f"{choice.accumulation}×{choice.batch}" if choice.accumulation > 1 else f"{choice.batch}"


def _number(value: float | None) -> str:
    """Return a number with three digits at least."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _dollars(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
