"""Random modifications of a module compile to the module itself, or are refused by their cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support import generated_modules, oracle
from tests.support.families import BY_NAME
from tests.support.generated_modules import CASES, Case, Outcome, check, draw, minimal

DEFAULT_CASES = 5
BLOCK = 100
"""Cases of one slow test."""


def described(case: Case, outcome: Outcome) -> str:
    return f"{case}\n{outcome.detail}\npython -m tests.support.generated_modules {case.seed}"


# The cases are among those of the slow run; smaller numbers are no smaller cases.
@given(seed=st.integers(0, CASES - 1))
@settings(max_examples=DEFAULT_CASES, phases=(Phase.generate,))
def test_a_modified_module_compiles_to_itself_or_is_refused(seed: int) -> None:
    outcome = check(draw(seed))
    assert outcome.kind != "wrong", described(*minimal(draw(seed)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, CASES, BLOCK))
def test_many_modified_modules(first: int) -> None:
    cases = [draw(seed) for seed in range(first, first + BLOCK)]
    outcomes = [check(case) for case in cases]
    pairs = zip(cases, outcomes, strict=True)
    assert [described(*pair) for pair in pairs if pair[1].kind == "wrong"] == []
    counts = Counter(outcome.kind for outcome in outcomes)
    assert counts["invalid"] <= BLOCK // 20
    assert counts["refused"] <= 0.4 * BLOCK  # a third of all blocks together


def test_a_seed_names_a_case_and_edits_are_of_many_kinds() -> None:
    cases = [draw(seed) for seed in range(80)]
    assert [draw(case.seed) for case in cases[:5]] == cases[:5]
    assert len({BY_NAME[case.family].model_type for case in cases}) >= 15
    assert len({name for case in cases for name, _ in case.edits}) >= 35


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        ("scaled_residual:1", "logits of"),
        ("window_by_layer:4", "logits of"),
        ("gradient_hook:22", "gradient of"),
    ],
)
def test_another_program_than_the_modules_is_found(
    edit: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison, given the program of the stock model."""
    name, _, seed = edit.partition(":")
    case = Case(0, "llama3", (("layers", 2),), "sdpa", ((name, int(seed)),))
    compiled = generated_modules.compiled

    def of_stock(model: Any, targets: Any) -> Any:
        del model
        stock = oracle.random_model(BY_NAME["llama3"].config(2, max_position_embeddings=512))
        return compiled(stock, targets)

    monkeypatch.setattr(generated_modules, "compiled", of_stock)
    outcome = check(case)
    assert outcome.kind == "wrong"
    assert found in outcome.detail
