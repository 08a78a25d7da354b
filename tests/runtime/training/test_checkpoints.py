"""Checkpoints of finetuning: a resumed run ends with the same bits, whatever ended it before.

Long because every way a checkpoint can be cut short or damaged is a test of its own.
"""

import json
import resource
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pcg.errors import DataError, FinetuneError, FinetuneInterrupted
from pcg.files import seal
from pcg.runtime.executor import Executor
from pcg.runtime.training.checkpoints import CheckpointStore
from pcg.runtime.training.options import FinetuneResult, StepRecord
from pcg.runtime.training.runner import TrainingPass
from pcg.runtime.training.windows import Window
from tests.support import compiled
from tests.support.damage import damage, damages
from tests.support.small_job import DATA, LORA, STEPS, examples, job, make_model

Bits = tuple[dict[str, torch.Tensor], tuple[float, ...], tuple[tuple[int, float], ...]]


@pytest.fixture(scope="module")
def shared() -> Executor:
    return compiled.executor(make_model(), None)


@pytest.fixture
def executor(shared: Executor) -> Iterator[Executor]:
    """Without adapters, before and after."""
    yield shared
    for name in shared.adapters:
        shared.remove_adapter(name)


def bits(executor: Executor, result: FinetuneResult) -> Bits:
    found = {k: v.clone() for k, v in executor.training_runner("a").parameters.items()}
    return found, result.losses, result.eval_losses


@pytest.fixture(scope="module")
def whole(shared: Executor) -> Bits:
    """What the job ends with when nothing stops it."""
    result = job(shared, None)
    assert result.steps == STEPS
    assert result.restored
    found = bits(shared, result)
    shared.remove_adapter("a")
    return found


def assert_same(one: Bits, other: Bits) -> None:
    assert one[1:] == other[1:]
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][key], other[0][key]) for key in one[0])


def stop_at(step: int, error: type[BaseException]) -> Callable[[StepRecord], None]:
    def stop(record: StepRecord) -> None:
        if record.step == step:
            raise error(f"at {step}")

    return stop


def snapshot(directory: Path) -> dict[str, bytes]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# ------------------------------------------------------------------------------- resuming exactly


@pytest.mark.parametrize(
    "step",
    [s if s in (1, 7) else pytest.param(s, marks=pytest.mark.slow) for s in range(1, STEPS + 1)],
)
def test_interrupted_at_any_step(
    executor: Executor, whole: Bits, tmp_path: Path, step: int
) -> None:
    with pytest.raises(FinetuneInterrupted, match="run the same call again to go on from") as error:
        job(executor, tmp_path, stop_at(step, KeyboardInterrupt))
    assert error.value.step == step
    assert error.value.checkpoint == tmp_path / f"step-{step:08d}"
    executor.remove_adapter("a")
    result = job(executor, tmp_path)
    assert (result.resumed_from, result.steps) == (step, STEPS)
    assert_same(bits(executor, result), whole)


