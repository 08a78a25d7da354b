"""The progress of a job, and its results.

The progress of a job in its rows: steps, checkpoints and their models.

A step may be run twice, before a crash and behind it; its first event stays. One whose event was
not written before the crash is in the state of the checkpoint, from which `catch_up` writes it.

The results of jobs that succeed: the file of their metrics, and the model.
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
from pcg.serve.engine.news import TRAIN_REWARD, VALID_REWARD, JobStep
from pcg.serve.files.files import Files, new_file
from pcg.serve.files.records import FILES, RESULTS
from pcg.serve.jobs import event_records, records
from pcg.serve.jobs.event_records import METRICS
from pcg.serve.jobs.folders import JobFolder, step_of
from pcg.serve.jobs.records import SUCCEEDED, UNFINISHED, JobRecord
from pcg.serve.store.tables import hold_folder, now

# ----------------------------------------------------------------------------------------- progress


KEPT_CHECKPOINTS = 3
"""The checkpoints that stay, as at OpenAI."""
_COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")


@dataclass
class Changes:
    """Models that came and went by a write."""

    made: list[KeptModel] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


def add_step(
    connection: sqlite3.Connection, job: JobRecord, folder: JobFolder, news: JobStep
) -> Changes:
    """Add a step of a job, and the checkpoint that was saved behind it."""
    changes = Changes()
    found = records.find(connection, job.id)
    if found is None or found.status not in UNFINISHED:
        return changes
    told = _told(news)
    _add_metrics(connection, job.id, told)
    if news.checkpoint is not None and step_of(news.checkpoint) == news.step:
        _add_checkpoint(connection, job, folder, told, changes)
    return changes


def catch_up(connection: sqlite3.Connection, job: JobRecord, folder: JobFolder) -> Changes:
    """Add what a job did before a crash or a pause, and no event says."""
    changes, state = Changes(), folder.state()
    total = job.resolved["total_steps"]
    evaluated = dict(state.get("eval_losses", ()))
    notes = state.get("position", {})  # of a job on preferences, its own numbers
    evaluated |= {step: found["loss"] for step, found in notes.get("evaluations", ())}
    history = notes.get("history", ())
    for step, loss in enumerate(state.get("losses", ()), start=1):
        more = dict(history[step - 1]) if step <= len(history) else {}
        more.pop("loss", None)
        told = {"step": step, "total_steps": total, "train_loss": loss, **more}
        _add_metrics(connection, job.id, {**told, "valid_loss": evaluated.get(step)})
    for one in state.get("told", ()):
        _add_metrics(connection, job.id, _told(msgspec.convert(one, JobStep)))
    by_step = {one["step"]: one for one in event_records.metrics(connection, job.id)}
    for step in sorted(folder.saved())[-KEPT_CHECKPOINTS:]:
        if step in by_step:
            _add_checkpoint(connection, job, folder, by_step[step], changes)
    return changes


def _told(news: JobStep) -> dict[str, Any]:
    """Return what the metrics of a step are."""
    return {
        "step": news.step,
        "total_steps": news.total_steps,
        "train_loss": news.loss,
        "valid_loss": news.eval_loss,
        "learning_rate": news.learning_rate,
        "gradient_norm": news.gradient_norm,
        "tokens": news.tokens,
        "tokens_per_second": news.tokens_per_second,
        **news.more,
    }


def checkpoint_name(model: str, step: int) -> str:
    """Return the name by which a checkpoint of a job is served."""
    return f"{model}:ckpt-step-{step}"


def _add_metrics(connection: sqlite3.Connection, job: str, told: Mapping[str, Any]) -> None:
    valid = told["valid_loss"]
    evaluated = "" if valid is None else f", validation loss={valid:.4f}"
    message = f"Step {told['step']}/{told['total_steps']}: training loss={told['train_loss']:.4f}"
    for name, said in ((TRAIN_REWARD, "reward"), (VALID_REWARD, "validation reward")):
        if name in told:
            evaluated += f", {said}={told[name]:.4f}"
    event_records.add(connection, job, METRICS, message + evaluated, told, step=int(told["step"]))


def _add_checkpoint(
    connection: sqlite3.Connection,
    job: JobRecord,
    folder: JobFolder,
    told: Mapping[str, Any],
    changes: Changes,
) -> None:
    step = int(told["step"])
    name = checkpoint_name(job.name, step)
    names = ("step", "train_loss", "valid_loss", TRAIN_REWARD, VALID_REWARD)
    shown = {one: told[one] for one in names if told.get(one) is not None}
    if not event_records.add_checkpoint(connection, job.id, step, name, shown):
        return
    model = new_model(name, job.tenant, folder.relative(folder.saved()[step]), job.base)
    kept_models.insert(connection, model)
    changes.made.append(model)
    for old in event_records.checkpoints(connection, job.id)[KEPT_CHECKPOINTS:]:
        event_records.remove_checkpoint(connection, old.id)
        kept_models.delete(connection, job.tenant, old.model)
        changes.gone.append(old.model)
    hold_folder(connection, job.id, job.tenant, folder.held_bytes())


def unnamed_checkpoints(connection: sqlite3.Connection, job: str, folder: JobFolder) -> list[str]:
    """Return the names of folders of checkpoints that no row names, but for the last."""
    named = {one.step for one in event_records.checkpoints(connection, job)}
    saved = folder.saved()
    return [path.name for step, path in saved.items() if step not in named and step != max(saved)]


def table_of(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the metrics of a job as the CSV of its result file; the engine tells no accuracy.

    What the job's method tells beside losses, such as rewards, has columns behind these.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    more = list(dict.fromkeys(name for one in metrics for name in one if _has_column(name)))
    writer.writerow([*_COLUMNS, *more])
    for one in metrics:
        losses = [one["step"], one["train_loss"], "", _shown(one.get("valid_loss")), ""]
        writer.writerow([*losses, *(_shown(one.get(name)) for name in more)])
    return text.getvalue().encode()


def _has_column(name: str) -> bool:
    return "/" in name or name in (TRAIN_REWARD, VALID_REWARD)


def _shown(value: float | None) -> float | str:
    return "" if value is None else value


# ------------------------------------------------------------------------------------------ results


class _Over(Exception):
    """The job was cancelled meanwhile: nothing of it is kept."""


async def keep_results(
    files: Files, job: JobRecord, folder: JobFolder, tokens: int | None
) -> KeptModel | None:
    """Keep what a job ended with, all of it or nothing; returns its model.

    None for a job that was cancelled meanwhile.
    """
    store = files.store
    told = await files.read(lambda one: event_records.metrics(one, job.id))
    content = await asyncio.to_thread(store.contents.begin)
    try:
        await asyncio.to_thread(content.write, table_of(told))
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
            kept_models.insert(connection, model)
            said = f"New fine-tuned model created: {job.name}"
            event_records.say(connection, job.id, said)
            event_records.say(connection, job.id, "The job has successfully completed")
            return model

        return await files.put(content, act)
    except _Over:
        return None
    finally:
        content.drop()
