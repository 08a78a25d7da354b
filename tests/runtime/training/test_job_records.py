"""Records of finetuning jobs: the job's own numbers, each step once, whatever ended the job."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pcg
from pcg.errors import FinetuneInterrupted, RecordError
from pcg.records.run import read_run
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import StepRecord

DATA = [Example([2 + i, 3, 5 + i, 7], [2 + i, 3, 5 + i, 7]) for i in range(8)]
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def executor() -> Executor:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    return pcg.compile(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))


def finetune(executor: Executor, folder: Path, **options: Any) -> Any:
    given = {"batch_size": 2, "max_steps": 6, "eval_data": DATA[:2], "eval_every": 2, **options}
    if "a" in executor.adapters:
        executor.remove_adapter("a")
    return executor.finetune(DATA, "a", peft=LORA, record=folder, **given)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_record_has_the_numbers_of_the_job(executor: Executor, tmp_path: Path) -> None:
    told: list[StepRecord] = []
    result = finetune(executor, tmp_path, eval_at_start=True, on_step=told.append)
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


def test_a_job_that_goes_on_appends_and_doubles_nothing(executor: Executor, tmp_path: Path) -> None:
    def stop(record: StepRecord) -> None:
        if record.step == 4:
            raise KeyboardInterrupt

    whole = finetune(executor, tmp_path / "whole")
    options = {"checkpoint_dir": tmp_path / "checkpoints", "save_every": 2}
    with pytest.raises(FinetuneInterrupted):
        finetune(executor, tmp_path / "run", on_step=stop, **options)
    assert read_run(tmp_path / "run").status == "interrupted"
    path = tmp_path / "run/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # A kill -9 behind the checkpoint of step 4 and before its row; then one long before it.
    for left, torn in ((3, lines[3][:20]), (1, "")):
        path.write_text("".join(lines[:left]) + torn)
        finetune(executor, tmp_path / "run", **options)
        found = rows(tmp_path / "run")
        assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
        assert [row["loss"] for row in found] == list(whole.losses)
        evaluated = [(row["step"], row["eval_loss"]) for row in found if "eval_loss" in row]
        assert evaluated == list(whole.eval_losses)


def test_a_failed_job_says_why(executor: Executor, tmp_path: Path) -> None:
    def fail(record: StepRecord) -> None:
        raise ValueError(f"no more after {record.step}")

    with pytest.raises(ValueError, match="no more"):
        finetune(executor, tmp_path, on_step=fail)
    run = read_run(tmp_path)
    assert (run.status, run.facts.error, run.last_step) == ("failed", "no more after 1", 1)


def test_a_full_disk_fails_the_job_and_leaves_its_checkpoint(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = os.write, [3]

    def full(handle: int, data: bytes) -> int:
        if data.startswith(b'{"step":'):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    options = {"checkpoint_dir": tmp_path / "checkpoints", "save_every": 1}
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(RecordError, match="No space left on device"):
            finetune(executor, tmp_path / "run", **options)
    assert len(rows(tmp_path / "run")) == 3
    finetune(executor, tmp_path / "run", **options)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_record_that_cannot_be_is_refused_before_the_job(
    executor: Executor, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"the record cannot be saved in .*is a file"):
        finetune(executor, tmp_path / "file")


def test_a_job_of_an_engine_is_recorded(executor: Executor, tmp_path: Path) -> None:
    with executor.engine(kv_cache_bytes=2**18).start() as running:
        job = running.finetune(
            DATA, "b", peft=LORA, batch_size=2, max_steps=3, record=tmp_path / "run"
        )
        result = job.wait(60)
    assert [value for _, value in read_run(tmp_path / "run").series["loss"]] == list(result.losses)
    assert read_run(tmp_path / "run").status == "completed"
