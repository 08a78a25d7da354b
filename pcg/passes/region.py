"""Where a plan stays the optimum: the sequence lengths at which planning gives the same plan.

Bytes grow with the tokens, all at the same rate but for what no token has, and so do products;
attention alone grows faster, with the square of the sequence. So the plan depends on the length.
The bounds are found by doubling and bisection from the length that was asked for; MOST is where the
search ends.
"""

from __future__ import annotations

import dataclasses

from pcg.errors import MemoryBudgetError
from pcg.ir.memory_budget import MemoryBudget
from pcg.ir.program import ModelGraph
from pcg.passes.plan import Frontiers, frontiers

MOST = 2**20


def region(model: ModelGraph, found: Frontiers, budget: MemoryBudget) -> tuple[int, int]:
    """The shortest and the longest sequence, in tokens, with the plan of the budget's own.

    Args:
        model: with bypass networks attached.
        found: its frontiers.
        budget: at its batch.
    """

    def saved(seq: int) -> object:
        at = dataclasses.replace(budget, seq=seq)
        try:
            plan = frontiers(model, found.kinds, at.batch, seq).plan(at)
        except MemoryBudgetError:
            return None  # so long a sequence keeps within no budget of that many bytes
        return plan.layers, [choice.saved for choice in plan.choices]

    here = saved(budget.seq)
    low, high = budget.seq, budget.seq
    while low > 1 and saved(low // 2) == here:
        low //= 2
    other = low // 2
    while low - other > 1:
        middle = (low + other) // 2
        low, other = (middle, other) if saved(middle) == here else (low, middle)
    while high < MOST and saved(high * 2) == here:
        high *= 2
    other = high * 2
    while high < MOST and other - high > 1:
        middle = (high + other) // 2
        high, other = (middle, other) if saved(middle) == here else (high, middle)
    return low, min(high, MOST)
