"""Formulas in the degree and in the rank: exact bytes, few pieces, and a total that is the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import sympy

import pcg
from pcg.errors import MemoryBudgetError, ParallelError
from pcg.explain import explain as explaining
from pcg.explain import plan_validity
from pcg.explain.formulas import DEGREE, AtDegree, in_degree, in_rank
from pcg.ir.analysis.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.ir.types import RANK
from pcg.source import resolve
from tests.support.families import BY_NAME

# ------------------------------------------------------------------------------- of a whole model


@pytest.fixture
def memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites, and where plans stay the best, take most of the time, and are no matter here."""
    rows = {"base": [], "bypass": []}
    monkeypatch.setattr(explaining, "parallel_rows", lambda *_: dict(rows))
    monkeypatch.setattr(explaining, "parallel_regions", lambda *_: {})
    monkeypatch.setattr(plan_validity, "valid_range", lambda _, here, most: (here, here))


def check(config: Mapping[str, Any], asked: int, degrees: tuple[int, ...], **options: Any) -> None:
    """All formulas are exact at all degrees: they give what the report of each says."""
    options = {"seq": 64, **options}
    report = pcg.explain(config, tp=asked, find_region=True, **options)
    assert set(report.formula_degrees) == set(report.formulas) == set(report.memory_bytes)
    assert set(report.formula_degrees.values()) == {degrees}
    values = {"B": 1, "S": options["seq"], "r": 16}
    symbols = {n: sympy.Symbol(n, integer=True, positive=True) for n in (*values, "tp")}
    for degree in degrees:
        found = pcg.explain(config, tp=degree, **options).memory_bytes
        at = {symbols[name]: value for name, value in {**values, "tp": degree}.items()}
        for name, text in report.formulas.items():
            assert sympy.sympify(text, locals=symbols).subs(at) == found[name], (name, degree)


