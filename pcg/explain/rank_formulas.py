"""The bytes of a step as formulas in the rank, too.

    bytes(B, S, r) = bytes(B, S, r0) + (r - r0) · (bytes(B, S, r0 + 1) - bytes(B, S, r0))

Graphs have concrete ranks. No tensor has a rank for more than one of its dims, so with the same
tensors kept its bytes, and any sum of such, are on a straight line in r: two ranks give it, and a
third shows where a sum is none, as the workspace where another moment becomes the fullest, or where
collectives overlap otherwise. The total is the sum of the formulas, whichever have r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy

from pcg.ir.types import RANK
from pcg.peft.recipe import Recipe


def rank_of(recipes: Mapping[str, Recipe]) -> int | None:
    """The one rank that all recipes have at all modules; None where there is none such."""
    ranks = {recipe.one_rank for recipe in recipes.values()}
    return ranks.pop() if len(ranks) == 1 else None


def with_rank(recipes: Mapping[str, Recipe], rank: int) -> dict[str, Recipe]:
    """The recipes with another rank."""
    return {name: recipe.with_rank(rank) for name, recipe in recipes.items()}


def in_rank(
    formulas_at: Callable[[int], Mapping[str, sympy.Expr] | None], rank: int
) -> dict[str, sympy.Expr] | None:
    """Formulas in B, S and r, that are exact at the rank; those that are no line in r without r.

    Args:
        formulas_at: by kind of memory, in B and S, and `total` their sum, with the same tensors
            kept at a rank; None where there are none.
        rank: that was asked for.
    """
    here, above, further = (formulas_at(rank + more) for more in range(3))
    if here is None:
        return None
    if above is None or further is None:
        return dict(here)
    found = {}
    for name, formula in here.items():
        slope = sympy.expand(above[name] - formula)
        is_line = sympy.expand(further[name] - above[name] - slope) == 0
        found[name] = sympy.expand(formula + (RANK - rank) * slope) if is_line else formula
    kinds = (formula for name, formula in found.items() if name != "total")
    found["total"] = sympy.expand(sum(kinds))
    return found
