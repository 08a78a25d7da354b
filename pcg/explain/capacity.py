"""Capacity of an accelerator: the largest steps that fit, and advice if a step does not fit.

A step's total grows with the batch and with the sequence length. The largest size that fits is
interpolated between a size that fits and a size that does not; each size gets its own plan.
Sequences do not exceed the positions of the model.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from pcg.errors import FinetuneError, MemoryBudgetError, ParallelError, UnsupportedError
from pcg.explain.planned_model import PlannedModel, Setup, plan_model
from pcg.explain.report.report_data import GpuCapacity
from pcg.explain.step_memory import memory_bytes
from pcg.parallel.costs.accelerators import ACCELERATORS, RESERVED_BYTES, Accelerator
from pcg.parallel.costs.catalog import costs_name, find_cost_model

MOST = 2**20
"""The largest batch and sequence length of the search."""
_DEGREES = (2, 4, 8, 16)
"""Degrees of tensor parallelism for advice."""


def usable_bytes(device: Accelerator) -> int:
    """Return a device's memory without the reserve."""
    return device.memory_bytes - RESERVED_BYTES


def gpus_that_hold(planned: PlannedModel) -> tuple[str, ...]:
    """Return the names of all known GPUs that can hold a rank's step."""
    total = memory_bytes(planned)["total"]
    return tuple(name for name, gpu in ACCELERATORS.items() if total <= usable_bytes(gpu))


def capacities(planned: PlannedModel, devices: Sequence[Accelerator]) -> tuple[GpuCapacity, ...]:
    """Return the steps that fit each device."""
    over_ranks = _OverRanks(planned, [device.name for device in devices])
    return tuple(_capacity(planned, device, over_ranks) for device in devices)


class _OverRanks:
    def __init__(self, planned: PlannedModel, gpus: Sequence[str]) -> None:
        self._planned = planned
        self._gpus = gpus
        self._found: dict[int, PlannedModel | None] = {}

    def at(self, degree: int) -> PlannedModel | None:
        """Plan the step over `degree` ranks; return None if they cannot run or train it."""
        if degree not in self._found:
            self._found[degree] = self._plan(degree)
        return self._found[degree]

    def _plan(self, degree: int) -> PlannedModel | None:
        setup = self._planned.setup
        costs = setup.settings.costs or find_cost_model(costs_name(None, self._gpus))
        settings = dataclasses.replace(setup.settings, costs=costs)
        try:
            setup.optimizer.check_parted(degree)
            parted = plan_model(dataclasses.replace(setup, settings=settings).having(tp=degree))
        except (FinetuneError, MemoryBudgetError, ParallelError, UnsupportedError):
            return None
        return None if parted.trained is None and self._planned.trained is not None else parted


def _capacity(planned: PlannedModel, device: Accelerator, over_ranks: _OverRanks) -> GpuCapacity:
    usable = usable_bytes(device)
    least = planned.setup.having(memory_budget=0)
    capacity = GpuCapacity(
        device.name,
        device.memory_bytes,
        usable,
        memory_bytes(planned)["total"] <= usable,
        _largest_batch(planned, planned.setup, usable),
        _largest_seq(planned, planned.setup, usable),
        _largest_batch(planned, least, usable),
        _largest_seq(planned, least, usable),
        (),
    )
    if capacity.fits:
        return capacity
    advice = [*_on_these_ranks(planned, capacity), *_on_more_ranks(planned, usable, over_ranks)]
    if not advice:
        advice = ["a GPU with more memory: the weights alone are too large for it"]
    return dataclasses.replace(capacity, advice=tuple(advice))


def _on_these_ranks(planned: PlannedModel, capacity: GpuCapacity) -> Iterator[str]:
    """Yield options that make the step fit, each by itself."""
    budget = _budget_that_fits(planned, capacity.usable_bytes)
    if budget is not None:
        yield f"--memory-budget {budget:g}"
    if capacity.largest_batch:
        yield f"--batch {capacity.largest_batch}"
    if budget is None and capacity.least_largest_batch > capacity.largest_batch:
        yield f"--batch {capacity.least_largest_batch} --memory-budget 0"
    if capacity.largest_seq:
        yield f"--seq {capacity.largest_seq}"
    elif capacity.least_largest_seq:
        yield f"--seq {capacity.least_largest_seq} --memory-budget 0"