def test_a_mixture_goes_on_where_it_was(executor: Executor, tmp_path: Path) -> None:
    mixed = {"data": [examples(6), examples(5, 3)], "probabilities": [3, 1], "epochs": 2}
    expected = bits(executor, job(executor, None, **mixed))
    executor.remove_adapter("a")
    with pytest.raises(FinetuneInterrupted):
        job(executor, tmp_path, stop_at(2, KeyboardInterrupt), **mixed)
    executor.remove_adapter("a")
    with pytest.raises(FinetuneError, match=r"probabilities .*\[3, 1\].*\[1, 1\]"):
        job(executor, tmp_path, **{**mixed, "probabilities": [1, 1]})
    result = job(executor, tmp_path, **mixed)
    assert result.resumed_from == 2
    assert_same(bits(executor, result), expected)
    with pytest.raises(DataError, match=r"probabilities has 2 numbers, and data is 3 sources"):
        job(executor, None, **{**mixed, "data": [DATA] * 3})


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.slow), "evaluation"])
def test_interrupted_within_a_step(
    executor: Executor, whole: Bits, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two parts of a step abandons it; within an evaluation, that is made up for."""
    real, calls = TrainingPass.end, []

    def interrupted(self: TrainingPass, window: Window) -> None:
        if self.trains == (where == "forward"):
            calls.append(where)
            if len(calls) == 4:
                signal.raise_signal(signal.SIGINT)
        real(self, window)

    monkeypatch.setattr(TrainingPass, "end", interrupted)
    with pytest.raises(FinetuneInterrupted) as error:
        job(executor, tmp_path)
    assert error.value.step == (1 if where == "forward" else 4)
    assert all(tensor.grad is None for tensor in executor.adapters["a"].tensors)
    result = job(executor, tmp_path)
    assert_same(bits(executor, result), whole)


def test_a_job_that_is_done_is_not_done_again(
    executor: Executor, whole: Bits, tmp_path: Path
) -> None:
    result = job(executor, tmp_path)
    assert result.checkpoint == tmp_path / "step-00000009"
    executor.remove_adapter("a")
    before = snapshot(tmp_path)
    again = job(executor, tmp_path, stop_at(1, ZeroDivisionError))
    assert again.resumed_from == STEPS
    assert again.checkpoint == result.checkpoint
    assert_same(bits(executor, again), whole)
    assert snapshot(tmp_path) == before


def test_more_steps_of_a_constant_rate(executor: Executor, tmp_path: Path) -> None:
    options = {"epochs": None, "schedule": "constant_with_warmup"}
    job(executor, tmp_path / "one", max_steps=4, **options)
    longer = job(executor, tmp_path / "one", max_steps=7, **options)
    executor.remove_adapter("a")
    straight = job(executor, tmp_path / "two", max_steps=7, **options)
    assert longer.resumed_from == 4
    assert longer.losses == straight.losses
    with pytest.raises(FinetuneError, match="beyond the 5 steps"):
        job(executor, tmp_path / "one", max_steps=5, **options)


def test_the_last_evaluation_of_an_extended_job_does_not_count(
    executor: Executor, tmp_path: Path
) -> None:
    """A longer job has none there, so that it stops and restores as if it had been longer."""
    options = {"epochs": None, "schedule": "constant_with_warmup", "patience": 3}
    options["learning_rate"] = 0.3
    job(executor, tmp_path / "one", max_steps=9, **options)
    longer = job(executor, tmp_path / "one", max_steps=14, **options)
    bits_of_longer = bits(executor, longer)
    executor.remove_adapter("a")
    straight = job(executor, tmp_path / "two", max_steps=14, **options)
    assert longer.resumed_from == 9
    assert longer.eval_losses == straight.eval_losses
    assert longer.stopped == straight.stopped == "early"
    assert_same(bits_of_longer, bits(executor, straight))
    executor.remove_adapter("a")
    options["eval_every"] = 4
    job(executor, tmp_path / "three", max_steps=6, **options)
    with pytest.raises(FinetuneError, match="with its best evaluation, which a run of 7 steps"):
        job(executor, tmp_path / "three", max_steps=7, **options)


# ------------------------------------------------------------------------------- what is on disk


def test_a_directory_is_of_one_job_at_a_time(
    executor: Executor, whole: Bits, tmp_path: Path
) -> None:
    """A second one would remove what the first saves, and point to what the first removes."""
    other = compiled.executor(make_model(), None)

    def meanwhile(record: StepRecord) -> None:
        with pytest.raises(FinetuneError, match="another job saves its checkpoints in"):
            job(other, tmp_path)

    result = job(executor, tmp_path, meanwhile)
    assert_same(bits(executor, result), whole)
    assert not other.adapters
    assert job(other, tmp_path).resumed_from == STEPS


def test_files(executor: Executor, tmp_path: Path) -> None:
    """Two checkpoints are kept, no file is a pickle, and peft reads the adapter."""
    import peft  # not for the process that is killed

    result = job(executor, tmp_path)
    assert (tmp_path / "latest").read_text() == "step-00000009\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest", "step-00000006", "step-00000009",
    ]  # fmt: skip
    files = sorted(p for p in snapshot(tmp_path) if p.startswith("step-00000009"))
    assert [file.split("/", 1)[1] for file in files] == [
        "SHA256SUMS",
        "adapter_config.json",
        "adapter_model.safetensors",
        "best/SHA256SUMS",
        "best/adapter_config.json",
        "best/adapter_model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
    ]
    for folder in (tmp_path / "step-00000009", tmp_path / "step-00000009" / "best"):
        subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    state = json.loads((tmp_path / "step-00000009" / "trainer_state.json").read_text())["state"]
    assert tuple(state["losses"]) == result.losses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(make_model(), tmp_path / "step-00000009" / "best")
    ids = [5, 6, 7, 8]
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor([ids])).logits[0]
    assert torch.allclose(executor.logits(ids, "a"), logits, atol=1e-5)


def test_starting_anew(executor: Executor, whole: Bits, tmp_path: Path) -> None:
    """The old checkpoints go when the first new one is there, not before."""
    job(executor, tmp_path, max_steps=6, epochs=None)
    executor.remove_adapter("a")
    seen = []

    def look(record: StepRecord) -> None:
        seen.append(sorted(path.name for path in tmp_path.glob("step-*")))

    result = job(executor, tmp_path, look, resume=False)
    assert result.resumed_from is None
    assert seen[1:3] == [["step-00000003", "step-00000006"], ["step-00000003.1"]]
    assert_same(bits(executor, result), whole)
    assert job(executor, tmp_path).resumed_from == STEPS


def test_disk_full(executor: Executor, whole: Bits, tmp_path: Path) -> None:
    """The checkpoint before stays, and the run goes on from it when there is room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before: dict[str, bytes] = {}

    def fill(record: StepRecord) -> None:
        if record.step == 4:
            before.update(snapshot(tmp_path))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))

    try:
        with pytest.raises(
            FinetuneError,
            match=r"step 6 cannot be saved in .*File too.*step-00000003 is still good",
        ):
            job(executor, tmp_path, fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path) == before
    assert not list(tmp_path.glob(".saving-*"))
    result = job(executor, tmp_path)
    assert result.resumed_from == 3
    assert_same(bits(executor, result), whole)


