"""Runs by an objective without a model: when they evaluate and save, where they resume and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pcg.errors import FinetuneError, RecordError
from pcg.records.run import read_run
from pcg.runtime.data.example import Example
from pcg.runtime.data.order import Batches
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import FinetuneResult, LossChange, StepRecord
from tests.support import compiled, ranked
from tests.support.small_job import DATA, LORA, OPTIONS, examples, job, make_model
from tests.support.tables import Splits, Stored
from tests.support.threads import ThreadRanks, run_ranks

# ------------------------------------------------------------------------------------------ records

ROWS = [Example([2 + i, 3, 5 + i, 7], [2 + i, 3, 5 + i, 7]) for i in range(8)]
RANK_2 = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def small() -> Executor:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    return compiled.executor(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))


def finetune(small: Executor, folder: Path, **options: Any) -> Any:
    given = {"batch_size": 2, "max_steps": 6, "eval_data": ROWS[:2], "eval_every": 2, **options}
    if "a" in small.adapters:
        small.remove_adapter("a")
    return small.finetune(ROWS, "a", peft=RANK_2, record=folder, **given)


def test_a_record_has_the_numbers_of_the_job(small: Executor, tmp_path: Path) -> None:
    told: list[StepRecord] = []
    result = finetune(small, tmp_path, eval_at_start=True, on_step=told.append)
    run = read_run(tmp_path)
    assert (run.status, run.facts.kind, run.facts.name) == ("completed", "finetune", "a")
    assert [value for _, value in run.series["loss"]] == list(result.losses)
    assert list(run.series["eval_loss"]) == [*result.eval_losses]
    assert result.eval_losses[0][0] == 0
    for name in ("learning_rate", "gradient_norm", "tokens", "epoch"):
        assert [value for _, value in run.series[name]] == [getattr(one, name) for one in told]
    assert all(value > 0 for _, value in run.series["tokens_per_second"])
    assert all(2**20 < value < 2**40 for _, value in run.series["memory_bytes"])
    config = run.config
    wanted = {"total_steps": 6, "examples": 8, "optimizer": "adamw", "eps": 1e-8, "batch_size": 2}
    assert {name: config[name] for name in wanted} == wanted
    assert config["peft"]["rank"] == 2
    assert "loss" in (tmp_path / "report.html").read_text("utf-8")


def test_a_record_that_cannot_be_is_refused_before_the_job(small: Executor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"the record cannot be saved in .*is a file"):
        finetune(small, tmp_path / "file")


# ---------------------------------------------------------------------------------------- collapse


@pytest.fixture(scope="module")
def shared() -> Executor:
    """A model whose hidden states decide what it says, so that it has much to learn and to lose."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight *= 10
    return compiled.executor(model)


def mean_loss(executor: Executor, name: str, data: list[Example]) -> float:
    total, targets = executor.training_runner(name).evaluate(data)
    return total / targets


def first_step(data: list[Example]) -> list[Example]:
    batches = Batches(data, batch_size=OPTIONS["batch_size"])
    first = batches.plan(0)[: OPTIONS["gradient_accumulation_steps"]]
    return [data[index] for batch in first for index in batch]


