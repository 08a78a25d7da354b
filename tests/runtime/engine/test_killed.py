"""kill -9 of a process that serves and trains: the job goes on to the weights it would have had."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
import transformers

import pcg
import pcg.compiler as compiler
from pcg.ir.program.folder import save_program
from pcg.peft.adapter import Adapter
from pcg.runtime.executor import Executor
from tests.support.serving_job import DATA, OPTIONS, STEPS, VOCABULARY, WAITING, co_serve


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled folder in fp64, where what runs beside the job does not show in its weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).double().save_pretrained(folder / "weights")
    made = compiler.compile_program(folder / "weights", None, dtype="float64")
    save_program(made, folder / "program", weights=folder / "weights")
    return folder / "program"


@pytest.fixture(scope="module")
def whole(program: Path) -> Adapter:
    """What the job makes alone, when nothing stops it."""
    executor = pcg.load(program)
    options = {key: value for key, value in OPTIONS.items() if key != "save_every"}
    executor.finetune(DATA, "trained", **options)
    return executor.adapters["trained"]


def check(executor: Executor, whole: Adapter) -> None:
    weights = executor.adapters["trained"].weights
    assert weights.keys() == whole.weights.keys()
    for path, of_module in whole.weights.items():
        for found, expected in zip(weights[path].tensors, of_module.tensors, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def killed(program: Path, checkpoints: Path, seed: int, random: Random, least: int) -> bool:
    """Run a process and kill it in some step of its job; False where that was done already."""
    module = "tests.support.serving_job"
    command = [sys.executable, "-m", module, str(program), str(checkpoints), str(seed)]
    pipe = subprocess.PIPE
    steps = random.randrange(12)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == WAITING:
                break
            steps -= int(line) >= least
            if steps < 0:
                break
        process.kill()
    assert process.returncode in (0, -signal.SIGKILL)
    return process.returncode != 0


def test_a_killed_engine_resumes_its_job(program: Path, whole: Adapter, tmp_path: Path) -> None:
    assert killed(program, tmp_path, 1, Random(0), 2)
    executor = pcg.load(program)
    engine = co_serve(executor, tmp_path, 2)
    (job_end,) = [event for event in engine.log if event.subject == "trained"][-1:]
    assert job_end.kind.value == "completed"
    assert 2 <= STEPS - sum(event.kind.value == "stepped" for event in engine.log) < STEPS
    check(executor, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again(program: Path, whole: Adapter, tmp_path: Path, seed: int) -> None:
    """Within saving, too: some of the kills find a checkpoint that is not whole."""
    random = Random(seed)
    kills = sum(killed(program, tmp_path, 100 * seed + i, random, 0) for i in range(6))
    assert kills
    executor = pcg.load(program)
    co_serve(executor, tmp_path, seed)
    check(executor, whole)
