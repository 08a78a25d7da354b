"""Formulas in S are exact over the region that is claimed: a piece for each fullest moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import sympy

import pcg
from pcg.explain.formulas import lengths_of_pieces
from pcg.explain.report.report import Report
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.types import CONTEXT, RANK
from pcg.source import resolve

B, S = SEQUENCES, CONTEXT


def check_corners(config: Mapping[str, Any], report: Report, *more: int) -> None:
    """Formulas give what the report of each length says, at the ends of all pieces."""
    symbols = {str(symbol): symbol for symbol in (B, S, RANK)}
    formulas = {name: sympy.sympify(t, locals=symbols) for name, t in report.formulas.items()}
    assert report.region is not None
    low, high = report.region
    whens = [when for _, when in formulas["workspace"].args[:-1]]
    assert whens, "one moment alone is the fullest"
    ends = {int(when.rhs) for when in whens}
    for seq in sorted({low, high, *more, *ends, *(end + 1 for end in ends)}):
        found = pcg.explain(config, batch=report.batch, seq=seq).memory_bytes
        at = {B: report.batch, S: seq, RANK: 16}
        for name, formula in formulas.items():
            assert formula.subs(at) == found[name], (name, seq)


def test_formulas_of_gemma_are_exact_at_the_corners_of_their_region() -> None:
    config = {**resolve("google/gemma-2-27b").config, "num_hidden_layers": 2}
    report = pcg.explain(config, seq=4096, find_region=True)
    assert report.region is not None
    assert report.region[0] <= 64 <= 4096 <= report.region[1]
    assert "  up to S = " in report.to_text(formulas=True)
    check_corners(config, report, 64, 4096)


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ((3 * B * S,), [(1, 1000)]),
        ((3 * B * S, B * S**2), [(1, 3), (4, 1000)]),
        ((100 + B * S, 3 * B * S, B * S**2 / 10 + B * S), [(1, 31), (32, 1000)]),
        ((100 + B * S, 9 * B * S, B * S**2 / 10), [(1, 12), (13, 90), (91, 1000)]),
        ((B * S**2, 20000 + 400 * B * S), [(1, 444), (445, 1000)]),
    ],
)
def test_pieces_are_the_upper_envelope(
    moments: tuple[sympy.Expr, ...], expected: list[tuple[int, int]]
) -> None:
    def fullest(seq: int) -> sympy.Expr:
        return max(moments, key=lambda formula: formula.subs({B: 1, S: seq}))

    runs = lengths_of_pieces(fullest, 1, 1000, 1)
    assert runs == expected
    for low, high in runs:
        middle = fullest((low + high) // 2)
        for seq in range(low, high + 1):
            at = {B: 1, S: seq}
            assert middle.subs(at) == fullest(seq).subs(at)
