"""States of runs, in directories that other jobs may be given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import FinetuneError
from pcg.files import seal
from pcg.peft.adapter_files import CONFIG, WEIGHTS
from pcg.runtime.training.checkpoints import FORMAT, OPTIMIZER, STATE, CheckpointStore
from pcg.train.run_states import RunStates
from tests.support.damage import damage


def write_state(path: Path, *, overwrite: bool, notes: Any) -> None:
    """Write no more of a state than what it is of."""
    path.mkdir()
    state = {"step": 2, "position": notes}
    saved = {"format": FORMAT, "trajectory": {}, "state": state}
    for name in (CONFIG, WEIGHTS, OPTIMIZER):
        (path / name).write_text("{}")
    (path / STATE).write_text(json.dumps(saved))
    seal(path)


def test_a_job_on_examples_does_not_remove_them(tmp_path: Path) -> None:
    states = RunStates(tmp_path, 2, "a test")
    states.save(write_state, 2, {"trajectory": {"beta": 0.1}})
    with pytest.raises(FinetuneError, match="step-00000002"):
        CheckpointStore(tmp_path).resumable("auto", "mine", {}, 10)
    assert CheckpointStore(tmp_path).resumable(False, "mine", {}, 10) is None
    assert states.resumable("auto", {"beta": 0.1}, 10) == tmp_path / "step-00000002"


def test_a_damaged_state_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = RunStates(tmp_path, 3, "a test")
    for step in (2, 4, 6):
        states.save(write_state, step, {"trajectory": {"beta": 0.1}})
    damage(tmp_path / "step-00000006" / OPTIMIZER, "flip", 3)
    damage(tmp_path / "step-00000004" / STATE, "gone", 0)
    assert states.resumable("auto", {"beta": 0.1}, 10) == tmp_path / "step-00000002"
    assert "step-00000006/optimizer.safetensors is damaged" in caplog.text
    states.save(write_state, 3, {"trajectory": {"beta": 0.1}})
    left = ["latest", *(f"step-0000000{step}" for step in (2, 3, 4, 6))]
    assert sorted(path.name for path in tmp_path.iterdir()) == left  # what is damaged, too
    for step in (2, 3):
        damage(tmp_path / f"step-0000000{step}" / STATE, "empty", 0)
    with pytest.raises(FinetuneError, match="no good checkpoint before it"):
        states.resumable("auto", {"beta": 0.1}, 10)