# ------------------------------------------------------------------------------- what is refused


@pytest.fixture
def stopped(executor: Executor, tmp_path: Path) -> Path:
    """A job that was interrupted after four steps; its adapter is gone."""
    with pytest.raises(FinetuneInterrupted):
        job(executor, tmp_path, stop_at(4, KeyboardInterrupt))
    executor.remove_adapter("a")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 2e-2}, "learning_rate was 0.01, is 0.02"),
        ({"seed": 1, "weight_decay": 0.0}, "weight_decay was 0.1, is 0.0; seed was 0, is 1"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps was 2, is 1"),
        ({"epochs": 4}, "total_steps was 9, is 12, .* only constant schedules can be extended"),
        ({"patience": None, "restore_best": True}, "patience was 5, is None"),
        ({"data": examples(10, seed=2)}, r"data \(checksum\) was \d+, is \d+"),
        ({"data": DATA[:9]}, "total_steps|examples was 10, is 9"),
        ({"eval_data": examples(3, seed=2)}, r"eval_data \(checksum\) was"),
        ({"peft": {**LORA, "r": 5}}, "the checkpoint has rank 4 with scale 2 at .*rank 5"),
        ({"peft": {**LORA, "lora_dropout": 0.1}}, r"checkpoint has dropout 0 and peft= 0.1"),
        ({"peft": {**LORA, "bias": "all"}}, 'the checkpoint has bias="none" and peft= "all"'),
    ],
)
def test_another_job(
    executor: Executor, stopped: Path, options: dict[str, Any], message: str
) -> None:
    before = snapshot(stopped)
    with pytest.raises(FinetuneError, match=message):
        job(executor, stopped, **options)
    assert not executor.adapters
    assert snapshot(stopped) == before


def test_another_adapter_of_that_name(executor: Executor, stopped: Path) -> None:
    mine = executor.add_adapter("a", {**LORA, "r": 2})
    with pytest.raises(FinetuneError, match=r"rank 4 .* and this run rank 2"):
        job(executor, stopped, peft=None)
    assert executor.adapters["a"] is mine


