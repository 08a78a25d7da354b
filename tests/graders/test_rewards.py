"""Graders as reward functions of reinforcement learning, also by a configuration file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import FinetuneError, GraderError
from pcg.train.grpo.rollouts import Rewards, Scored
from pcg.train.grpo.train import reward_function

CHECK: dict[str, Any] = {
    "type": "string_check",
    "name": "same",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


def rewards_of(folder: Path, grader: Any, *answers: Any) -> list[float]:
    (folder / "grader.json").write_text(json.dumps(grader))
    rewards = Rewards(reward_function("grader:grader.json", folder))
    assert rewards.names == [grader["name"]]
    scored = Scored(
        ["Which?", [{"role": "user", "content": "Which?"}]],
        ["Paris", [{"role": "assistant", "content": "Rome"}]],
        [[1], [2]],
        {"answer": answers},
    )
    found: list[float] = rewards.score(scored, {"global_step": 1})[:, 0].tolist()
    return found


def test_a_grader_is_a_reward_function(tmp_path: Path) -> None:
    assert rewards_of(tmp_path, CHECK, "Paris", "Paris") == [1.0, 0.0]
    source = "def grade(sample, item):\n    return len(sample['output_text'] + item['answer'])\n"
    python = {"type": "python", "name": "length", "source": source}
    assert rewards_of(tmp_path, python, "a", "bc") == [6.0, 6.0]


def test_a_completion_that_cannot_be_graded_has_no_reward(tmp_path: Path) -> None:
    nested = {**CHECK, "reference": "{{item.answer.name}}"}
    assert rewards_of(tmp_path, nested, {"name": "Paris"}, "Paris") == [1.0, 0.0]
    with pytest.raises(FinetuneError, match="no completion can be graded: the template names"):
        rewards_of(tmp_path, nested, "Paris", "Paris")


def test_graders_that_cannot_reward(tmp_path: Path) -> None:
    judge = {
        "type": "score_model",
        "name": "judge",
        "model": "m",
        "input": [{"role": "user", "content": "Rate it"}],
    }
    for content, said in (
        (json.dumps(judge), "asks the judge 'm', and there is no server to ask"),
        (json.dumps({**CHECK, "operation": "x"}), "grader.json: operation='x'"),
        ("{", "grader.json"),
    ):
        (tmp_path / "grader.json").write_text(content)
        with pytest.raises(GraderError) as refused:
            reward_function("grader:grader.json", tmp_path)
        assert said in str(refused.value)
    with pytest.raises(GraderError, match="nothing"):
        reward_function("grader:nothing.json", tmp_path)
