"""Runs of GRPO on a tiny model: the adapter learns, in steps that it shares with its rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pcg.errors import AdapterConflictError, DataError, FinetuneError
from pcg.runtime.executor import Executor
from pcg.train.grpo import GrpoOptions, train_grpo
from tests.support.trainer_data import LORA, pair

PROMPTS: list[Any] = [[5, 8], [13, 2, 9], [40]]
SMALL: dict[str, Any] = {
    "num_generations": 4,
    "batch_size": 8,
    "max_completion_length": 6,
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant",
}


def is_low(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < 20 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def executor() -> Executor:
    return pair(torch.float32)[0]


def test_it_learns_what_is_rewarded_and_serves_it(executor: Executor) -> None:
    seen: list[tuple[int, int]] = []

    def on_step(step: int, numbers: Mapping[str, float], samples: Any) -> None:
        seen.append((step, len(samples)))

    wide = {"batch_size": 16, "num_generations": 8, "max_completion_length": 4}
    options = GrpoOptions(**{**SMALL, **wide, "learning_rate": 0.05}, max_steps=14)
    before = executor.generate(PROMPTS, max_new_tokens=6)
    done = train_grpo(executor, PROMPTS, is_low, options, peft=LORA, on_step=on_step)
    rewards = [numbers["reward"] for numbers in done.history]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.12
    assert seen == [(step, 8) for step in range(1, 15)]
    assert done.steps == 14
    after = executor.generate(PROMPTS, adapter="policy", max_new_tokens=6)
    assert after != [*before]
    assert executor.generate(PROMPTS, max_new_tokens=6) == before  # the base is as it was
    executor.remove_adapter("policy")


def test_completions_that_nothing_scores_are_told_of(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    def late(completions: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        return [None if trainer_state["global_step"] else 1.0] * len(completions)

    options = GrpoOptions(**SMALL, max_steps=2)
    done = train_grpo(executor, PROMPTS, late, options, peft=LORA)
    assert [numbers.get("reward") for numbers in done.history] == [1.0, None]
    assert done.history[1]["grad_norm"] == 0
    (told,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert told == "update 2: no reward function scored any of 8 completions; they have no effect"
    executor.remove_adapter("policy")


@pytest.mark.parametrize("fields", [{}, {"delta": 4.0}])
def test_an_adapter_with_dropout_is_on_its_own_policy(
    executor: Executor, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    options = GrpoOptions(**SMALL, **fields, epsilon=1e-3, max_steps=3)
    peft = {**LORA, "lora_dropout": 0.3}
    done = train_grpo(executor, PROMPTS, is_low, options, peft=peft)
    for numbers in done.history:
        assert numbers["clip_ratio/region_mean"] == 0
        assert numbers["sampling/sampling_logp_difference/max"] < 1e-4
    assert "policy: lora_dropout=0.3 is not applied" in caplog.text
    executor.remove_adapter("policy")


@pytest.mark.parametrize(
    ("staleness", "expected"), [(0, [0, 0, 0, 0]), (1, [0, 1, 1, 1]), (2, [0, 1, 2, 2])]
)
def test_completions_are_as_stale_as_was_asked(
    executor: Executor, staleness: int, expected: list[int]
) -> None:
    options = GrpoOptions(**SMALL, max_steps=4, max_staleness=staleness)
    done = train_grpo(executor, PROMPTS, is_low, options, peft=LORA)
    assert [numbers["staleness"] for numbers in done.history] == expected
    gaps = [x["sampling/sampling_logp_difference/max"] for x in done.history if x["staleness"] == 0]
    assert max(gaps) < 1e-5  # of the same weights, sampled and trained
    executor.remove_adapter("policy")


def test_a_generation_is_shared_and_gone_through_again(executor: Executor) -> None:
    options = GrpoOptions(
        **SMALL, max_steps=8, steps_per_generation=2, num_iterations=2, max_staleness=1, beta=0.05
    )
    calls: list[int] = []

    def counted(completion_ids: Any, **_: Any) -> list[float]:
        calls.append(len(completion_ids))
        return is_low(completion_ids)

    done = train_grpo(executor, PROMPTS, counted, options, peft=LORA)
    assert calls == [16, 16]
    assert [x["staleness"] for x in done.history] == [0, 0, 0, 0, 1, 1, 1, 1]
    # The base is the reference of a new adapter, which begins as it.
    assert done.history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert done.history[-1]["kl"] > 1e-4
    again = train_grpo(
        executor, PROMPTS, is_low, GrpoOptions(**SMALL, max_steps=1, beta=0.05), adapter="policy"
    )
    assert again.history[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # and an old one its own
    executor.remove_adapter("policy")


def test_the_same_seed_gives_the_same_run_beside_an_engine_of_the_caller(
    executor: Executor,
) -> None:
    options = GrpoOptions(**SMALL, max_steps=2)
    runs = []
    with executor.engine(kv_cache_bytes=2**22).start() as running:
        for name in ("one", "two"):
            done = train_grpo(executor, PROMPTS, is_low, options, adapter=name, peft=LORA)
            runs.append([(x["reward"], x["loss"], x["grad_norm"]) for x in done.history])
        assert running.submit([1, 2], "two", max_new_tokens=1).wait().adapter == "two"
        with running.trainer("taken", peft=LORA), pytest.raises(AdapterConflictError):
            train_grpo(executor, PROMPTS, is_low, options, adapter="taken")
    for one, two in zip(*runs, strict=True):
        assert one == pytest.approx(two, rel=1e-5, abs=1e-6)


def test_what_cannot_be_trained_is_refused_before_anything_runs(executor: Executor) -> None:
    def broken(**_: Any) -> None:
        raise ValueError("no")

    options = GrpoOptions(**SMALL, max_steps=1)
    with pytest.raises(FinetuneError, match="'broken' failed: ValueError: no"):
        train_grpo(executor, PROMPTS, broken, options, peft=LORA)
    for rows, message in (
        ([], "no rows"),
        ("abc", "give a list"),
        ([{"text": "a"}], "no 'prompt'"),
        ([{"prompt": [1], "a": 1}, {"prompt": [1]}], "row 1 has the columns"),
        (["text"], "no tokenizer"),
        ([{"prompt": [1], "completions": 1}], "rename it"),
        ([{"prompt": [1], "images": ["a.png"]}], "has 'images', which would not be in the prompt"),
        ([{"prompt": [{"role": "user", "content": "x"}]}], "no chat template"),
    ):
        with pytest.raises(DataError, match=message):
            train_grpo(executor, rows, is_low, options, peft=LORA)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"batch_size": 12}, "no whole groups"),
        ({"temperature": 0.7}, "temperature 1"),
        ({"loss_type": "sapo"}, "'dr_grpo'"),
        ({"loss_type": "cispo"}, "5.0"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 4.0}, "no delta"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"scale_rewards": True}, "'batch'"),
        ({"max_staleness": -1}, "at least 0"),
        ({"top_p": 0}, "from 1e-12 to 1"),
        ({"mask_truncated_completions": 1}, "True or False"),
    ],
)
def test_options_out_of_range_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=message):
        GrpoOptions(**fields)
