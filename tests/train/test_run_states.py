"""States of runs, in directories that other jobs may be given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import FinetuneError
from pcg.runtime.training.checkpoints import FORMAT, STATE, CheckpointStore
from pcg.train.run_states import RunStates


def write_state(path: Path, *, overwrite: bool, notes: Any) -> None:
    """Write no more of a state than what it is of."""
    path.mkdir()
    state = {"step": 2, "position": notes}
    saved = {"format": FORMAT, "trajectory": {}, "state": state}
    (path / STATE).write_text(json.dumps(saved))


def test_a_job_on_examples_does_not_remove_them(tmp_path: Path) -> None:
    states = RunStates(tmp_path, 2, "a test")
    states.save(write_state, 2, {"trajectory": {"beta": 0.1}})
    with pytest.raises(FinetuneError, match="step-00000002"):
        CheckpointStore(tmp_path).resumable("auto", "mine", {}, 10)
    assert CheckpointStore(tmp_path).resumable(False, "mine", {}, 10) is None
    assert states.resumable("auto", {"beta": 0.1}, 10) == tmp_path / "step-00000002"
