"""Runs of GRPO on a tiny model: the adapter learns, in steps that it shares with its rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import pcg
from pcg.errors import AdapterConflictError, DataError, FinetuneError, FinetuneInterrupted
from pcg.runtime.executor import Executor
from pcg.train.grpo import GrpoOptions, train_grpo
from pcg.train.grpo.checkpoints import ResumableOptions
from pcg.train.grpo.rollouts import Rewards, Scored
from pcg.train.grpo.train import reward_function
from tests.support import tiny_llama
from tests.support.trainer_data import LORA, pair, parameters

PROMPTS: list[Any] = [[5, 8], [13, 2, 9], [40]]
SMALL: dict[str, Any] = {
    "num_generations": 4,
    "batch_size": 8,
    "max_completion_length": 6,
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant",
}


def check_alike(found: list[Any], expected: list[Any]) -> None:
    """The updates are the same to rounding, which depends on the requests of a step.

    Losses are not compared: advantages sum to zero, so that a loss is rounding alone.
    """
    for update, other in zip(found, expected, strict=True):
        assert update["reward"] == other["reward"]
        for name in ("entropy", "grad_norm"):
            assert update[name] == pytest.approx(other[name], rel=1e-4)


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


def test_evaluations_by_greedy_completions(executor: Executor) -> None:
    """Their rewards are those of what the adapter generates; the run itself stays the same."""
    options = {**SMALL, "max_steps": 3}
    plain = train_grpo(executor, PROMPTS, is_low, GrpoOptions(**options), peft=LORA)
    executor.remove_adapter("policy")
    evaluating = GrpoOptions(**options, eval_data=[[7, 3], [4]], eval_every=2)
    done = train_grpo(executor, PROMPTS, is_low, evaluating, peft=LORA)
    assert ["eval_reward" in numbers for numbers in done.history] == [False, True, True]
    check_alike(done.history, plain.history)
    made = executor.generate([[7, 3], [4]], adapter="policy", max_new_tokens=6)
    expected = is_low([list(each.token_ids) for each in made])
    assert done.history[-1]["eval_reward"] == pytest.approx(sum(expected) / 2)
    assert done.history[-1]["eval_rewards/is_low/mean"] == done.history[-1]["eval_reward"]
    executor.remove_adapter("policy")


def test_rows_are_converted_and_callbacks_end_a_run(executor: Executor, tmp_path: Path) -> None:
    """A file with other columns gives the run of its prompts in memory."""
    path, seen = tmp_path / "a.jsonl", dict[str, list[Any]](logs=[], metrics=[], ends=[])
    path.write_text("".join(json.dumps({"ids": ids, "word": "w"}) + "\n" for ids in PROMPTS))

    class Callback(pcg.TrainingCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any) -> None:
            assert args.num_generations == 4
            seen["logs"].append(logs)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any) -> None:
            seen["metrics"].append(metrics)
            control.should_training_stop = state.global_step == 2

        def on_train_end(self, args: Any, state: Any, control: Any) -> None:
            seen["ends"].append(state.global_step)

    def worded(completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        assert answer == ["w!"] * len(completion_ids)
        return is_low(completion_ids)

    options = GrpoOptions(
        **SMALL, max_steps=4, columns={"prompt": "ids", "answer": "word"}, eval_data=path,
        eval_every=1,
    )  # fmt: skip
    done = train_grpo(
        executor, path, worded, options, peft=LORA, callbacks=[Callback()],
        formatting_func=lambda row: {**row, "answer": row["answer"] + "!"},
    )  # fmt: skip
    executor.remove_adapter("policy")
    plain = train_grpo(executor, PROMPTS, is_low, GrpoOptions(**SMALL, max_steps=4), peft=LORA)
    executor.remove_adapter("policy")
    assert (done.steps, seen["ends"]) == (2, [2])
    check_alike(done.history, plain.history[:2])
    assert [logs["loss"] for logs in seen["logs"]] == [x["loss"] for x in done.history]
    rewards = [metrics["eval_reward"] for metrics in seen["metrics"]]
    assert rewards == [x["eval_reward"] for x in done.history]


def test_a_reward_model_scores_as_transformers(tmp_path: Path) -> None:
    """Texts and chats in padded batches, against each alone."""
    folder = tiny_llama.save(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    rewards = reward_function("model:model", tmp_path)
    prompts: list[Any] = ["is it?", "x"]
    completions: list[Any] = [" yes, it is", " no"]
    chats = [[{"role": "user", "content": text}] for text in prompts]
    answers = [[{"role": "assistant", "content": text}] for text in completions]
    rendered = [
        tokenizer.apply_chat_template([*a, *b], tokenize=False)
        for a, b in zip(chats, answers, strict=True)
    ]
    for asked, answered, texts in (
        (prompts, completions, ["is it? yes, it is", "x no"]),
        (chats, answers, rendered),
    ):
        expected = []
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            expected.append(model(ids).logits[0, 0].item())
        assert rewards(asked, answered) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    config.num_labels = 2
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    with pytest.raises(FinetuneError, match="has 2 labels; a reward model has one"):
        reward_function("model:model", tmp_path)
    with pytest.raises(FinetuneError, match="reward model nothing cannot be loaded"):
        reward_function("model:nothing", tmp_path)


def test_rollouts_of_a_temperature_are_trained_at_it(executor: Executor) -> None:
    """Ratios of the first updates are 1; a lower temperature has a lower entropy."""
    entropies = []
    for temperature in (0.5, 1.0):
        options = GrpoOptions(**SMALL, temperature=temperature, epsilon=1e-3, max_steps=2)
        done = train_grpo(executor, PROMPTS, is_low, options, peft=LORA)
        for numbers in done.history:
            assert numbers["clip_ratio/region_mean"] == 0
            assert numbers["sampling/sampling_logp_difference/max"] < 1e-5
        entropies.append(done.history[0]["entropy"])
        executor.remove_adapter("policy")
    assert entropies[0] < entropies[1]


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


def test_what_cannot_be_trained_is_refused_before_anything_runs(executor: Executor) -> None:
    def broken(**_: Any) -> None:
        raise ValueError("no")

    options = GrpoOptions(**SMALL, max_steps=1)
    with pytest.raises(FinetuneError, match="'broken' failed: ValueError: no"):
        train_grpo(executor, PROMPTS, broken, options, peft=LORA)
    with executor.trainer("taken", peft=LORA), pytest.raises(AdapterConflictError):
        train_grpo(executor, PROMPTS, is_low, options, adapter="taken")
    for rows, message in (
        ([], "no rows"),
        ("abc", "no data file abc"),
        ([{"text": "a"}], "no 'prompt'"),
        ([{"prompt": [1], "a": 1}, {"prompt": [1]}], r"data\[1\] has the columns \[\], and data"),
        (["text"], "no tokenizer"),
        ([{"prompt": [1], "completions": 1}], "rename it"),
        ([{"prompt": [1], "images": ["a.png"]}], "has 'images', but prompts can only contain text"),
        ([{"prompt": [{"role": "user", "content": "x"}]}], "no chat template"),
    ):
        with pytest.raises(DataError, match=message):
            train_grpo(executor, rows, is_low, options, peft=LORA)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"batch_size": 12}, "not a multiple of num_generations"),
        ({"temperature": 0.7, "beta": 0.1}, r"temperature=0\.7 and beta=0\.1"),
        ({"temperature": 0.7, "max_staleness": 1}, r"temperature=0\.7 and max_staleness=1"),
        ({"eval_every": 2}, "eval_every=2 has no effect without eval_data"),
        ({"eval_data": {"a": "a.jsonl"}}, "eval_data names a; GRPO is evaluated on one source"),
        ({"temperature": 0}, "temperature=0; use a number from"),
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


# -------------------------------------------------------------------------------------- checkpoints

FOUR: list[Any] = [[5, 8], [13, 2, 9], [40], [7, 7]]
RESUMED: dict[str, Any] = {
    "num_generations": 4,
    "batch_size": 8,
    "max_completion_length": 5,
    "learning_rate": 0.02,
    "warmup_steps": 2,
    "num_iterations": 2,
    "max_steps": 6,
    "save_every": 1,
}


def ended(executor: Executor, options: ResumableOptions, on_step: Any = None) -> Any:
    """The weights and the numbers of a run to its end."""
    done = train_grpo(executor, FOUR, is_low, options, peft=LORA, on_step=on_step)
    found = {path: one.clone() for path, one in parameters(executor, "policy").items()}
    executor.remove_adapter("policy")
    names = ("reward", "loss", "grad_norm", "learning_rate", "num_tokens", "completions/max_length")
    return found, [[one[name] for name in names] for one in done.history]


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(
    executor: Executor, tmp_path: Path
) -> None:
    """Not to the same bits: which prompts share the engine's first steps is not always the same."""
    whole = ended(executor, ResumableOptions(**RESUMED, checkpoint_dir=tmp_path / "whole"))
    options = ResumableOptions(**RESUMED, checkpoint_dir=tmp_path / "cut")

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
    given = {**RESUMED, "max_steps": 2, "checkpoint_dir": tmp_path}
    ended(executor, ResumableOptions(**given))
    with pytest.raises(FinetuneError, match=r"another run: learning_rate was 0\.02, is 0\.5"):
        ended(executor, ResumableOptions(**{**given, "learning_rate": 0.5}))
    missing = {**given, "checkpoint_dir": tmp_path / "none", "resume": True}
    with pytest.raises(FinetuneError, match="no checkpoint in"):
        ended(executor, ResumableOptions(**missing))
    for name, value in (("save_every", 0), ("keep_last", True), ("resume", "yes")):
        with pytest.raises(FinetuneError, match=name):
            ResumableOptions(**{**given, name: value})


# --------------------------------------------------------------------------------- reward functions

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