def test_another_base(stopped: Path) -> None:
    """In one entry."""
    model = make_model()
    model.lm_head.weight.data[5, 7] += 0.01
    other = compiled.executor(model, None)
    with pytest.raises(FinetuneError, match=r"base_weights \(checksum\) was"):
        job(other, stopped)


def test_nothing_to_resume(executor: Executor, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="resume=True, but there is no checkpoint"):
        job(executor, tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def check_damaged(
    executor: Executor, whole: Bits, stopped: Path, good: Path, one: tuple[str, str, int]
) -> None:
    """The job ends as one without damage, from a checkpoint that is good, or names the file."""
    file, how, place = one
    shutil.rmtree(stopped)
    shutil.copytree(good, stopped)
    damage(stopped / file, how, place)
    resumed = job(executor, stopped)
    assert resumed.resumed_from in (3, 4)
    assert_same(bits(executor, resumed), whole)
    executor.remove_adapter("a")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 9))]
)
def test_no_damage_changes_what_a_job_ends_with(
    executor: Executor,
    whole: Bits,
    stopped: Path,
    tmp_path: Path,
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = shutil.copytree(stopped, tmp_path.with_name(f"good-{seed}"))
    files = sorted(
        name for name in snapshot(stopped) if not seed or "4/" in name or "/" not in name
    )
    for one in damages(good, files if seed else files[::3], seed):
        caplog.clear()
        check_damaged(executor, whole, stopped, good, one)
        if one[0].startswith("step-00000004/"):
            assert Path(one[0]).name in caplog.text
        elif one[0] != "latest":
            assert not caplog.messages


def test_all_checkpoints_are_damaged(executor: Executor, stopped: Path) -> None:
    """The newest one's damage is named with the fix, nothing is changed, and nothing is removed."""
    damage(stopped / "step-00000003" / "optimizer.safetensors", "flip", 9999)
    damage(stopped / "step-00000004" / "adapter_model.safetensors", "flip", 9999)
    before = snapshot(stopped)
    with pytest.raises(FinetuneError) as refused:
        job(executor, stopped)
    assert "step-00000004/adapter_model.safetensors is damaged: the SHA-256" in str(refused.value)
    assert str(refused.value).endswith("there is no good checkpoint before it")
    assert not executor.adapters
    assert snapshot(stopped) == before


def test_a_lost_pointer_loses_no_checkpoint(executor: Executor, stopped: Path) -> None:
    """A start anew would remove them."""
    for content in (None, "", "step-00000007", "../elsewhere"):
        (stopped / "latest").unlink(missing_ok=True)
        if content is not None:
            (stopped / "latest").write_text(content)
        latest = CheckpointStore(stopped).latest()
        assert latest == stopped / "step-00000004"
    (stopped / "latest").write_text("step-00000003")
    assert job(executor, stopped).resumed_from == 3


def test_a_checkpoint_without_checksums(executor: Executor, stopped: Path) -> None:
    """That of an older pcg is read; one of this pcg has lost them."""
    for path in stopped.rglob("SHA256SUMS"):
        path.unlink()
    with pytest.raises(FinetuneError, match="step-00000004/SHA256SUMS is missing; bring"):
        job(executor, stopped)
    for path in stopped.rglob("trainer_state.json"):
        path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    assert job(executor, stopped).resumed_from == 4


def test_optimizer_of_another_adapter(executor: Executor, stopped: Path) -> None:
    """Found after the adapter was read: the one that was there before is put back."""
    mine = executor.add_adapter("a", LORA)
    good = stopped / "step-00000004" / "optimizer.safetensors"
    state = load_file(good)
    save_file({key.replace("q_proj", "k_proj"): value for key, value in state.items()}, good)
    seal(good.parent)
    with pytest.raises(FinetuneError, match=r"no step for .*q_proj"):
        job(executor, stopped)
    assert executor.adapters["a"] is not mine
    for kept, tensor in zip(mine.tensors, executor.adapters["a"].tensors, strict=True):
        assert torch.equal(kept, tensor)
