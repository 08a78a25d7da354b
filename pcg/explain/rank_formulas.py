"""The bytes of a step as formulas in the rank, too.

    bytes(B, S, r) = bytes(B, S, r0) + (r - r0) · (bytes(B, S, r0 + 1) - bytes(B, S, r0))

Graphs have concrete ranks. No tensor has more than one dim of a rank's size, so that the bytes of
the same saved tensors are linear in r: two ranks determine the line, and a third checks it. A sum
need not be linear, as the workspace if another moment becomes the peak. The total is the sum of the
formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy

from pcg.ir.types import RANK
from pcg.peft.recipe import Recipe


def rank_of(recipes: Mapping[str, Recipe]) -> int | None:
    """Return the one rank that all recipes have at all modules; None if ranks differ."""
    ranks = {recipe.one_rank for recipe in recipes.values()}
    return ranks.pop() if len(ranks) == 1 else None


def with_rank(recipes: Mapping[str, Recipe], rank: int) -> dict[str, Recipe]:
    """Return the recipes with another rank."""
    return {name: recipe.with_rank(rank) for name, recipe in recipes.items()}


def in_rank(
    formulas_at: Callable[[int], Mapping[str, sympy.Expr] | None], rank: int
) -> dict[str, sympy.Expr] | None:
    """Return formulas in B, S and r that are exact at the rank; non-linear ones have no r.

    Args:
        formulas_at: returns the formulas in B and S of each kind of memory, and `total`, at a rank
            with the same saved tensors; None where there is no such plan.
        rank: the rank that was asked for.
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
