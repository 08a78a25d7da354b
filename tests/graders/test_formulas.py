"""Formulas of multi graders: what they compute, and what is refused."""

from __future__ import annotations

import math

import pytest

from pcg.errors import GraderError, GradingError
from pcg.graders.formula import Formula

NAMES = ("a", "b")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5 * a + b", 3.5),
        ("2 * a ^ b", 2 * 3**2),
        ("2 ** -1", 0.5),
        ("-a ^ 2", -9),
        ("min(a, b, 1) + max(a)", 4),
        ("sqrt(abs(-9)) + floor(1.5) + ceil(1.5)", 6),
        ("exp(log(a)) / b", 1.5),
        (" (a) ", 3),
    ],
)
def test_formulas(text: str, value: float) -> None:
    assert Formula.of(text, "f", NAMES).compute({"a": 3.0, "b": 2.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "a / (b - 2)",
        "10 ^ 1000",
        "9 ^ 9 ^ 9 ^ 9 ^ 9",
        "log(0)",
        "sqrt(-1)",
        "(-8) ^ 0.5",
        "exp(1e3)",
        "1e300 * 1e300",
    ],
)
def test_what_has_no_value(text: str) -> None:
    formula = Formula.of(text, "f", NAMES)
    with pytest.raises(GradingError, match="cannot be computed") as failed:
        formula.compute({"a": 3.0, "b": 2.0})
    assert failed.value.kind == "formula_parse_error"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("c + a", "f names 'c'; its graders are a, b"),
        ("__import__('os')", "no arithmetic: Call"),
        ("a.real", "no arithmetic: Attribute"),
        ("a[0]", "no arithmetic: Subscript"),
        ("[a for a in b]", "no arithmetic: ListComp"),
        ("(lambda: a)()", "no arithmetic: Call"),
        ("'a' * 9", "no arithmetic: Constant"),
        ("True + a", "no arithmetic: Constant"),
        ("a if b else 1", "no arithmetic: IfExp"),
        ("a // b", "no arithmetic: BinOp"),
        ("(a := 1)", "no arithmetic: NamedExpr"),
        ("abs(a, b)", "give abs 1 argument"),
        ("max()", "give max at least one argument"),
        ("max(*a)", "no arithmetic: Starred"),
        ("f'{a}'", "no arithmetic"),
        ("1e999", "no arithmetic: Constant"),
        ("a +", "is no formula"),
        ("", "is no formula"),
        ("a\0b", "is no formula"),
        ("(" * 500 + "a" + ")" * 500, "is no formula"),
        ("-" * 1000 + "a", "f is"),
        ("+".join("a" * 500), "too large"),
        ("a+" * 600 + "a", "use at most 1024"),
    ],
)
def test_what_is_no_formula(text: str, said: str) -> None:
    with pytest.raises(GraderError) as refused:
        Formula.of(text, "f", NAMES)
    assert said in str(refused.value)


def test_numbers_are_floats() -> None:
    assert math.isclose(Formula.of("7 ^ 300", "f", ()).compute({}), 7.0**300)