@pytest.mark.parametrize(
    ("losses", "change"),
    [
        ((4.0,), LossChange(4.0, 4.0, 1)),
        ((4.0, 3.0, 2.0), LossChange(4.0, 2.0, 1)),
        # A run that improved, between two unlucky batches.
        ((4.0, 6.0, 5.0, 5.0, 3.0, 2.0, 1.0, 6.0), LossChange(5.0, 3.0, 4)),
        ((*range(100, 0, -1),), LossChange(95.5, 5.5, 10)),
        ((*range(20, 0, -1),), LossChange(18.0, 3.0, 5)),
    ],
)
def test_the_ends_of_a_job_are_means_of_many_steps(
    losses: tuple[float, ...], change: LossChange
) -> None:
    assert LossChange.of(losses) == change


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"restore_best": False, "patience": None}]
)
def test_a_job_that_makes_the_model_worse_has_collapsed(
    executor: Executor, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    learned = job(executor, None, epochs=40, learning_rate=3e-2, eval_data=DATA)
    assert not caplog.records
    bad: dict[str, Any] = {"learning_rate": 10.0, "schedule": "constant", "warmup_steps": None}
    result = job(executor, None, epochs=2, eval_data=DATA, **bad, **options)
    assert result.losses[0] < learned.losses[0] - 1
    assert result.is_collapsed
    assert result.first_data is not None
    assert result.first_data[0] == result.losses[0]
    assert result.first_data[1] == pytest.approx(mean_loss(executor, "a", first_step(DATA)))
    (record,) = caplog.records
    assert "a has collapsed: the loss of the first step's data was" in record.getMessage()


def test_a_risen_loss_of_harder_data_is_no_collapse(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    easy, hard = [7] * 12, torch.randint(2, 99, (12,)).tolist()
    options = {"peft": LORA, "shuffle": False, "batch_size": 1, "learning_rate": 3e-2}
    executor.finetune([Example(easy, easy)] * 20, "a", **options)
    data = [Example(easy, easy)] * 10 + [Example(hard, hard)] * 2
    options["learning_rate"] = 1e-4
    result = executor.finetune(data, "a", **{**options, "peft": None})
    change = LossChange.of(result.losses)
    assert change.last > change.first
    assert result.first_data is not None
    assert not result.is_collapsed
    assert not caplog.records


def test_the_adapter_that_is_restored_over_ranks_is_the_one_that_counts() -> None:
    """No evaluation but the one before the first step counts as an improvement."""
    program = ranked.make_program("gpt2", 2)

    def finetune(ranks: ThreadRanks) -> FinetuneResult:
        executor = ranked.make_executor(program, "gpt2", ranks)
        options = {**ranked.JOB, "learning_rate": 0.3, "schedule": "constant", "shuffle": False}
        best: dict[str, Any] = {"eval_at_start": True, "restore_best": True, "min_delta": 100.0}
        others = [[*range(first, first + 5)] for first in range(10, 60, 5)]
        data = [Example(ids, ids) for ids in [[7] * 10] * 10 + others]
        return executor.finetune(data, "b", **{**options, **best, "epochs": 1})

    for result in run_ranks(2, finetune):
        assert result.restored
        assert result.best_step == 0
        assert result.losses[4] < result.losses[0] - 1
        assert result.first_data == pytest.approx((result.losses[0],) * 2)
        assert not result.is_collapsed


def test_checkpoints_that_cannot_be_saved_are_known_before_the_first_step(
    executor: Executor, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    steps: list[Any] = []
    with pytest.raises(FinetuneError, match=r"checkpoints cannot be saved in .*: Not a directory"):
        job(executor, tmp_path / "file" / "job", steps.append)
    assert steps == []
    assert not executor.adapters


def test_a_dataset_dict_trains_and_evaluates(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    validation = examples(3, seed=1)
    options: dict[str, Any] = {"peft": LORA, "max_steps": 2, "eval_every": 1}
    splits = Splits(
        train=Stored(DATA, ["ids"]),
        validation=Stored(validation, ["ids"]),
        test=Stored(DATA[:1], ["ids"]),
    )
    result = executor.finetune(splits, "a", **options)
    assert [record.getMessage() for record in caplog.records] == [
        "a: 'train' (10 rows) is learned; 'validation' (3 rows) evaluates; 'test' not used"
    ]
    apart = executor.finetune(DATA, "b", eval_data=validation, **options)
    assert result.losses == apart.losses
    assert result.eval_losses == apart.eval_losses
    with pytest.raises(FinetuneError, match="eval_every=1 has no effect without eval_data"):
        executor.finetune(Splits(train=Stored(DATA, ["ids"])), "c", **options)
