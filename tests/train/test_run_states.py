"""States of runs over trainers, in directories that other jobs may be given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import FinetuneError
from pcg.files import seal
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.runtime.training.checkpoints import (
    FORMAT,
    OPTIMIZER,
    STATE,
    CheckpointStore,
    TrainerRun,
)
from tests.support.damage import damage


def save(store: CheckpointStore, step: int) -> None:
    """Write no more of a state than what it is of."""

    def write(path: Path) -> None:
        path.mkdir()
        notes = {"trajectory": {"beta": 0.1}, "step": step, "history": [{"loss": 1.0}] * step}
        state: dict[str, Any] = {"step": step, "losses": [1.0] * step, "position": notes}
        saved = {"format": FORMAT, "trajectory": {"optimizer": "adamw"}, "state": state}
        for name in (CONFIG, WEIGHTS, OPTIMIZER):
            (path / name).write_text("{}")
        (path / STATE).write_text(json.dumps(saved))
        seal(path)

    store.save(step, write)


def resumable(store: CheckpointStore, resume: str | bool = "auto") -> Path | None:
    found = store.resumable(resume, TrainerRun.read, {"beta": 0.1}, 10)
    return None if found is None else found[0]


def test_a_job_on_examples_does_not_remove_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2)
    of_examples = CheckpointStore(tmp_path)
    with pytest.raises(FinetuneError, match="step-00000002"):
        of_examples.resumable("auto", lambda path: of_examples.load(path, "mine"), {}, 10)
    assert resumable(store, False) is None
    assert resumable(store) == tmp_path / "step-00000002"


def test_a_damaged_state_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, 3)
    for step in (2, 4, 6):
        save(store, step)
    damage(tmp_path / "step-00000006" / OPTIMIZER, "flip", 3)
    damage(tmp_path / "step-00000004" / STATE, "gone", 0)
    assert resumable(store) == tmp_path / "step-00000002"
    assert "step-00000006/optimizer.safetensors is damaged" in caplog.text
    save(store, 3)
    left = ["latest", *(f"step-0000000{step}" for step in (2, 3, 4, 6))]
    assert sorted(path.name for path in tmp_path.iterdir()) == left  # what is damaged, too
    for step in (2, 3):
        damage(tmp_path / f"step-0000000{step}" / STATE, "empty", 0)
    with pytest.raises(FinetuneError, match="no good checkpoint before it"):
        resumable(store)
