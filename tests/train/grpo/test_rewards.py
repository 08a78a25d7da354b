"""Reward functions: TRL's signature, weights, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcg.errors import FinetuneError
from pcg.train.grpo.rollouts import Rewards, Scored

SCORED = Scored(["a", "a"], ["one", "three"], [(1,), (2, 3)], {"answer": ["one", "two"]})
STATE = {"global_step": 3}


def lengths(completions: list[str], **_: Any) -> list[int]:
    return [len(text) for text in completions]


def right(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> Any:
    completions.append("changed")  # its own list
    return [
        None if len(ids) > 1 else text == want
        for text, want, ids in zip(completions[:2], answer, completion_ids, strict=True)
    ]


async def steps(trainer_state: dict[str, int], completions: list[str], **_: Any) -> torch.Tensor:
    return torch.full((len(completions),), float(trainer_state["global_step"]))


def test_functions_get_columns_and_may_leave_completions_out() -> None:
    rewards = Rewards([lengths, right, steps, lengths])
    assert rewards.names == ["lengths_1", "right", "steps", "lengths_2"]
    found = rewards.score(SCORED, STATE)
    assert found[:, [0, 2, 3]].tolist() == [[3, 3, 3], [5, 3, 5]]
    assert found[0, 1] == 1.0
    assert found[1, 1].isnan()
    assert Rewards(lengths, [0.5]).weights.tolist() == [0.5]


def fails(**_: Any) -> list[float]:
    raise KeyError("gone")


async def fails_late(**_: Any) -> list[float]:
    raise KeyError("gone late")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "'fails' failed: KeyError: 'gone'"),
        (fails_late, "'fails_late' failed: KeyError: 'gone late'"),
        (lambda **_: [1.0], "1 values for 2 completions"),
        (lambda **_: 1.0, "1.0 for 2 completions"),
        (lambda **_: [1.0, "good"], "'good' for completion 1"),
        (lambda **_: [float("inf"), 0], "inf for completion 0"),
        (lambda **_: [1e200, 0], "1e\\+200 for completion 0; return a number from -1e\\+50"),
        (lambda: [0, 0], "unexpected keyword"),
    ],
)
def test_a_function_that_fails_or_returns_something_else_is_named(
    function: Any, message: str
) -> None:
    with pytest.raises(FinetuneError, match=message.replace("(", "\\(")):
        Rewards(function).score(SCORED, STATE)


@pytest.mark.parametrize(
    ("functions", "weights"),
    [
        ([], None),
        ("lengths", None),
        ([lengths, 3], None),
        (lengths, [1, 2]),
        (lengths, [float("nan")]),
    ],
)
def test_rewards_that_are_none_are_refused(functions: Any, weights: Any) -> None:
    with pytest.raises(FinetuneError, match="reward"):
        Rewards(functions, weights)
