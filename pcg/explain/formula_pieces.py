"""Formulas in S over a region of lengths: a piece for each moment of the step that is the fullest.

The workspace is that of the fullest moment, which changes with the length: attention's grows with
S², most else with S, and the loss's chunk does not grow. A formula of one moment is less than the
workspace, even negative, where another moment is fuller. So pieces are found as an upper envelope
is: the formulas at both corners are compared where they cross, and there with the moment that is
the fullest in truth, until every piece gives the very bytes at both of its corners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from math import isqrt

import sympy

from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.types import CONTEXT


def lengths_of_pieces(
    formula_at: Callable[[int], sympy.Expr], low: int, high: int, batch: int
) -> list[tuple[int, int]]:
    """Return the runs of lengths, from the least on, over each of which one formula is exact.

    Args:
        formula_at: returns the formula in B and S that is exact at a length.
        low: the least length.
        high: the largest length.
        batch: the number of sequences.
    """
    made = cache(formula_at)

    def value(formula: sympy.Expr, seq: int) -> sympy.Expr:
        return formula.subs({SEQUENCES: batch, CONTEXT: seq})

    def is_exact(formula: sympy.Expr, seq: int) -> bool:
        return bool(value(formula, seq) == value(made(seq), seq))

    def runs(low: int, high: int) -> list[tuple[sympy.Expr, int]]:
        first, last = made(low), made(high)
        cross = isqrt(low * high)
        if is_exact(first, high) and is_exact(first, cross):
            return [(first, high)]
        if value(first, low) > value(last, low) and value(first, high) < value(last, high):
            cross = _last(lambda seq: bool(value(first, seq) >= value(last, seq)), low, high)
        cross = min(cross, high - 1)
        left = [(first, cross)] if is_exact(first, cross) else runs(low, cross)
        right = [(last, high)] if is_exact(last, cross + 1) else runs(cross + 1, high)
        return left + right

    found: list[tuple[sympy.Expr, int]] = []
    for formula, end in runs(low, high):
        if found and (found[-1][0] == formula or is_exact(found[-1][0], end)):
            found[-1] = (found[-1][0], end)
        else:
            found.append((formula, end))
    ends = [low - 1, *(end for _, end in found)]
    return [(before + 1, end) for before, end in pairwise(ends)]


def piecewise_in_length(
    pieces: Mapping[tuple[int, int], Mapping[str, sympy.Expr]],
) -> dict[str, sympy.Expr]:
    """Return the formulas of each run of lengths as one formula of each kind of memory."""
    first = next(iter(pieces.values()))
    found = {}
    for name in first:
        formulas = [(high, formulas[name]) for (_, high), formulas in pieces.items()]
        ends = [
            (formula, high >= CONTEXT)
            for index, (high, formula) in enumerate(formulas[:-1])
            if formulas[index + 1][1] != formula
        ]
        last = formulas[-1][1]
        found[name] = sympy.Piecewise(*ends, (last, True)) if ends else last
    return found


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last number at which something holds that does at `low` and does not at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
