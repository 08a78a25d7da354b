"""The results of jobs that succeed: the file of their metrics, and the model."""

from __future__ import annotations

import asyncio
import sqlite3

from pcg.serve.adapters import kept_models
from pcg.serve.adapters.kept_models import KeptModel, new_model
from pcg.serve.files.files import Files, new_file
from pcg.serve.files.records import FILES, RESULTS
from pcg.serve.files.wire import now
from pcg.serve.jobs import event_records, records
from pcg.serve.jobs.folders import JobFolder
from pcg.serve.jobs.progress import table_of
from pcg.serve.jobs.records import SUCCEEDED, UNFINISHED, JobRecord


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
