"""The capacity of an accelerator: the largest steps that fit, and advice for one that does not.

A step's total grows with the batch and with the sequence length, so the largest that fits is found
by interpolation between one that fits and one that does not. Every size is planned anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pcg.errors import MemoryBudgetError
from pcg.explain.report_data import GpuCapacity
from pcg.explain.step_memory import PlannedModel, Setup, memory_bytes
from pcg.options import MemoryBudget
from pcg.parallel.costs.accelerators import RESERVED_BYTES, Accelerator
from pcg.passes.memory.plan import frontiers
from pcg.passes.pipeline import in_order

MOST = 2**20
"""The largest batch and sequence length that are tried."""


def capacity(planned: PlannedModel, setup: Setup, device: Accelerator) -> GpuCapacity:
    """Return the steps that fit a device.

    Args:
        planned: the model.
        setup: the step that should fit.
        device: the accelerator.
    """
    usable = device.memory_bytes - RESERVED_BYTES
    now = memory_bytes(planned, setup)["total"]

    def largest(field: str, budget: MemoryBudget) -> int:
        def total(size: int) -> int:
            return _total(planned, setup, dataclasses.replace(budget, **{field: size}))

        return _largest(total, usable)

    least = dataclasses.replace(setup.budget, share=0.0, size_bytes=None)
    found = GpuCapacity(
        device.name,
        device.memory_bytes,
        usable,
        now <= usable,
        largest("batch", setup.budget),
        largest("seq", setup.budget),
        largest("batch", least),
        largest("seq", least),
        (),
    )
    return dataclasses.replace(found, advice=tuple(_advice(planned, setup, found)))


def _advice(planned: PlannedModel, setup: Setup, found: GpuCapacity) -> list[str]:
    """Return options, each of which lets the step fit."""
    if found.fits:
        return []
    advice = []
    sizes = memory_bytes(planned, setup)
    budget = _budget_that_fits(planned, setup, found.usable_bytes)
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
    if sizes["weights"] > found.usable_bytes:
        advice.append("a GPU with more memory: the weights alone are too large for it")
    return advice


def _budget_that_fits(planned: PlannedModel, setup: Setup, usable_bytes: int) -> float | None:
    """Return the largest memory budget, in hundredths, at which the step fits; None for none."""

    def fits(hundredths: int) -> bool:
        budget = dataclasses.replace(setup.budget, share=hundredths / 100, size_bytes=None)
        return _total(planned, setup, budget) <= usable_bytes

    if planned.plan is None or not fits(0):
        return None
    low, high = 0, 100
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low / 100


def _total(planned: PlannedModel, setup: Setup, budget: MemoryBudget) -> int:
    """Return the bytes of a step that is planned for this budget and batch."""
    other = dataclasses.replace(setup, budget=budget)
    if planned.plan is None or planned.training is None or planned.frontiers is None:
        return memory_bytes(planned, other)["total"]
    found = frontiers(planned.training, planned.frontiers.kinds, budget.batch, budget.seq)
    replanned = dataclasses.replace(planned, frontiers=found, plan=in_order(found.plan(budget)))
    return memory_bytes(replanned, other)["total"]


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
