"""Runs by an objective without a model: when they evaluate and save, where they resume and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainerCallback

from pcg.errors import DataError, FinetuneError, RecordError
from pcg.records.run import read_run
from pcg.runtime.data.example import Example
from pcg.runtime.data.order import Batches
from pcg.runtime.data.sources import named_sources
from pcg.runtime.executor import Executor
from pcg.runtime.training.callbacks import TrainingCallback
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


def test_several_evaluation_sets(small: Executor, tmp_path: Path) -> None:
    """Each set has the loss of a job with it alone; all have a mean over targets."""
    sets = {"seen": ROWS[:3], "new": [Example([9, 8, 7], [9, 8, 7])]}
    told: list[StepRecord] = []
    both = finetune(small, tmp_path / "both", eval_data=sets, on_step=told.append)
    alone = {
        name: dict(finetune(small, tmp_path / name, eval_data=rows).eval_losses)
        for name, rows in sets.items()
    }
    run = read_run(tmp_path / "both")
    for name, losses in alone.items():
        assert dict(run.series[f"eval_{name}_loss"]) == pytest.approx(losses, rel=1e-6)
    targets = {name: sum(row.targets for row in rows) for name, rows in sets.items()}
    for step, loss in both.eval_losses:
        total = sum(alone[name][step] * count for name, count in targets.items())
        assert loss == pytest.approx(total / sum(targets.values()), rel=1e-6)
    assert told[-1].evaluation is not None
    assert told[-1].evaluation.keys() == {"loss", "seen_loss", "new_loss"}


def test_samples_at_evaluations(
    small: Executor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Greedy continuations by the adapter of that step; the job itself stays the same."""
    rows = [Example([3, 4, 5, 6], [-100, -100, 5, 6]), Example([9, 8, 7], [9, 8, 7])]
    options = {"eval_data": rows, "eval_at_start": True, "max_steps": 4, "learning_rate": 3e-2}
    plain = finetune(small, tmp_path / "plain", **options)
    caplog.set_level("INFO", "pcg.finetuning")
    result = finetune(small, tmp_path / "a", eval_samples=2, eval_sample_tokens=3, **options)
    assert (result.losses, result.eval_losses) == (plain.losses, plain.eval_losses)
    samples = read_run(tmp_path / "a").samples
    assert [row["step"] for row in samples] == [0, 0, 2, 2, 4, 4]
    assert [row["prompt"] for row in samples[-2:]] == [[3, 4], [9]]
    made = small.generate([[3, 4], [9]], adapter="a", max_new_tokens=3)
    assert [row["completion"] for row in samples[-2:]] == [list(each.token_ids) for each in made]
    assert "a after step 4: [3, 4] → " in caplog.text
    engine = small.engine(kv_cache_bytes=2**20)
    with pytest.raises(FinetuneError, match="eval_samples=1; prompts are continued by"):
        engine.finetune(ROWS, "b", peft=RANK_2, eval_samples=1, **{**options, "max_steps": 1})
    with pytest.raises(FinetuneError, match="eval_samples=1 has no effect without eval_data"):
        finetune(small, tmp_path / "b", eval_samples=1, eval_data=None, eval_every=None)


def test_the_best_evaluation_by_a_metric(small: Executor, tmp_path: Path) -> None:
    """The best step is that of the metric, and resume keeps it."""
    sets = {"seen": ROWS[:3], "new": [Example([9, 8, 7, 30], [9, 8, 7, 30])]}
    options = {
        "eval_data": sets, "restore_best": True, "eval_every": 1, "max_steps": 8,
        "learning_rate": 3e-2, "schedule": "constant",
    }  # fmt: skip
    greatest = finetune(
        small, tmp_path / "a", metric_for_best_model="eval_new_loss", greater_is_better=True,
        **options,
    )  # fmt: skip
    losses = read_run(tmp_path / "a").series["eval_new_loss"]
    step, value = max(losses, key=lambda item: item[1])
    assert (greatest.best_step, greatest.best_loss) == (step, pytest.approx(value))
    least = finetune(small, tmp_path / "b", metric_for_best_model="seen_loss", **options)
    step, value = min(read_run(tmp_path / "b").series["eval_seen_loss"], key=lambda item: item[1])
    assert (least.best_step, least.best_loss) == (step, pytest.approx(value))
    for wrong, words in (
        ({"metric_for_best_model": "eval_old_loss"}, "metrics are eval_loss, eval_seen_loss"),
        ({"metric_for_best_model": "loss", "restore_best": None}, "has no effect without patience"),
    ):
        with pytest.raises(FinetuneError, match=words):
            finetune(small, tmp_path / "c", **{**options, **wrong})


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a=a.jsonl,b=b.jsonl", ["a", "b"]),
        ({"a": "a.jsonl", "b": [{"prompt": "x", "completion": "y"}]}, ["a", "b"]),
        ({"prompt": ["a.jsonl"], "completion": ["b.jsonl"]}, None),
        ({"asked": ["x", "y"], "answered": ["a", "b"]}, None),
        ([{"text": "a=b"}], None),
    ],
)
def test_named_sources(source: Any, names: list[str] | None) -> None:
    for wrong, words in (
        ("a=a.jsonl,a=b.jsonl", "has the name 'a' twice"),
        ({"a": "a.jsonl", "b": []}, "has no examples for 'b'"),
    ):
        with pytest.raises(DataError, match=words):
            named_sources(wrong)
    named = named_sources(source)
    assert named is names or list(named or ()) == names


class Recorder(TrainerCallback):  # type: ignore[misc]  # of an untyped library
    """A callback of transformers, which ends a run after its third step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.numbers: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **facts: Any) -> None:
            self.events.append((name, state.global_step))
            self.numbers |= facts.get("logs", {}) | facts.get("metrics", {})
            control.should_training_stop = state.global_step == 3

        return note


def test_a_callback_of_transformers_sees_a_run_and_ends_it(small: Executor, tmp_path: Path) -> None:
    recorder = Recorder()
    result = finetune(
        small, tmp_path / "run", callbacks=[recorder], checkpoint_dir=tmp_path / "c", save_every=2
    )
    assert recorder.events == [
        ("on_train_begin", 0),
        ("on_log", 1), ("on_step_end", 1),
        ("on_log", 2), ("on_step_end", 2), ("on_evaluate", 2), ("on_save", 2),
        ("on_log", 3), ("on_step_end", 3), ("on_evaluate", 3), ("on_save", 3),
        ("on_train_end", 3),
    ]  # fmt: skip
    assert (result.steps, result.stopped) == (3, "early")
    assert recorder.numbers["loss"] == result.losses[-1]
    assert recorder.numbers["eval_loss"] == result.eval_losses[-1][1]
    for wrong in ([print], [TrainingCallback], print):
        with pytest.raises(FinetuneError, match="callbacks"):
            finetune(small, tmp_path / "other", callbacks=wrong)


class Saving(TrainerCallback):  # type: ignore[misc]  # of an untyped library
    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        control.should_save = True


class Broken(TrainingCallback):
    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        self.counts  # type: ignore[attr-defined]  # noqa: B018


def test_what_callbacks_lack_of_transformers_is_named(small: Executor, tmp_path: Path) -> None:
    for callback, words in (
        (EarlyStoppingCallback(1), "'load_best_model_at_end' .*the name here is 'restore_best'"),
        (Saving(), r"sets control\.should_save, .* save_every"),
    ):
        with pytest.raises(FinetuneError, match=words):
            finetune(small, tmp_path / "run", callbacks=[callback])
    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'counts'"):
        finetune(small, tmp_path / "run", callbacks=[Broken()])


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
