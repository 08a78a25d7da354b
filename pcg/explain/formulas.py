"""Formulas of a step's bytes in B and S, the adapters' rank r, and the tensor-parallel degree tp.

    bytes(B, S, r)  = bytes(B, S, r0) + (r - r0) · (bytes(B, S, r0 + 1) - bytes(B, S, r0))
    bytes(B, S, tp) = whole + parted / tp

Rank. Graphs have concrete ranks. No tensor has two dims of a rank's size, so the bytes of the same
saved tensors are linear in r: two ranks determine the line, and a third checks it. The workspace is
not linear if its peak moves to another moment.

Degree. A rank of the group holds each tensor whole or in one of tp equal parts. Over degrees that
save the same tensors in the same layouts, any sum of bytes has this form: two degrees determine
it, and every other degree checks it. If ranks hold parts of the tokens, `whole` and `parted` are
formulas in ceil(B S / tp).

The form changes with the degree if there are fewer KV heads than ranks (each rank then has one
head), if the degree does not divide the vocabulary (each rank has all of it), if the search chooses
another plan, or if the peak moves. A formula therefore has a piece for each run of degrees with the
same form, and is exact at all degrees that divide the model:

    Piecewise((first, tp <= 8), (then, True))

The total is the sum of the formulas.

Length. Formulas over a region of lengths have a piece for each moment that is the step's peak. The
workspace is that of the peak, which changes with the length: attention's grows with S², most others
with S, and the loss's chunk is constant. Below the peak, the formula of a moment underestimates the
workspace and may be negative. `lengths_of_pieces` computes an upper envelope: it compares the
formulas of both ends at their crossing with the true peak, and recurses until every piece is exact
at both of its ends.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import isqrt

import sympy

from pcg.errors import MemoryBudgetError, ParallelError
from pcg.ir.analysis.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.ir.types import CONTEXT, RANK
from pcg.peft.recipe import Recipe

DEGREE = sympy.Symbol("tp", integer=True, positive=True)
DEGREES = (2, 4, 8, 16, 32, 64)

_ROWS = sympy.Symbol("rows", integer=True, positive=True)
"""The tokens of a rank's part, at any degree."""


def rank_of(recipes: Mapping[str, Recipe]) -> int | None:
    """Return the common rank of all recipes at all modules; None if ranks differ."""
    ranks = {recipe.one_rank for recipe in recipes.values()}
    return ranks.pop() if len(ranks) == 1 else None


def with_rank(recipes: Mapping[str, Recipe], rank: int) -> dict[str, Recipe]:
    """Return the recipes with another rank."""
    return {name: recipe.with_rank(rank) for name, recipe in recipes.items()}


def in_rank(
    formulas_at: Callable[[int], Mapping[str, sympy.Expr] | None], rank: int
) -> dict[str, sympy.Expr] | None:
    """Return exact formulas in B, S and r at the rank; non-linear formulas omit r.

    Args:
        formulas_at: returns the formulas in B and S of each kind of memory, and `total`, at a rank
            with the same saved tensors; None if no such plan exists.
        rank: the requested rank.
    """
    here, above, further = (formulas_at(rank + more) for more in range(3))
    if here is None:
        return None
    if above is None or further is None:
        return dict(here)
    formulas = {}
    for name, formula in here.items():
        slope = sympy.expand(above[name] - formula)
        is_line = sympy.expand(further[name] - above[name] - slope) == 0
        formulas[name] = sympy.expand(formula + (RANK - rank) * slope) if is_line else formula
    kinds = (formula for name, formula in formulas.items() if name != "total")
    formulas["total"] = sympy.expand(sum(kinds))
    return formulas


