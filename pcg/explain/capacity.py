"""The capacity of an accelerator: the largest steps that fit, and advice for one that does not.

A step's total grows with the batch and with the sequence length, so the largest that fits is found
by interpolation between one that fits and one that does not. Every size is planned anew.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable

from pcg.errors import MemoryBudgetError
from pcg.explain.planned_model import PlannedModel, Setup
from pcg.explain.report_data import GpuCapacity
from pcg.explain.step_memory import memory_bytes
from pcg.parallel.costs.accelerators import RESERVED_BYTES, Accelerator
from pcg.passes.memory.plan import frontiers

MOST = 2**20
"""The largest batch and sequence length that are tried."""


def capacity(planned: PlannedModel, device: Accelerator) -> GpuCapacity:
    """Return the steps that fit a device."""
    usable = device.memory_bytes - RESERVED_BYTES
    least = planned.setup.having(memory_budget=0)

    def largest(field: str, setup: Setup) -> int:
        return _largest(lambda size: _total(planned, setup.having(**{field: size})), usable)

    found = GpuCapacity(
        device.name,
        device.memory_bytes,
        usable,
        memory_bytes(planned)["total"] <= usable,
        largest("batch", planned.setup),
        largest("seq", planned.setup),
        largest("batch", least),
        largest("seq", least),
        (),
    )
    return dataclasses.replace(found, advice=tuple(_advice(planned, found)))


def _advice(planned: PlannedModel, found: GpuCapacity) -> list[str]:
    """Return options, each of which lets the step fit."""
    if found.fits:
        return []
    advice = []
    budget = _budget_that_fits(planned, found.usable_bytes)
    if budget is not None:
        advice.append(f"--memory-budget {budget:g}")
    if found.largest_batch:
        advice.append(f"--batch {found.largest_batch}")
    elif found.least_largest_batch:
        advice.append(f"--batch {found.least_largest_batch} --memory-budget 0")
    if found.largest_seq:
        advice.append(f"--seq {found.largest_seq}")
    elif found.least_largest_seq:
        advice.append(f"--seq {found.least_largest_seq} --memory-budget 0")
    if memory_bytes(planned)["weights"] > found.usable_bytes:
        advice.append("a GPU with more memory: the weights alone are too large for it")
    return advice


def _budget_that_fits(planned: PlannedModel, usable_bytes: int) -> float | None:
    """Return the largest memory budget, in hundredths, at which the step fits; None for none."""

    def fits(hundredths: int) -> bool:
        setup = planned.setup.having(memory_budget=hundredths / 100)
        return _total(planned, setup) <= usable_bytes

    if planned.trained is None or not fits(0):
        return None
    return bisect_left(range(1, 100), True, key=lambda hundredths: not fits(hundredths)) / 100


def _total(planned: PlannedModel, setup: Setup) -> int:
    """Return the bytes of a step that is planned for a setup."""
    if planned.trained is None:
        return memory_bytes(dataclasses.replace(planned, setup=setup))["total"]
    model, kinds = planned.trained.model, planned.trained.frontiers.kinds
    found = frontiers(model, kinds, setup.options.batch, setup.options.seq)
    return memory_bytes(planned.replanned(setup, found, found.plan(setup.options.budget)))["total"]


def _largest(total: Callable[[int], int], limit: int) -> int:
    """Return the largest size whose total is within the limit; 0 for none."""

    def over(size: int) -> int:
        try:
            return total(size) - limit
        except MemoryBudgetError:
            return limit  # no plan is within a budget in bytes

    low, low_over = 0, -limit
    high, high_over = 1, over(1)
    while high_over <= 0:
        if high >= MOST:
            return high
        low, low_over = high, high_over
        high = min(high * 8, MOST)
        high_over = over(high)
    while high - low > 1:
        guess = low + round((high - low) * -low_over / (high_over - low_over))
        middle = min(max(guess, low + 1), high - 1)
        found = over(middle)
        if found <= 0:
            low, low_over = middle, found
        else:
            high, high_over = middle, found
    return low
