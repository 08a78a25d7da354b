"""Trainers against `executor.finetune`, and against transformers, peft and torch.optim."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.errors import AdapterConflictError, FinetuneError, PcgError
from pcg.runtime.executor import Executor
from pcg.runtime.training.trainer.trainer import Trainer
from tests.support import oracle
from tests.support.trainer_data import (
    LORA,
    data,
    log_probabilities,
    pair,
    parameters,
    put,
    put_alone,
    sampled,
)

ROWS = sampled((7, 4, 12, 5, 9, 6))
RATE = 1e-2


@pytest.fixture(scope="module")
def models() -> tuple[Executor, Any]:
    return pair(torch.float32)


@pytest.fixture
def executor(models: tuple[Executor, Any]) -> Executor:
    """The executor with the adapter "a" as peft has it, and no other."""
    put_alone(*models)
    return models[0]


def train(trainer: Trainer, steps: int = 3, cut: Callable[[int], int] = lambda step: 0) -> None:
    """Take steps of AdamW, two rows each, in one call or cut after some rows."""
    for step in range(steps):
        rows = data(ROWS[2 * step % 6 : 2 * step % 6 + 2], "weights")
        at = cut(step)
        for part in (rows[:at], rows[at:]) if at else (rows,):
            trainer.forward_backward(part)
        trainer.optim_step(
            learning_rate=RATE, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5
        )


def test_steps_are_those_of_peft_and_torch(models: tuple[Executor, Any]) -> None:
    executor, wrapped = models[0], copy.deepcopy(models[1])
    put(executor, wrapped, "a")
    with executor.trainer("a", batch_size=1) as trainer:
        train(trainer)
        trainer.snapshot()
    own = oracle.lora_parameters(wrapped)
    optimizer = torch.optim.AdamW(
        own.values(), lr=RATE, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1
    )
    for step in range(3):
        optimizer.zero_grad()
        for row in ROWS[2 * step : 2 * step + 2]:
            weights = torch.tensor(row["weights"], dtype=torch.float32)
            (-(weights * log_probabilities(wrapped, row)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(own.values(), 0.5)
        optimizer.step()
    for path, value in parameters(executor, "a").items():
        torch.testing.assert_close(value, own[path].data, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        {**LORA, "lora_dropout": 0.2},
        {"peft_type": "P_TUNING", "num_virtual_tokens": 3, "encoder_hidden_size": 16},
        {"peft_type": "ADALORA", "init_r": 6, "target_r": 3, "tinit": 1, "tfinal": 1, "deltaT": 1},
    ],
    ids=["lora", "p-tuning", "adalora"],
)
def test_save_load_and_step_are_equal_to_the_bit(
    executor: Executor, tmp_path: Path, recipe: dict[str, Any]
) -> None:
    ends = []
    for is_loaded in (False, True):
        name = f"b{is_loaded}"
        with executor.trainer(name, peft=recipe, total_steps=8) as trainer:
            if is_loaded:
                assert trainer.load_state(tmp_path / "state").step == 3
            else:
                train(trainer)
                trainer.forward_backward(data(ROWS[:2]))  # which a save leaves alone
                assert trainer.save_state(tmp_path / "state").step == 3
                assert trainer.optim_step(learning_rate=0.0).tokens == 11
                trainer.load_state(tmp_path / "state")
                with pytest.raises(FinetuneError, match="no gradients"):
                    trainer.optim_step(learning_rate=RATE)
            train(trainer, 2)
            trainer.snapshot()
        ends.append(executor.adapters[name].tensors)
    for first, second in zip(*ends, strict=True):
        assert torch.equal(first, second)


def test_states_that_do_not_fit_are_refused(executor: Executor, tmp_path: Path) -> None:
    path = tmp_path / "state"
    (tmp_path / "mine").mkdir()
    with executor.trainer("b", peft=LORA) as trainer:
        train(trainer, 1)
        trainer.save_state(path)
        with pytest.raises(FinetuneError, match="overwrite=True"):
            trainer.save_state(path)
        with pytest.raises(FinetuneError, match="something other than a state"):
            trainer.save_state(tmp_path / "mine", overwrite=True)
        trainer.save_state(path, overwrite=True)
        with pytest.raises(FinetuneError, match="there is no state"):
            trainer.load_state(tmp_path / "none")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine", "state"]
    other = executor.trainer("c", peft={**LORA, "r": 8})
    with other as trainer, pytest.raises(FinetuneError, match="same recipe"):
        trainer.load_state(path)
    with executor.trainer("d", peft=LORA, optimizer="sgd") as trainer:
        with pytest.raises(FinetuneError, match="optimizer=False"):
            trainer.load_state(path)
        assert trainer.load_state(path, optimizer=False).step == 0
        with pytest.raises(FinetuneError, match="cannot be saved"):
            trainer.save_state(tmp_path / ("x" * 300))
        trainer.save_state(path / "inside")
        with pytest.raises(FinetuneError, match="the directory 'inside' in it"):
            trainer.save_state(path, overwrite=True)
    optimizer = path / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-8])
    with executor.trainer("e", peft=LORA) as trainer:
        with pytest.raises(FinetuneError, match="is truncated"):
            trainer.load_state(path)
        (path / "trainer_state.json").unlink()
        (path / "trainer_state.json").symlink_to("/dev/zero")  # which has no end
        with pytest.raises(FinetuneError, match="is a device, not a file"):
            trainer.load_state(path)
        train(trainer, 1)


def test_versions_are_served_and_stay(executor: Executor) -> None:
    prompt = [3, 5, 8]
    with executor.trainer("b", peft=LORA) as trainer:
        assert "b" not in executor.adapters  # nothing is served before a snapshot
        before = trainer.snapshot()
        one = executor.logits(prompt, "b")
        train(trainer)
        assert torch.equal(executor.logits(prompt, "b"), one)
        after = trainer.snapshot()
        assert (before.version.name, after.version.name) == ("b", "b")
        assert after.version.number == before.version.number + 1
        assert not torch.equal(executor.logits(prompt, "b"), one)
        (old,) = executor.logits([prompt], [before.adapter])
        torch.testing.assert_close(old, one)


def test_numbers_that_are_not_finite_fail_their_call_alone(executor: Executor) -> None:
    rows = [{**row, "advantages": [1e300] * len(row["tokens"])} for row in ROWS[:2]]
    with executor.trainer("b", peft=LORA) as trainer:
        trainer.forward_backward(data(ROWS[:2]))
        with pytest.raises(FinetuneError, match=r"gradients is (inf|nan)"):
            trainer.forward_backward(data(rows, "advantages", "logprobs"), "importance_sampling")
        with pytest.raises(FinetuneError, match="is not finite"):
            trainer.forward_backward(data(ROWS[:2]), lambda found: found[0].sum() * math.nan)
        with pytest.raises(FinetuneError, match="scalar tensor"):
            trainer.forward_backward(data(ROWS[:2]), lambda found: 1.0)  # type: ignore[arg-type, return-value]
        with pytest.raises(ZeroDivisionError):
            trainer.forward_backward(data(ROWS[:2]), lambda found: found[0].sum() / (1 // 0))
        norm = trainer.optim_step(learning_rate=0.0).gradient_norm
        trainer.forward_backward(data(ROWS[:2]))
        assert trainer.optim_step(learning_rate=0.0).gradient_norm == norm


def test_bad_options_are_named(executor: Executor) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"optimizer": "adamww"}, "adamw"),
        ({"optimizer_options": {"momentum": 1}}, "momentum"),
        ({"peft": {"peft_type": "ADALORA"}}, "total_steps"),
        ({"peft": {"peft_type": "ADALORA"}, "total_steps": 1}, "one step more"),
        ({"rank": 4}, "unknown option 'rank'"),
    ]
    for options, message in bad:
        with pytest.raises(PcgError, match=message):
            executor.trainer("b", **options)
    steps: list[tuple[dict[str, Any], str]] = [
        ({"learning_rate": math.inf}, "learning_rate=inf"),
        ({"learning_rate": 1, "betas": (0.9, 1.0)}, "two numbers"),
        ({"learning_rate": 1, "grad_clip_norm": 0}, "None turns it off"),
        ({"learning_rate": 1, "eps": 0.1}, "'sgd' does not take"),
        ({"learning_rate": 1, "eps": 0.0}, "eps=0.0"),
        ({"learning_rate": 1, "lr": 0.1}, "unknown option 'lr'"),
    ]
    with executor.trainer("b", peft=LORA, optimizer="sgd") as trainer:
        trainer.forward_backward(data(ROWS))
        for options, message in steps:
            with pytest.raises(FinetuneError, match=message):
                trainer.optim_step(**options)
        with pytest.raises(AdapterConflictError, match="'b'"):
            executor.trainer("b")
        assert trainer.optim_step(learning_rate=0.1).step == 1
    with pytest.raises(FinetuneError, match="was closed"):
        trainer.optim_step(learning_rate=0.1)
    executor.trainer("b", peft=LORA).close()