@pytest.mark.usefixtures("memory_alone")
@pytest.mark.parametrize(
    ("heads", "degrees"), [(8, (2, 4, 8)), pytest.param(16, (2, 4, 8, 16), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("parts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_bytes_of_each_degree(heads: int, degrees: tuple[int, ...], parts: bool) -> None:
    """Of two KV heads: fewer than ranks."""
    config = {**BY_NAME["llama3"].config(2), "num_attention_heads": heads}
    check(config, 4, degrees, sequence_parallel=parts)


@pytest.mark.slow
@pytest.mark.usefixtures("memory_alone")
@pytest.mark.parametrize(
    ("name", "asked", "degrees"),
    [("falcon-7b", 2, (2, 4)), ("gpt2", 4, (2, 4)), ("llama3", 4, (2, 4)), ("opt", 2, (2, 4))],
)
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.5}, {"peft": "ia3"}], ids=str)
def test_the_bytes_of_each_degree_of_every_family(
    name: str, asked: int, degrees: tuple[int, ...], options: dict[str, Any]
) -> None:
    check(BY_NAME[name].config(2), asked, degrees, **options)


@pytest.mark.usefixtures("memory_alone")
def test_formulas_of_llama() -> None:
    config = {**resolve("meta-llama/Llama-3.1-8B").config, "num_hidden_layers": 2}
    report = pcg.explain(config, "ia3", tp=4, seq=64, serve_tokens=10, find_region=True)
    assert report.formula_degrees["total"] == (2, 4, 8, 16, 32)
    # Eight KV heads of 128 numbers in bf16, and keys and values, in two layers.
    assert report.formulas["kv_cache"] == "Piecewise((81920/tp, tp <= 8), (10240, True))"
    weights = sympy.sympify(report.formulas["weights"])
    (few, _), (many, _) = weights.args
    norms = 5 * 4096 * 2 + 64 * 4  # and the frequencies of positions
    head = 2 * 2 * 128 * 4096 * 2  # K and V of one, which each rank then holds, in two layers
    whole, parted = (formula.as_coefficients_dict() for formula in (few, many))
    assert whole[sympy.S.One] == norms
    assert parted[sympy.S.One] == norms + head
    text = report.to_text(formulas=True)
    assert "  KV cache    = 81920/tp  up to tp = 8\n" in text
    assert "              = 10240  above\n" in text
    assert "Exact at tp = 2, 4, 8, 16, 32: weights, adapters, " in text


# ----------------------------------------------------------------------------------------- pieces


def formulas(
    values: Mapping[int, tuple[sympy.Expr, sympy.Expr]],
    held: Mapping[int, str] | None = None,
    fullest: Mapping[int, str] | None = None,
    asked: int = 2,
) -> dict[str, sympy.Expr]:
    """Of activations and a workspace by degree; checks that they are exact at each."""

    def at(degree: int) -> AtDegree:
        if degree not in values:
            error = MemoryBudgetError if degree == 64 else ParallelError
            raise error(f"none at {degree}")
        kinds = dict(zip(("activations", "workspace"), values[degree], strict=True))
        found = {name: sympy.sympify(formula) for name, formula in kinds.items()}
        alike, moment = (held or {}).get(degree, ""), (fullest or {}).get(degree, "")
        return AtDegree({**found, "total": sympy.Add(*found.values())}, alike, moment)

    made, exact = in_degree(at, asked)
    assert set(exact.values()) == {tuple(values)}
    for degree, (activations, workspace) in values.items():
        for name, value in (("activations", activations), ("workspace", workspace)):
            assert sympy.expand(made[name].subs(DEGREE, degree) - value) == 0
        total = made["total"].subs(DEGREE, degree)
        assert sympy.expand(total - activations - workspace) == 0
    return made


B = SEQUENCES


def test_a_line_through_all_degrees() -> None:
    found = formulas({d: (3 * B + sympy.Rational(16, d) * B, 5) for d in (2, 4, 8, 16)})
    assert found["activations"] == 3 * B + 16 * B / DEGREE
    assert found["total"] == 3 * B + 16 * B / DEGREE + 5


def test_degrees_that_are_held_otherwise_have_a_piece_of_their_own() -> None:
    values = {2: (8, 1), 4: (4, 1), 8: (3, 1), 16: (2, 1)}
    found = formulas(values, held={2: "few", 4: "few", 8: "many", 16: "many"})
    many = 1 + 16 / DEGREE
    assert found["activations"] == sympy.Piecewise((16 / DEGREE, DEGREE <= 4), (many, True))
    assert found["workspace"] == 1


def test_what_is_held_otherwise_but_as_large_is_one_piece() -> None:
    values = {2: (8, 1), 4: (4, 1), 8: (2, 1)}
    found = formulas(values, held={2: "a", 4: "b", 8: "b"})
    assert found["activations"] == 16 / DEGREE


def test_two_degrees_that_are_not_alike_give_no_line() -> None:
    found = formulas({2: (8, 1), 4: (5, 1)}, held={2: "a", 4: "b"})
    assert found["activations"] == sympy.Piecewise((8, DEGREE <= 2), (5, True))


def test_a_workspace_is_of_its_moment() -> None:
    values = {2: (4, 9), 4: (4, 4), 8: (4, 2)}
    found = formulas(values, fullest={2: "loss", 4: "backward", 8: "backward"})
    assert found["workspace"] == sympy.Piecewise((9, DEGREE <= 2), (16 / DEGREE, True))
    assert found["activations"] == 4


def test_what_is_no_line_has_a_piece_for_each_degree() -> None:
    found = formulas({2: (9, 1), 4: (5, 1), 8: (3, 1), 16: (7, 1), 32: (1, 1)})
    line = 1 + 16 / DEGREE
    pieces = (line, DEGREE <= 8), (sympy.Integer(7), DEGREE <= 16), (sympy.Integer(1), True)
    assert found["activations"] == sympy.Piecewise(*pieces)
    assert found["workspace"] == 1
    found = formulas({2: (7, 1), 4: (5, 1), 8: (6, 1)})
    assert [formula for formula, _ in found["activations"].args] == [7, 5, 6]


def test_parts_of_tokens() -> None:
    values = {d: (4 * sympy.ceiling(TOKENS_OF_BATCH / d), 0) for d in (2, 4, 8)}
    found = formulas(values)
    assert found["activations"] == 4 * sympy.ceiling(TOKENS_OF_BATCH / DEGREE)


def test_what_was_asked_for_is_not_left_out() -> None:
    with pytest.raises(ParallelError, match="none at 4"):
        formulas({2: (1, 1)}, asked=4)
    with pytest.raises(MemoryBudgetError, match="none at 64"):
        formulas({2: (1, 1)}, asked=64)


# ----------------------------------------------------------------------------------- in the rank


def test_lines() -> None:
    def at(rank: int) -> Mapping[str, sympy.Expr]:
        return {
            "weights": 5 * TOKENS_OF_BATCH,
            "adapters": 3 * rank * TOKENS_OF_BATCH,
            "total": (5 + 3 * rank) * TOKENS_OF_BATCH,
        }

    expected = {
        "weights": 5 * TOKENS_OF_BATCH,
        "adapters": 3 * RANK * TOKENS_OF_BATCH,
        "total": 5 * TOKENS_OF_BATCH + 3 * RANK * TOKENS_OF_BATCH,
    }
    assert in_rank(at, 16) == expected


def test_the_total_is_the_sum_where_one_is_no_line() -> None:
    workspace = {16: 616 * TOKENS_OF_BATCH, 17: 620 * TOKENS_OF_BATCH, 18: 552 * TOKENS_OF_BATCH}

    def at(rank: int) -> Mapping[str, sympy.Expr]:
        kinds = {"adapters": 3 * rank * TOKENS_OF_BATCH, "workspace": workspace[rank]}
        return {**kinds, "total": sympy.expand(sum(kinds.values()))}

    found = in_rank(at, 16)
    assert found is not None
    assert found["workspace"] == 616 * TOKENS_OF_BATCH
    assert found["total"] == 3 * RANK * TOKENS_OF_BATCH + 616 * TOKENS_OF_BATCH
    assert found["total"].subs(RANK, 16) == at(16)["total"]


def test_without_a_plan_at_other_ranks_formulas_have_no_rank() -> None:
    only = {"adapters": sympy.Integer(48), "total": sympy.Integer(48)}
    assert in_rank(lambda rank: only if rank == 16 else None, 16) == only
