"""The progress of a job in its rows, and its results: the file of its metrics, and the model.

A step may run twice, before and after a crash; only its first event is stored. Events that a crash
prevented are restored by `catch_up` from the state in the checkpoint.
"""

from __future__ import annotations

import asyncio
import csv
import io
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pcg.serve.adapters import kept_models
from pcg.serve.adapters.kept_models import KeptModel, new_model
from pcg.serve.engine.messages import TRAIN_REWARD, VALID_REWARD, JobStep
from pcg.serve.files.files import FILES, RESULTS, Files, new_file
from pcg.serve.jobs import records
from pcg.serve.jobs.folders import JobFolder, step_of
from pcg.serve.jobs.records import METRICS, SUCCEEDED, UNFINISHED, JobRecord
from pcg.serve.store.tables import hold_folder, now

KEPT_CHECKPOINTS = 3
"""Checkpoints kept per job, as in OpenAI's API."""
_COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")


@dataclass
class Changes:
    """Models that a write added and removed."""

    new: list[KeptModel] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


def add_step(
    connection: sqlite3.Connection, job: JobRecord, folder: JobFolder, event: JobStep
) -> Changes:
    """Add a step of a job, and its checkpoint."""
    changes = Changes()
    row = records.find(connection, job.id)
    if row is None or row.status not in UNFINISHED:
        return changes
    metrics = _metrics_of(event)
    _add_metrics(connection, job.id, metrics)
    if event.checkpoint is not None and step_of(event.checkpoint) == event.step:
        _add_checkpoint(connection, job, folder, metrics, changes)
    return changes


def catch_up(connection: sqlite3.Connection, job: JobRecord, folder: JobFolder) -> Changes:
    """Add the steps before a crash or a pause that have no event."""
    changes, state = Changes(), folder.state()
    total = job.resolved["total_steps"]
    evaluated = dict(state.get("eval_losses", ()))
    notes = state.get("position", {})  # of a DPO job
    evaluated |= {step: values["loss"] for step, values in notes.get("evaluations", ())}
    history = notes.get("history", ())
    for step, loss in enumerate(state.get("losses", ()), start=1):
        more = dict(history[step - 1]) if step <= len(history) else {}
        more.pop("loss", None)
        metrics = {"step": step, "total_steps": total, "train_loss": loss, **more}
        _add_metrics(connection, job.id, {**metrics, "valid_loss": evaluated.get(step)})
    for event in state.get("told", ()):
        _add_metrics(connection, job.id, _metrics_of(msgspec.convert(event, JobStep)))
    by_step = {metrics["step"]: metrics for metrics in records.metrics(connection, job.id)}
    for step in sorted(folder.saved())[-KEPT_CHECKPOINTS:]:
        if step in by_step:
            _add_checkpoint(connection, job, folder, by_step[step], changes)
    return changes


def _metrics_of(event: JobStep) -> dict[str, Any]:
    return {
        "step": event.step,
        "total_steps": event.total_steps,
        "train_loss": event.loss,
        "valid_loss": event.eval_loss,
        "learning_rate": event.learning_rate,
        "gradient_norm": event.gradient_norm,
        "tokens": event.tokens,
        "tokens_per_second": event.tokens_per_second,
        **event.more,
    }


def checkpoint_name(model: str, step: int) -> str:
    """Return the model name of a job's checkpoint."""
    return f"{model}:ckpt-step-{step}"


def _add_metrics(connection: sqlite3.Connection, job: str, metrics: Mapping[str, Any]) -> None:
    valid = metrics["valid_loss"]
    evaluated = "" if valid is None else f", validation loss={valid:.4f}"
    step, steps, loss = metrics["step"], metrics["total_steps"], metrics["train_loss"]
    message = f"Step {step}/{steps}: training loss={loss:.4f}"
    for name, label in ((TRAIN_REWARD, "reward"), (VALID_REWARD, "validation reward")):
        if name in metrics:
            evaluated += f", {label}={metrics[name]:.4f}"
    records.add_event(connection, job, METRICS, message + evaluated, metrics, step=int(step))


def _add_checkpoint(
    connection: sqlite3.Connection,
    job: JobRecord,
    folder: JobFolder,
    metrics: Mapping[str, Any],
    changes: Changes,
) -> None:
    step = int(metrics["step"])
    name = checkpoint_name(job.name, step)
    names = ("step", "train_loss", "valid_loss", TRAIN_REWARD, VALID_REWARD)
    shown = {name: metrics[name] for name in names if metrics.get(name) is not None}
    if not records.add_checkpoint(connection, job.id, step, name, shown):
        return
    model = new_model(name, job.tenant, folder.relative(folder.saved()[step]), job.base)
    kept_models.MODELS.insert(connection, model, "OR REPLACE")
    changes.new.append(model)
    for old in records.checkpoints(connection, job.id)[KEPT_CHECKPOINTS:]:
        records.CHECKPOINTS.delete(connection, id=old.id)
        kept_models.MODELS.delete(connection, tenant=job.tenant, name=old.model)
        changes.gone.append(old.model)
    hold_folder(connection, job.id, job.tenant, folder.held_bytes())


def unnamed_checkpoints(connection: sqlite3.Connection, job: str, folder: JobFolder) -> list[str]:
    """Return the folder names of checkpoints without a row, except the last checkpoint's."""
    named = {checkpoint.step for checkpoint in records.checkpoints(connection, job)}
    saved = folder.saved()
    return [path.name for step, path in saved.items() if step not in named and step != max(saved)]


def table_of(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the metrics of a job as the CSV of its result file; accuracies are empty.

    Further metrics of the job's method, such as rewards, have columns after the losses.
    """
    names = dict.fromkeys(name for step in metrics for name in step)
    further = [
        name for name in names if "/" in name or name.startswith("valid_") or name == TRAIN_REWARD
    ]
    further = [name for name in further if name not in _COLUMNS]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_COLUMNS, *further], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(metrics)
    return text.getvalue().encode()


class _Over(Exception):
    """The job was cancelled: nothing of it is stored."""


async def keep_results(
    files: Files, job: JobRecord, folder: JobFolder, tokens: int | None
) -> KeptModel | None:
    """Store the results of a job, all or nothing. Return its model.

    Return None if the job was cancelled.
    """
    store = files.store
    metrics = await files.read(lambda db: records.metrics(db, job.id))
    content = await asyncio.to_thread(store.contents.begin)
    try:
        await asyncio.to_thread(content.write, table_of(metrics))
        await asyncio.to_thread(content.finish)
        result = new_file(job.tenant, "step_metrics.csv", RESULTS, content, None)
        model = new_model(job.name, job.tenant, folder.relative(folder.model), job.base)

        def act(connection: sqlite3.Connection) -> KeptModel:
            changed = records.change(
                connection,
                job.id,
                UNFINISHED,
                status=SUCCEEDED,
                finished_s=now(),
                trained_tokens=tokens,
                result_file=result.id,
            )
            if changed is None:
                raise _Over
            FILES.insert(connection, result)
            kept_models.MODELS.insert(connection, model, "OR REPLACE")
            records.say(connection, job.id, f"New fine-tuned model created: {job.name}")
            records.say(connection, job.id, "The job has successfully completed")
            return model

        return await files.put(content, act)
    except _Over:
        return None
    finally:
        content.drop()