@dataclass(frozen=True)
class AtDegree:
    """The bytes of a step at a degree.

    Attributes:
        formulas: formulas in B and S by kind of memory, and `total`, their sum.
        storage_key: equal at degrees that save the same tensors in the same layouts.
        peak: the label of the moment that needs the most memory.
    """

    formulas: Mapping[str, sympy.Expr]
    storage_key: Hashable
    peak: str

    def piece_key(self, name: str) -> Hashable:
        """Return a key, equal at degrees where a kind's bytes are sums over the same tensors."""
        return (self.storage_key, self.peak) if name == "workspace" else self.storage_key


@dataclass(frozen=True)
class _Piece:
    """A formula in tp, and the consecutive degrees at which it is exact."""

    formula: sympy.Expr
    degrees: tuple[int, ...]

    def holds(self, values: Mapping[int, sympy.Expr], degrees: Iterable[int]) -> bool:
        """Return whether the formula yields these values at these degrees."""
        return all(_is_zero(self.formula.subs(DEGREE, at) - values[at]) for at in degrees)


def in_degree(
    at: Callable[[int], AtDegree], degree: int
) -> tuple[dict[str, sympy.Expr], dict[str, tuple[int, ...]]]:
    """Return formulas in B, S and tp, and the degrees at which each is exact.

    Args:
        at: returns the bytes at a degree.
        degree: the requested degree.
    """
    known: dict[int, AtDegree] = {}
    for other in sorted({degree, *DEGREES}):
        try:
            at_degree = at(other)
        except (MemoryBudgetError, ParallelError):
            if other == degree:
                raise
            continue  # it does not divide the model, or the budget is too small
        rows = sympy.ceiling(TOKENS_OF_BATCH / other)
        formulas = {name: formula.subs(rows, _ROWS) for name, formula in at_degree.formulas.items()}
        known[other] = dataclasses.replace(at_degree, formulas=formulas)
    pieces = {name: _pieces(name, known) for name in known[degree].formulas if name != "total"}
    formula_of = {name: _piecewise(at_degree) for name, at_degree in pieces.items()}
    formula_of["total"] = _piecewise(_sums(list(pieces.values())))
    exact = {
        name: tuple(
            other
            for other, at_degree in known.items()
            if _is_zero(formula.subs(DEGREE, other) - at_degree.formulas[name])
        )
        for name, formula in formula_of.items()
    }
    of_degree = sympy.ceiling(TOKENS_OF_BATCH / DEGREE)
    return {name: formula.subs(_ROWS, of_degree) for name, formula in formula_of.items()}, exact


def _pieces(name: str, known: Mapping[int, AtDegree]) -> list[_Piece]:
    """Return the formula of a kind of memory as the fewest pieces."""
    values = {degree: at_degree.formulas[name] for degree, at_degree in known.items()}
    groups = itertools.groupby(known, key=lambda degree: known[degree].piece_key(name))
    pieces: list[_Piece] = []
    for run in (run for _, degrees in groups for run in _lines(values, list(degrees))):
        if pieces:
            degrees = (*pieces[-1].degrees, *run.degrees)
            wider = next(
                (piece for piece in (pieces[-1], run) if piece.holds(values, degrees)), None
            )
            if wider is not None:
                pieces[-1] = _Piece(wider.formula, degrees)
                continue
        pieces.append(run)
    return pieces


def _lines(values: Mapping[int, sympy.Expr], degrees: Sequence[int]) -> Iterator[_Piece]:
    """Yield lines through the bytes of degrees with equal keys: a single line if possible.

    A line through only two degrees counts only if they are the only degrees.
    """
    start = 0
    while start < len(degrees):
        line = _line(values, degrees[start : start + 2])
        stop = start + 1
        while stop < len(degrees) and line.holds(values, (degrees[stop],)):
            stop += 1
        if stop - start > 2 or stop - start == len(degrees):
            yield _Piece(line.formula, tuple(degrees[start:stop]))
        else:
            stop = start + 1
            yield _Piece(values[degrees[start]], (degrees[start],))
        start = stop


