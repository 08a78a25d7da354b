"""Formulas in the rank: lines where there are any, and a total that is the sum of all."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from pcg.explain.rank_formulas import in_rank
from pcg.ir.analysis.storages import TOKENS_OF_BATCH as T
from pcg.ir.types import RANK


def test_lines() -> None:
    def at(rank: int) -> Mapping[str, sympy.Expr]:
        return {"weights": 5 * T, "adapters": 3 * rank * T, "total": (5 + 3 * rank) * T}

    expected = {"weights": 5 * T, "adapters": 3 * RANK * T, "total": 5 * T + 3 * RANK * T}
    assert in_rank(at, 16) == expected


def test_the_total_is_the_sum_where_one_is_no_line() -> None:
    workspace = {16: 616 * T, 17: 620 * T, 18: 552 * T}

    def at(rank: int) -> Mapping[str, sympy.Expr]:
        kinds = {"adapters": 3 * rank * T, "workspace": workspace[rank]}
        return {**kinds, "total": sympy.expand(sum(kinds.values()))}

    found = in_rank(at, 16)
    assert found is not None
    assert found["workspace"] == 616 * T
    assert found["total"] == 3 * RANK * T + 616 * T
    assert found["total"].subs(RANK, 16) == at(16)["total"]


def test_without_a_plan_at_other_ranks_formulas_have_no_rank() -> None:
    only = {"adapters": sympy.Integer(48), "total": sympy.Integer(48)}
    assert in_rank(lambda rank: only if rank == 16 else None, 16) == only
