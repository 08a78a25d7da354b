"""Runs by an objective without a model: when they evaluate and save, where they resume and end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import FinetuneError, FinetuneInterrupted
from pcg.files import seal
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.records.run import read_run
from pcg.runtime.training.checkpoints import (
    FORMAT,
    OPTIMIZER,
    STATE,
    CheckpointStore,
    TrainerRun,
    TrainerState,
)
from pcg.runtime.training.options import Numbers, RunOptions
from pcg.runtime.training.run import Find, Objective, Run, StepNumbers
from pcg.runtime.training.work_units import Work, run_to_end

EPOCH = 3


class Counting(Objective[list[int]]):
    """Counts steps; the loss of a step is its number's reciprocal."""

    name, doing, kind, evaluates = "a", "counting 'a'", "count", True

    def __init__(self, stops_at: int = 0) -> None:
        self.stepped: list[int] = []
        self.evaluated: list[int] = []
        self.saved: list[int] = []
        self.events: list[str] = []
        self._step, self._stops_at = 0, stops_at

    def read(self, path: Path) -> TrainerRun:
        return TrainerRun.read(path)

    def start(self, find: Find) -> None:
        found = find()
        self._step = 0 if found is None else found[1].state.step

    def undo(self) -> None:
        self.events.append("undone")

    def gradients(self, step: int, rate: float) -> Work[None]:
        yield from ()
        assert step == self._step

    def update(self, step: int, rate: float) -> StepNumbers:
        self._step += 1
        self.stepped.append(self._step)
        return StepNumbers(step // EPOCH, 1 / self._step, rate, 2, 1, {"twice": 2.0 * self._step})

    def position(self) -> dict[str, Any]:
        return {"index": self._step % EPOCH}

    def evaluate(self, step: int) -> Work[Numbers]:
        yield from ()
        self.evaluated.append(step)
        return {"loss": 1 / (1 + step), "share": 0.5}

    def save(
        self, store: CheckpointStore, state: TrainerState, trajectory: Mapping[str, Any]
    ) -> Path:
        self.saved.append(state.step)

        def write(path: Path) -> None:
            path.mkdir()
            losses = [{"loss": loss} for loss in state.losses]
            evaluations = [(step, {"loss": loss}) for step, loss in state.eval_losses]
            notes = TrainerRun(state, trajectory, losses, evaluations).notes
            written = {"format": FORMAT, "trajectory": {}, "state": {"position": notes}}
            for file in (CONFIG, WEIGHTS, OPTIMIZER):
                (path / file).write_text("{}")
            (path / STATE).write_text(json.dumps(written))
            seal(path)

        return store.save(state.step, write)

    def is_interrupted(self, is_done: bool) -> bool:
        return self._step == self._stops_at

    def finish(self, run: Run[list[int]]) -> Work[list[int]]:
        yield from ()
        return self.stepped

    def end(self) -> None:
        self.events.append("ended")


def run_of(
    objective: Counting, total: int = 7, beta: float = 0.1, **options: Any
) -> Run[list[int]]:
    return Run(
        objective,
        RunOptions(progress=False, **options),
        total=total,
        rate=lambda step: 1.0 / (1 + step),
        trajectory={"beta": beta},
        config=lambda: {"beta": beta},
    )


def test_a_run_evaluates_and_saves_when_it_is_due(tmp_path: Path) -> None:
    objective = Counting()
    run = run_of(objective, checkpoint_dir=tmp_path / "c", eval_every=2, eval_at_start=True)
    assert run_to_end(run.work()) == [1, 2, 3, 4, 5, 6, 7]
    assert objective.evaluated == [0, 2, 4, 6, 7]
    assert objective.saved == [3, 6, 7]  # each epoch, and the end
    assert sorted(path.name for path in (tmp_path / "c").glob("step-*")) == [
        "step-00000006",
        "step-00000007",
    ]
    assert objective.events == ["ended"]


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    folders = {"checkpoint_dir": tmp_path / "c", "record": tmp_path / "r"}
    with pytest.raises(FinetuneInterrupted, match="counting 'a' was interrupted after step 4 of 7"):
        run_to_end(run_of(Counting(stops_at=4), **folders).work())
    with pytest.raises(FinetuneError, match=r"another run: beta was 0\.1, is 0\.2"):
        run_of(Counting(), beta=0.2, **folders)
    objective = Counting()
    run = run_of(objective, **folders)
    assert (run.resumed_from, run_to_end(run.work())) == (4, [5, 6, 7])
    assert run.state.losses == [1 / step for step in range(1, 8)]
    assert run.state.tokens == 14
    record = read_run(tmp_path / "r")
    assert [step for step, _ in record.series["loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert dict(record.series["eval_share"]) == {3: 0.5, 6: 0.5, 7: 0.5}
    assert [value for _, value in record.series["twice"]] == [2.0 * step for step in range(1, 8)]
    again = Counting()
    assert run_to_end(run_of(again, **folders).work()) == []
    assert again.saved == []  # this state has a checkpoint


def test_patience_ends_a_run() -> None:
    run = run_of(Counting(), total=40, eval_every=1, patience=3, min_delta=0.2)
    assert run_to_end(run.work()) == [1, 2, 3, 4, 5, 6]
    assert (run.state.stopped, run.state.best_step, run.state.best_loss) == (True, 3, 0.25)


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    first = run_of(Counting(), checkpoint_dir=tmp_path)
    second = Counting()
    with pytest.raises(FinetuneError, match="another job saves its checkpoints"):
        run_of(second, checkpoint_dir=tmp_path)
    assert second.events == ["undone"]
    run_to_end(first.work())
