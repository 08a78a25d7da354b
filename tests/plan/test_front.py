"""The front against brute force over all pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pcg.plan.candidate import Candidate, Machine, cheapest, pareto_front
from pcg.plan.rank_plan import TrainingChoice

PRICES = {"A": 1.0, "B": 2.5}
NUMBERS = st.integers(1, 4)


def candidate(gpu: str, gpus: int, tokens_per_s: int, step_s: int) -> Candidate:
    price = PRICES.get(gpu)
    return Candidate(
        Machine(gpu, 1, gpus, "bfloat16"),
        TrainingChoice(1, 1, 1.0),
        {},
        1,
        step_s=float(step_s),
        finetuning_tokens_per_s=float(tokens_per_s),
        dollars_per_hour=None if price is None else price * gpus,
    )


candidates = st.lists(
    st.builds(candidate, st.sampled_from("ABCD"), NUMBERS, NUMBERS, NUMBERS), max_size=12
)


def numbers(one: Candidate) -> tuple[float, float, float, object]:
    """Cost, tokens less than none, seconds: the less the better; and what costs are compared in."""
    tokens, seconds = one.finetuning_tokens_per_s, one.step_s
    assert tokens is not None
    assert seconds is not None
    if one.dollars_per_hour is None:
        return one.machine.gpus, -tokens, seconds, one.machine.gpu
    return one.dollars_per_hour, -tokens, seconds, "dollars"


def is_beaten(one: Candidate, by: Candidate) -> bool:
    a, b = numbers(one), numbers(by)
    return (
        a[3] == b[3] and a[:3] != b[:3] and all(y <= x for x, y in zip(a[:3], b[:3], strict=True))
    )


@given(candidates)
def test_the_front_is_what_none_beats(found: list[Candidate]) -> None:
    front = pareto_front(found)
    wanted = [one for one in found if not any(is_beaten(one, other) for other in found)]
    assert {numbers(one) for one in front} == {numbers(one) for one in wanted}
    assert len({numbers(one) for one in front}) == len(front)  # of equals one


@given(candidates)
def test_order_does_not_matter(found: list[Candidate]) -> None:
    other = found[::-1]
    assert [numbers(one) for one in pareto_front(found)] == [
        numbers(one) for one in pareto_front(other)
    ]
    first = cheapest(found)
    assert first is None or numbers(first) == numbers(cheapest(other) or first)


@given(candidates)
def test_the_cheapest_is_on_the_front(found: list[Candidate]) -> None:
    chosen = cheapest(found)
    assert (chosen is None) == (not found)
    if chosen is not None:
        assert numbers(chosen) in {numbers(one) for one in pareto_front(found)}
        if chosen.dollars_per_hour is not None:
            dollars = [one.dollars_per_hour for one in found if one.dollars_per_hour is not None]
            assert chosen.dollars_per_hour == min(dollars)
