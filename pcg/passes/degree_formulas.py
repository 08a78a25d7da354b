"""The bytes of a step as formulas in the tensor-parallel degree, too.

    bytes(B, S, tp) = whole + parted / tp

A rank holds each tensor whole or in one of tp equal parts, so that with the same tensors kept, held
the same way, any sum of bytes is of this form: two degrees give it, and every other one shows
whether it holds there, as it does not where KV heads are fewer than ranks. Where ranks hold parts
of the tokens, whole and parted are formulas in ceil(B S / tp), too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import sympy

from pcg.errors import ParallelError
from pcg.passes.storages import TOKENS_OF_BATCH

DEGREE = sympy.Symbol("tp", integer=True, positive=True)
DEGREES = (2, 4, 8, 16, 32, 64)

_ROWS = sympy.Symbol("rows", integer=True, positive=True)
"""Of a rank's part of the tokens, at whatever degree."""

Formulas = Mapping[str, sympy.Expr]


def in_degree(
    formulas_at: Callable[[int], Formulas | None], degree: int
) -> tuple[dict[str, sympy.Expr], dict[str, tuple[int, ...]]]:
    """Formulas in tp too, exact at the degree, and the degrees at which each is exact.

    One that is of no such form, as the workspace where another moment becomes the fullest, stays as
    it is at the degree; a total then has it as one of its terms.

    Args:
        formulas_at: by name, with the same tensors kept at a degree, and `total` their sum; None
            where there are none.
        degree: that was asked for.
    """
    known: dict[int, Formulas] = {}
    for other in sorted({degree, *DEGREES}):
        try:
            found = formulas_at(other)
        except ParallelError:
            continue  # it does not divide the model
        if found is not None:
            rows = sympy.ceiling(TOKENS_OF_BATCH / other)
            known[other] = {name: formula.subs(rows, _ROWS) for name, formula in found.items()}
    here = known[degree]
    nearest = sorted(known, key=lambda other: (abs(other - degree), other))[1:3]
    made = {name: _line(name, known, degree, nearest) for name in here if name != "total"}
    made["total"] = sympy.expand(sum(made.values()))
    exact = {
        name: tuple(
            other
            for other, formulas in known.items()
            if sympy.expand(formula.subs(DEGREE, other) - formulas[name]) == 0
        )
        for name, formula in made.items()
    }
    of_degree = sympy.ceiling(TOKENS_OF_BATCH / DEGREE)
    return {name: formula.subs(_ROWS, of_degree) for name, formula in made.items()}, exact


def _line(
    name: str, known: Mapping[int, Formulas], degree: int, nearest: Sequence[int]
) -> sympy.Expr:
    here = known[degree][name]
    if len(nearest) < 2:
        return here
    first, second = nearest
    apart = sympy.Rational(1, degree) - sympy.Rational(1, first)
    parted = (here - known[first][name]) / apart
    made = sympy.expand(here - parted / degree + parted / DEGREE)
    holds = sympy.expand(made.subs(DEGREE, second) - known[second][name]) == 0
    return made if holds else here
