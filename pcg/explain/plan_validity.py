"""The range in which a plan stays the optimum: sequence lengths, or adapters' ranks.

The plan depends on the sequence length, as attention grows with its square and most else with its
first power, and on the rank by what bypass networks save and recompute. The bounds of the range are
found by doubling and bisection from the number that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from pcg.errors import MemoryBudgetError
from pcg.passes.memory.plan import MemoryPlan

MOST_TOKENS = 2**20
MOST_RANK = 2**12


def valid_range(plan_at: Callable[[int], MemoryPlan], here: int, most: int) -> tuple[int, int]:
    """Return the least and the largest number, of tokens or a rank, with the same plan.

    Args:
        plan_at: returns the plan for a number.
        here: the number that was asked for.
        most: the end of the search.
    """

    def saved(number: int) -> object:
        try:
            plan = plan_at(number)
        except MemoryBudgetError:
            return None  # no plan is within a budget in bytes
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
