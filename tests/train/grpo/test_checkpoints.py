"""Runs of GRPO that end early go on from their checkpoint, as one that ran through."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.errors import FinetuneError, FinetuneInterrupted
from pcg.runtime.executor import Executor
from pcg.train.grpo import train_grpo
from pcg.train.grpo.checkpoints import ResumableOptions
from tests.support.trainer_data import LORA, pair, parameters

PROMPTS: list[Any] = [[5, 8], [13, 2, 9], [40], [7, 7]]
SMALL: dict[str, Any] = {
    "num_generations": 4,
    "batch_size": 8,
    "max_completion_length": 5,
    "learning_rate": 0.02,
    "warmup_steps": 2,
    "num_iterations": 2,
    "max_steps": 6,
    "save_every": 1,
}


def is_low(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < 20 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def executor() -> Executor:
    return pair(torch.float32)[0]


def ended(executor: Executor, options: ResumableOptions, on_step: Any = None) -> Any:
    """The weights and the numbers of a run to its end."""
    done = train_grpo(executor, PROMPTS, is_low, options, peft=LORA, on_step=on_step)
    found = {path: one.clone() for path, one in parameters(executor, "policy").items()}
    executor.remove_adapter("policy")
    names = ("reward", "loss", "grad_norm", "learning_rate", "num_tokens", "completions/max_length")
    return found, [[one[name] for name in names] for one in done.history]


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(
    executor: Executor, tmp_path: Path
) -> None:
    """Not to the same bits: which prompts share the engine's first steps is not always the same."""
    whole = ended(executor, ResumableOptions(**SMALL, checkpoint_dir=tmp_path / "whole"))
    options = ResumableOptions(**SMALL, checkpoint_dir=tmp_path / "cut")

    def interrupt(step: int, numbers: Mapping[str, float], samples: Any) -> None:
        if step == 5:  # in the middle of a generation, whose first update is lost
            raise KeyboardInterrupt

    with pytest.raises(FinetuneInterrupted, match="step-00000004") as caught:
        ended(executor, options, interrupt)
    assert caught.value.checkpoint == tmp_path / "cut" / "step-00000004"
    assert sorted(one.name for one in (tmp_path / "cut").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
    executor.remove_adapter("policy")
    seen: list[int] = []
    rest = ended(executor, options, lambda step, *_: seen.append(step))
    assert seen == [5, 6]
    for one, two in zip(whole[1], rest[1], strict=True):
        assert one == pytest.approx(two, rel=1e-5, abs=1e-6)
    weights: dict[str, Tensor] = whole[0]
    for path, value in weights.items():
        torch.testing.assert_close(rest[0][path], value, rtol=1e-5, atol=1e-6)
    again = ended(executor, options, lambda step, *_: seen.append(step))  # there is nothing left
    assert seen == [5, 6]
    assert len(again[1]) == 6


def test_a_checkpoint_of_another_run_is_refused(executor: Executor, tmp_path: Path) -> None:
    given = {**SMALL, "max_steps": 2, "checkpoint_dir": tmp_path}
    ended(executor, ResumableOptions(**given))
    with pytest.raises(FinetuneError, match=r"another run: learning_rate was 0\.02, is 0\.5"):
        ended(executor, ResumableOptions(**{**given, "learning_rate": 0.5}))
    missing = {**given, "checkpoint_dir": tmp_path / "none", "resume": True}
    with pytest.raises(FinetuneError, match="no checkpoint in"):
        ended(executor, ResumableOptions(**missing))
    for name, value in (("save_every", 0), ("keep_last", True), ("resume", "yes")):
        with pytest.raises(FinetuneError, match=name):
            ResumableOptions(**{**given, name: value})
