"""TensorBoard and Weights & Biases: what goes to their libraries, and a library that is missing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pcg.errors import FinetuneError, RecordError
from pcg.records.record import RunRecord
from pcg.runtime.training.options import FinetuneOptions


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked, *more: None if asked == name else find(asked)
    )
    said = rf"needs the library {name}.*pip install 'pcg\[{name}\]'"
    with pytest.raises(RecordError, match=said):
        FinetuneOptions(record=tmp_path, report_to=(name,))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=said):
        RunRecord(tmp_path / "run", report_to=(name,))
    with RunRecord(tmp_path / "run"):  # nothing holds the folder
        pass


def test_what_is_no_sink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="report_to='mlflow'; use some of tensorboard, wandb"):
        RunRecord(tmp_path, report_to=("mlflow",))
    with pytest.raises(FinetuneError, match=r"report_to=.* has no effect without record"):
        FinetuneOptions(report_to=("wandb",))


def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunRecord(tmp_path, {"a": 1}, report_to=("tensorboard",)) as record:
        for step in range(1, 6):
            record.log(step, loss=1.0 / step, nothing=float("nan"))
    with RunRecord(tmp_path, {"a": 1}, done=3, report_to=("tensorboard",)) as record:
        record.log(4, loss=7.0)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert read.Tags()["scalars"] == ["loss"]
    found = [(one.step, one.value) for one in read.Scalars("loss")]
    assert found == [pytest.approx(pair) for pair in [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 7.0)]]


def test_a_run_that_goes_on_is_one_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda numbers, step: calls.append((step, numbers)),
        finish=lambda exit_code: calls.append(exit_code),
    )

    def init(**given: Any) -> Any:
        calls.append(given)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    with RunRecord(tmp_path, {"a": 1}, done=1, report_to=("wandb",)) as record:
        record.log(2, loss=1.0)
    first, second = (one for one in calls if isinstance(one, dict))
    assert first["id"] == second["id"]
    assert (first["config"], first["resume"], first["dir"]) == ({"a": 1}, "allow", str(tmp_path))
    assert [one for one in calls if not isinstance(one, dict)] == [
        (1, {"loss": 2.0}), 1, (2, {"loss": 1.0}), 0,
    ]  # fmt: skip


def interrupted(folder: Path) -> None:
    with RunRecord(folder, {"a": 1}, report_to=("wandb",)) as record:
        record.log(1, loss=2.0)
        raise KeyboardInterrupt
