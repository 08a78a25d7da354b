"""What a job's data does while it is prepared: nothing to other jobs, to loads, or to requests."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

import pcg
import pcg.compiler as compiler
from pcg.errors import DataError, FinetuneError, PcgError
from pcg.ir.program.folder import save_program
from pcg.peft.adapter import Adapter
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.sources import DataLimits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import JobState
from pcg.runtime.text.tokenizer import Tokenizer
from tests.support import compiled
from tests.support.serving_job import DATA, OPTIONS, STEPS, VOCABULARY, WAITING, co_serve
from tests.support.small_engine import make_engine
from tests.support.text_model import CHATS, ENDLESS, ROWS, save_text_model

LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
JOB: dict[str, Any] = {"peft": LORA, "max_steps": 2, "batch_size": 2, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@contextmanager
def started(executor: Executor, limits: DataLimits | None = None) -> Iterator[AsyncEngine]:
    engine = make_engine(executor, 64, Limits(), data_limits=limits)
    with engine.start() as running:
        yield running
    engine.check_integrity()


class Blocked:
    """An iterator that waits until somebody lets it go."""

    def __init__(self) -> None:
        self.go, self.waits = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        self.waits.set()
        assert self.go.wait(60)
        yield from ROWS


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses(job: Any) -> tuple[float, ...]:
    found: tuple[float, ...] = job.wait(120).losses
    return found


def test_iterators_that_block_stop_no_one_else(model: Path, tmp_path: Path) -> None:
    executor, alone = compiled.executor(model), compiled.executor(model)
    expected = alone.finetune(ROWS, "alone", progress=False, **JOB).losses
    alone.save_adapter("alone", tmp_path / "saved")
    blocked = [Blocked() for _ in range(4)]
    with started(executor, DataLimits(at_once=1)) as running:
        waiting = [running.finetune(data, f"w{i}", **JOB) for i, data in enumerate(blocked)]
        assert all(data.waits.wait(60) for data in blocked)
        assert running.add_adapter("loaded", tmp_path / "saved").result(60).name == "loaded"
        in_file = running.finetune(written(tmp_path / "a.jsonl", ROWS), "file", **JOB)
        assert losses(in_file) == pytest.approx(expected, rel=1e-4)
        assert losses(running.finetune(iter(ROWS), "rows", **JOB)) == pytest.approx(
            expected, rel=1e-4
        )
        assert running.submit("Hello", "rows", max_new_tokens=2, ignore_eos=True).wait(60)
        blocked[0].go.set()
        assert losses(waiting[0]) == pytest.approx(expected, rel=1e-4)
        assert [job.state for job in waiting[1:]] == [JobState.QUEUED] * 3
    for job in waiting[1:]:
        with pytest.raises(FinetuneError, match="was cancelled"):
            job.wait(0)
    for data in blocked:
        data.go.set()


CANCELLED: dict[str, Callable[[], Any]] = {"iterator": Blocked, "template": lambda: CHATS}


@pytest.mark.parametrize("kind", CANCELLED)
def test_a_job_is_cancelled_while_it_is_prepared(kind: str, model: Path) -> None:
    """Its wait ends, and its slot and its name are free; a template may run for years."""
    executor = compiled.executor(model)
    tokenizer = executor.state.tokenizer
    assert tokenizer is not None
    executor.state.tokenizer = tokenizer.with_template(ENDLESS)
    data = CANCELLED[kind]()
    with started(executor, DataLimits(at_once=1)) as running:
        job, behind = (running.finetune(data, name, **JOB) for name in ("mine", "behind"))
        assert running.submit([5, 6], max_new_tokens=3, ignore_eos=True).wait(60)
        behind.cancel()
        job.cancel()
        for ended in (job, behind):
            with pytest.raises(FinetuneError, match=f"job '{ended.name}' was cancelled"):
                ended.wait(60)
            assert ended.state is JobState.CANCELLED
        assert running.finetune(ROWS, "mine", **JOB).wait(120).steps == 2
        assert running.call(lambda: list(running._jobs.reserved)).result(60) == []


def test_texts_are_tokenized_in_another_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 2.4 MB took 6.6 s of this process' GIL, and with it all steps."""
    executor = compiled.executor(model)
    huge = written(tmp_path / "huge.jsonl", [{"text": "the quick brown fox. " * 12_000}])

    def here(*_: object) -> None:
        raise AssertionError("tokenized in this process")

    monkeypatch.setattr(Tokenizer, "encode_with_offsets", here)
    with started(executor) as running:
        stream = running.submit([5, 6, 7], max_new_tokens=100, ignore_eos=True)
        job = running.finetune(huge, "huge", max_length=64, **JOB)
        refused = running.finetune(huge, "refused", **JOB)
        chats = running.finetune(CHATS, "chats", eval_data=CHATS[:1], **JOB)
        assert len(stream.wait(60).token_ids) == 100
        assert job.wait(120).tokens == 2 * 64
        assert len(chats.wait(120).eval_losses) == 1
        with pytest.raises(DataError, match="tokens, more than the model's 128 positions"):
            refused.wait(120)
        assert refused.state is JobState.FAILED


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "endless": (lambda: itertools.repeat("dog"), r"data\[50\] is row 51, and a job here takes 50"),
    "large": (lambda: ({"text": "a" * 2000} for _ in "a"), "more than 1,000 bytes, the most of"),
    "raising": (lambda: (1 // 0 for _ in "a"), "data of 'bad' failed by ZeroDivisionError"),
    "surrogate": (lambda: ["\ud800"], "lone surrogate"),
    "no file": (lambda: "none.jsonl", "no data file"),
    "long path": (lambda: f"/{'a' * 5000}.jsonl", "no data file|cannot be read"),
    "number": (lambda: 5, "data is a number"),
}


def test_an_endless_iterable_ends_with_the_steps(model: Path) -> None:
    with started(compiled.executor(model)) as running:
        assert running.finetune(itertools.repeat("dog"), "mine", **JOB).wait(60).steps == 2


def test_a_name_is_free_once_its_job_is_over(model: Path) -> None:
    executor, data = compiled.executor(model), Blocked()
    with started(executor) as running:
        job = running.finetune(data, "mine", **JOB)
        assert data.waits.wait(60)
        again: Future[Any] = Future()
        job._end.add_done_callback(  # at once, on the thread that told the end
            lambda _: again.set_result(running.finetune(ROWS, "mine", **JOB))
        )
        job.cancel()
        assert again.result(60).wait(120).steps == 2
    data.go.set()


def test_data_that_is_refused(model: Path) -> None:
    executor = compiled.executor(model)
    limits = DataLimits(rows=50, row_bytes=1000, waiting=3)
    with started(executor, limits) as running:
        epoch = {**JOB, "max_steps": None, "epochs": 1}
        for make, message in BAD.values():
            with pytest.raises(PcgError, match=message):
                running.finetune(make(), "bad", **epoch).wait(60)
        blocked = [Blocked() for _ in range(3)]
        waiting = [running.finetune(data, f"w{i}", **JOB) for i, data in enumerate(blocked)]
        with pytest.raises(FinetuneError, match="3 jobs are being prepared, as many as"):
            running.finetune(ROWS, "one more", **JOB).wait(60)
        waiting[0].cancel()
        assert running.finetune(ROWS, "one more", **JOB).wait(120).steps == 2
    for data in blocked:
        data.go.set()


# ------------------------------------------------------------------------------------------ kill -9


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