def _on_more_ranks(planned: PlannedModel, usable: int, over_ranks: _OverRanks) -> Iterator[str]:
    """Yield the fewest ranks over which the step fits, or a smaller step over more ranks."""
    tp = planned.setup.options.tp
    weights = memory_bytes(planned)["weights"]
    smaller = ""
    for degree in (more for more in _DEGREES if more > tp):
        # A rank holds at least its part of the weights.
        parted = over_ranks.at(degree) if weights * tp // degree <= usable else None
        if parted is None:
            continue
        if memory_bytes(parted)["total"] <= usable:
            yield f"--tp {degree}"
            return
        options = "" if smaller else _smaller_step(parted, usable)
        smaller = f"--tp {degree} {options}" if options else smaller
    if smaller:
        yield smaller


def _smaller_step(planned: PlannedModel, usable: int) -> str:
    """Return options that make a step fit the memory; empty if none do."""
    budget = _budget_that_fits(planned, usable)
    if budget is not None:
        return f"--memory-budget {budget:g}"
    least = planned.setup.having(memory_budget=0)
    batch = _largest_batch(planned, least, usable)
    return f"--batch {batch} --memory-budget 0" if batch else ""


def _largest_batch(planned: PlannedModel, setup: Setup, usable: int) -> int:
    return _largest(lambda size: _total(planned, setup.having(batch=size)), usable, MOST)


def _largest_seq(planned: PlannedModel, setup: Setup, usable: int) -> int:
    most = setup.positions or MOST
    return _largest(lambda size: _total(planned, setup.having(seq=size)), usable, most)


def _budget_that_fits(planned: PlannedModel, usable_bytes: int) -> float | None:
    """Return the largest memory budget, in hundredths, at which the step fits, or None."""

    def fits(hundredths: int) -> bool:
        setup = planned.setup.having(memory_budget=hundredths / 100)
        return _total(planned, setup) <= usable_bytes

    if planned.trained is None or not fits(0):
        return None
    return bisect_left(range(1, 100), True, key=lambda hundredths: not fits(hundredths)) / 100


def _total(planned: PlannedModel, setup: Setup) -> int:
    if planned.trained is None:
        return memory_bytes(dataclasses.replace(planned, setup=setup))["total"]
    frontiers = planned.trained.frontiers.at(setup.options.batch, setup.options.seq)
    return memory_bytes(planned.replanned(setup, frontiers, frontiers.plan(setup.options.budget)))[
        "total"
    ]


def _largest(total: Callable[[int], int], limit: int, most: int) -> int:
    """Return the largest size, up to `most`, with a total within a limit; 0 if none fits."""

    def over(size: int) -> int:
        try:
            return total(size) - limit
        except MemoryBudgetError:
            return limit  # the budget in bytes is too small for any plan

    low, low_over = 0, -limit
    high, high_over = 1, over(1)
    while high_over <= 0:
        if high >= most:
            return high
        low, low_over = high, high_over
        high = min(high * 8, most)
        high_over = over(high)
    return largest_between(over, (low, low_over), (high, high_over))


def largest_between(over: Callable[[int], int], low: tuple[int, int], high: tuple[int, int]) -> int:
    """Return the largest size that fits, by interpolation: bytes are nearly linear in the size.

    Args:
        over: returns the bytes of a size beyond the limit; at most 0 if it fits.
        low: a size that fits, and its `over`.
        high: a size that does not fit, and its `over`.
    """
    while high[0] - low[0] > 1:
        guess = low[0] + round((high[0] - low[0]) * -low[1] / (high[1] - low[1]))
        middle = min(max(guess, low[0] + 1), high[0] - 1)
        excess = over(middle)
        if excess <= 0:
            low = middle, excess
        else:
            high = middle, excess
    return low[0]
