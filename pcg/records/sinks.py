"""Sinks: third-party libraries as further destinations of a run's numbers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pcg.errors import RecordError
from pcg.records.run_files import TENSORBOARD, RunFacts
from pcg.units import shown


class Sink(ABC):
    """Receives the numbers of a run."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float | int | None]) -> None: ...

    @abstractmethod
    def end(self, *, is_completed: bool) -> None: ...


# --------------------------------------------------------------------------------- tensorboard sink


class TensorBoardSink(Sink):
    """Writes scalars by name; scalars after the `done` steps of a resumed run are purged."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        import tensorboard  # noqa: F401  torch's writer is made of it
        from torch.utils.tensorboard import SummaryWriter

        place = str(folder / TENSORBOARD)
        self._writer: Any = SummaryWriter(place, purge_step=done + 1 if done else 0)
        if not done:
            text = json.dumps(config, indent=1)
            indented = "".join(f"    {line}\n" for line in text.splitlines())  # code in Markdown
            self._writer.add_text("config", indented, 0)

    def log(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def end(self, *, is_completed: bool) -> None:
        self._writer.close()


# --------------------------------------------------------------------------------------- wandb sink


class WandbSink(Sink):
    """Logs to a run with the id of the record, so that a resumed run stays the same run.

    Weights & Biases ignores steps that a run already has. Its variables, such as WANDB_MODE, apply.
    """

    def __init__(self, folder: Path, facts: RunFacts, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pcg"),
            name=facts.name,
            id=_digest(folder, facts),
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )

    def log(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        present = {name: value for name, value in numbers.items() if value is not None}
        self._run.log(present, step=step)

    def end(self, *, is_completed: bool) -> None:
        self._run.finish(exit_code=0 if is_completed else 1)


# -------------------------------------------------------------------------------------- mlflow sink


class MlflowSink(Sink):
    """Logs to a run with the record's digest as a tag, so that a resumed run stays the same run.

    MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply. The configuration is an artifact, and its
    plain values are parameters.
    """

    def __init__(self, folder: Path, facts: RunFacts, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", "pcg")
        experiment = client.get_experiment_by_name(name)
        experiment_id = (
            client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        tag = _digest(folder, facts)
        known = client.search_runs([experiment_id], f"tags.pcg_record = '{tag}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        tags = {"pcg_record": tag}
        self._id = client.create_run(experiment_id, run_name=facts.name, tags=tags).info.run_id
        client.log_dict(self._id, dict(config), "config.json")
        plain = {name: value for name, value in config.items() if isinstance(value, _PLAIN)}
        client.log_batch(self._id, params=[Param(name, str(x)) for name, x in plain.items()])

    def log(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(name, float(value), now_ms, step)
            for name, value in numbers.items()
            if value is not None
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, *, is_completed: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_completed else "FAILED")


_PLAIN = (str, int, float, bool)


def _digest(folder: Path, facts: RunFacts) -> str:
    """Return a name of a record for other systems."""
    return hashlib.sha256(f"{folder} {facts.begun_s!r}".encode()).hexdigest()[:16]


SINKS = ("mlflow", "tensorboard", "wandb")
"""Names of sinks, which are also names of their libraries and of pcg's extras."""


def check_sinks(names: Sequence[str]) -> None:
    """Raise a RecordError for an unknown sink, or a sink without its library installed."""
    for name in names:
        if name not in SINKS:
            raise RecordError(f"report_to={shown(name)}; use some of {', '.join(SINKS)}")
        if importlib.util.find_spec(name) is None:
            raise RecordError(
                f"report_to={name!r} needs the library {name}, which is not installed; "
                f"pip install 'pcg[{name}]'"
            )


def open_sinks(
    names: Sequence[str], folder: Path, facts: RunFacts, config: Mapping[str, Any], done: int
) -> list[Sink]:
    """Open the sinks of a run.

    Args:
        folder: the folder of the record.
        facts: the name and start, which identify a resumed run.
        done: the number of completed steps.
    Raises:
        RecordError: a sink is unknown, not installed, or cannot be opened.
    """
    check_sinks(names)
    sinks: list[Sink] = []
    for kind in dict.fromkeys(names):
        try:
            if kind == "tensorboard":
                sinks.append(TensorBoardSink(folder, config, done))
            elif kind == "mlflow":
                sinks.append(MlflowSink(folder, facts, config))
            else:
                sinks.append(WandbSink(folder, facts, config))
        except Exception as error:  # libraries raise own errors of networks and logins
            for sink in sinks:
                sink.end(is_completed=False)
            raise RecordError(f"{kind} cannot be written: {error}") from error
    return sinks