def _line(values: Mapping[int, sympy.Expr], degrees: Sequence[int]) -> _Piece:
    """Return the line through two degrees, or the constant through a single degree."""
    first, last = degrees[0], degrees[-1]
    parted = sympy.Integer(0)
    if first != last:
        apart = sympy.Rational(1, first) - sympy.Rational(1, last)
        parted = (values[first] - values[last]) / apart
    formula = sympy.expand(values[first] - parted / first + parted / DEGREE)
    return _Piece(formula, tuple(degrees))


def _sums(kinds: Sequence[Sequence[_Piece]]) -> list[_Piece]:
    """Return the sum of kinds of memory; degrees in a row with equal sums share a piece."""
    degrees = [degree for piece in kinds[0] for degree in piece.degrees]
    of_degree: dict[int, sympy.Expr] = {
        degree: sympy.expand(
            sum(piece.formula for kind in kinds for piece in kind if degree in piece.degrees)
        )
        for degree in degrees
    }
    runs = itertools.groupby(degrees, key=lambda degree: of_degree[degree])
    return [_Piece(formula, tuple(run)) for formula, run in runs]


def _piecewise(pieces: Sequence[_Piece]) -> sympy.Expr:
    if len(pieces) == 1:
        return pieces[0].formula
    *others, last = pieces
    bounded = [(piece.formula, piece.degrees[-1] >= DEGREE) for piece in others]
    return sympy.Piecewise(*bounded, (last.formula, True))


def _is_zero(formula: sympy.Expr) -> bool:
    return bool(sympy.expand(formula) == 0)


# ----------------------------------------------------------------------------------- formula pieces


def lengths_of_pieces(
    formula_at: Callable[[int], sympy.Expr], low: int, high: int, batch: int
) -> list[tuple[int, int]]:
    """Return the maximal runs of lengths with a common exact formula, in ascending order.

    Args:
        formula_at: returns the formula in B and S that is exact at a length.
        low: the least length.
        high: the largest length.
        batch: the number of sequences.
    """
    cached = cache(formula_at)

    def value(formula: sympy.Expr, seq: int) -> sympy.Expr:
        return formula.subs({SEQUENCES: batch, CONTEXT: seq})

    def is_exact(formula: sympy.Expr, seq: int) -> bool:
        return bool(value(formula, seq) == value(cached(seq), seq))

    def runs(low: int, high: int) -> list[tuple[sympy.Expr, int]]:
        first, last = cached(low), cached(high)
        cross = isqrt(low * high)
        if is_exact(first, high) and is_exact(first, cross):
            return [(first, high)]
        if value(first, low) > value(last, low) and value(first, high) < value(last, high):
            cross = _last(lambda seq: bool(value(first, seq) >= value(last, seq)), low, high)
        cross = min(cross, high - 1)
        left = [(first, cross)] if is_exact(first, cross) else runs(low, cross)
        right = [(last, high)] if is_exact(last, cross + 1) else runs(cross + 1, high)
        return left + right

    merged: list[tuple[sympy.Expr, int]] = []
    for formula, end in runs(low, high):
        if merged and (merged[-1][0] == formula or is_exact(merged[-1][0], end)):
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((formula, end))
    ends = [low - 1, *(end for _, end in merged)]
    return [(before + 1, end) for before, end in pairwise(ends)]


def piecewise_in_length(
    pieces: Mapping[tuple[int, int], Mapping[str, sympy.Expr]],
) -> dict[str, sympy.Expr]:
    """Merge the formulas of all runs of lengths to a piecewise formula for each kind of memory."""
    first = next(iter(pieces.values()))
    piecewise = {}
    for name in first:
        formulas = [(high, formulas[name]) for (_, high), formulas in pieces.items()]
        ends = [
            (formula, high >= CONTEXT)
            for index, (high, formula) in enumerate(formulas[:-1])
            if formulas[index + 1][1] != formula
        ]
        last = formulas[-1][1]
        piecewise[name] = sympy.Piecewise(*ends, (last, True)) if ends else last
    return piecewise


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
