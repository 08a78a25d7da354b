"""The runner of jobs: it starts queued jobs on the engine and stores their progress.

A job's state is only in the store; the engine's process has the running jobs. So a job is paused by
an interruption with a checkpoint, and resumes, after a pause or a crash, from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar

from pcg.errors import AdapterError, EngineError, PcgError, StoreFullError
from pcg.runtime.metrics.status import EngineState
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.adapters.kept_models import KeptModels
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.engine.messages import (
    REINFORCEMENT,
    SUPERVISED,
    JobEnd,
    JobEvent,
    JobOrder,
    JobSamples,
    JobStep,
)
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.orders import EndJob, PutGrades, StartJob
from pcg.serve.files.files import Files
from pcg.serve.http.errors import LOG, ApiError
from pcg.serve.jobs import records
from pcg.serve.jobs.folders import (
    JobFolder,
    clean_folders,
    folder_of,
    folders_of,
    in_status,
    remove_job,
    remove_old,
    tidy_job,
)
from pcg.serve.jobs.graders import JobGrading, graded
from pcg.serve.jobs.progress import (
    Changes,
    add_step,
    catch_up,
    keep_results,
    unnamed_checkpoints,
)
from pcg.serve.jobs.records import (
    ACTIVE,
    CANCELLED,
    FAILED,
    PAUSED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    UNFINISHED,
    JobRecord,
)
from pcg.serve.jobs.settings import MOST_EVAL_DATA
from pcg.serve.store.tables import data_name, held_data, hold_data, hold_folder, now


def order_of(job: JobRecord, folder: JobFolder) -> JobOrder:
    """Return the engine's order of a job."""
    resolved = job.resolved
    method, options = resolved.get("method", SUPERVISED), {**resolved["options"]}
    options["record"] = str(folder.record)
    data = [str(folder.path / data_name(index)) for index in range(1 + MOST_EVAL_DATA)]
    named = dict(zip(resolved.get("eval_data") or (), data[1:], strict=False))
    if method == REINFORCEMENT:
        options["grpo"] = {**options["grpo"], "seed": job.seed}
    else:
        options |= {"seed": job.seed, "progress": False}
    return JobOrder(
        engine_name(job.tenant, job.name),
        data[0],
        named or (data[1] if job.validation_file else None),
        peft=resolved["peft"],
        checkpoints=str(folder.checkpoints),
        output=str(folder.model),
        options=options,
        method=method,
        start=None if resolved.get("start") is None else str(folder.start),
        tenant=job.tenant,
    )


_CODES = {
    "DataError": ("invalid_training_file", "training_file"),
    "OutOfMemoryError": ("out_of_memory", None),
    "RecordError": ("storage_full", None),
    "StoreFullError": ("storage_full", None),
    "UnsupportedError": ("unsupported", None),
}


def failure_of(end: JobEnd, folder: JobFolder) -> str:
    """Return the error of a failed job as JSON, without the server's paths."""
    code, param = _CODES.get(end.kind or "", ("job_failed", None))
    text = folder.without_paths(end.text or "The job failed.")
    if param is not None and text.startswith(folder.validation.stem):
        code, param = "invalid_validation_file", "validation_file"
    return _error(code, text, param)


def _error(code: str, message: str, param: str | None = None) -> str:
    return json.dumps({"code": code, "message": message, "param": param})


Result = TypeVar("Result")
_AGAIN_S = 5.0
"""Time between two attempts to write to a full disk, seconds."""


class JobRunner:
    """Runs the jobs of all tenants; for a single event loop.

    Attributes:
        files: files, and the store with the jobs' rows.
        trusts_templates: True if jobs may have chat templates.
    """

    def __init__(
        self,
        client: EngineClient,
        files: Files,
        catalog: Catalog,
        options: ServeOptions,
        grading: JobGrading,
    ) -> None:
        assert catalog.kept is not None
        self.files = files
        self._client = client
        self._grading = grading
        self._kept: KeptModels = catalog.kept
        self._kept.on_forget.append(self.model_gone)
        self._loader = catalog.loader
        self.trusts_templates = options.trust_request_chat_template
        self._most = options.max_jobs
        self._keep_days = options.keep_jobs_days
        self._queued: dict[str, JobRecord] = {}
        self._running: dict[str, JobRecord] = {}
        self._pauses: dict[str, asyncio.Future[None]] = {}
        self._turns: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gradings: dict[str, asyncio.Task[None]] = {}

    def begin(self) -> None:
        self._do(self._recover(folders_of(self.files.store)))

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.error("a job's progress cannot be stored", exc_info=error)

    def folder(self, job: JobRecord) -> JobFolder:
        return folder_of(self.files.store, job.id)

    async def _recover(self, folders: Sequence[Path]) -> None:
        """Add the steps from before the server's end, and queue the unfinished jobs.

        Args:
            folders: folders of jobs from before the first request, which may create others.
        """
        await clean_folders(self.files, folders, self._keep_days)
        for job in await self.files.read(lambda db: records.of_status(db, UNFINISHED)):
            try:
                await self._catch_up(job)
            except Exception as error:  # a damaged folder must not stop the other jobs
                LOG.error("job %s: its progress cannot be read", job.id, exc_info=error)
            if job.status != PAUSED:
                self._queued[job.id] = job
        self._fill()

    async def _catch_up(self, job: JobRecord) -> None:
        """Add a job's steps from before the server's end, and remove checkpoints without a row."""
        folder = self.folder(job)
        changes = await self._write(job, partial(catch_up, job=job, folder=folder))
        await self._apply(job, changes)
        stale = await self.files.read(partial(unnamed_checkpoints, job=job.id, folder=folder))
        paths = [folder.checkpoints / name for name in stale]
        await asyncio.to_thread(self.files.store.discard, paths)

    async def _write(self, job: JobRecord, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run a job's write, and repeat it until there is room."""
        while True:
            try:
                return await self.files.write(act)
            except StoreFullError as error:
                LOG.error("job %s waits for room on the disk: %s", job.id, error)
                await asyncio.sleep(_AGAIN_S)

    async def create(self, job: JobRecord, most: int, data: Sequence[tuple[str, int]]) -> JobRecord:
        """Store and queue a job whose folder exists.

        Args:
            most: the most unfinished jobs of a tenant.
            data: digests and sizes of the job's files.
        Raises:
            ApiError: the tenant has too many jobs, or stores too much.
        """

        def act(connection: sqlite3.Connection) -> None:
            remove_old(connection, now(), self._keep_days)
            count = records.JOBS.count(
                connection, records.among(UNFINISHED), UNFINISHED, tenant=job.tenant
            )
            if count >= most:
                raise ApiError(
                    429,
                    f"You have {count} unfinished jobs, and may have {most}: wait, or cancel some.",
                    code="too_many_jobs",
                    headers={"x-should-retry": "false"},
                )
            self.files.quota.check_bytes(connection, job.tenant, job.config_bytes)
            records.JOBS.insert(connection, job)
            hold_data(connection, job.id, job.tenant, data)
            for message in (
                f"Created fine-tuning job: {job.id}",
                f"Validating training file: {job.training_file}",
                "Files validated, moving job to queued state",
            ):
                records.say(connection, job.id, message)

        await self.files.write(act)
        self._queued[job.id] = job
        self._fill()
        return job

    async def cancel(self, job: JobRecord) -> JobRecord:
        """Cancel a job. ApiError: it is finished."""
        message = "The job was cancelled"
        changed = await self._change(job, UNFINISHED, CANCELLED, message, finished_s=now())
        self._queued.pop(job.id, None)
        if job.id in self._running:
            await self._end_on_engine(job, interrupts=False)
        else:
            await tidy_job(self.files, job, self.folder(job))
        return changed

    async def pause(self, job: JobRecord) -> JobRecord:
        """Pause a job after its step. ApiError: it is not active."""
        if job.id not in self._running:
            changed = await self._change(job, ACTIVE, PAUSED, "The job was paused")
            self._queued.pop(job.id, None)
            if job.id in self._running:  # it started during the await
                await self._end_on_engine(job, interrupts=True)
            return changed
        if job.status not in ACTIVE:
            raise in_status(job.id, job.status, ACTIVE)
        paused = self._pauses.setdefault(job.id, asyncio.get_running_loop().create_future())
        await self._end_on_engine(job, interrupts=True)
        await asyncio.shield(paused)
        row = await self.files.read(lambda db: records.find(db, job.id))
        if row is None or row.status != PAUSED:
            raise in_status(job.id, "gone" if row is None else row.status, ACTIVE)
        return row

    async def resume(self, job: JobRecord) -> JobRecord:
        changed = await self._change(job, (PAUSED,), QUEUED, "The job was resumed")
        self._queued[job.id] = changed
        self._fill()
        return changed

    async def remove(self, job: JobRecord) -> None:
        """Remove a finished job; its models stay. ApiError: it is not finished."""
        await self.files.write(partial(remove_job, job=job), may_use_reserve=True)
        await tidy_job(self.files, job, self.folder(job))

    async def model_gone(self, tenant: str, folder: Path) -> None:
        """Remove the folder of a dropped model, unless its job may resume from it."""
        id = folder.relative_to(self.files.store.folder).parts[1]
        job = await self.files.read(lambda db: records.find(db, id))
        of_job = folder_of(self.files.store, id)
        if folder == of_job.model or job is None or job.status not in UNFINISHED:
            await asyncio.to_thread(rmtree, folder, True)
            await self._measure(tenant, of_job)

    async def _measure(self, tenant: str, folder: JobFolder) -> None:
        size = await asyncio.to_thread(folder.held_bytes)
        await self.files.write(
            lambda db: hold_folder(db, folder.id, tenant, size), may_use_reserve=True
        )

    async def _change(
        self, job: JobRecord, before: tuple[str, ...], status: str, message: str, **more: Any
    ) -> JobRecord:
        def act(connection: sqlite3.Connection) -> JobRecord:
            changed = records.change(connection, job.id, before, status=status, **more)
            if changed is None:
                row = records.find(connection, job.id)
                raise in_status(job.id, "gone" if row is None else row.status, before)
            records.say(connection, job.id, message)
            return changed

        may_use_reserve = status == CANCELLED  # a cancellation leads to deletions
        return await self.files.write(act, may_use_reserve=may_use_reserve)

    async def _end_on_engine(self, job: JobRecord, *, interrupts: bool) -> None:
        name = engine_name(job.tenant, job.name)
        await asyncio.wrap_future(self._client.call(EndJob(name, interrupts)))

    def _fill(self) -> None:
        """Start queued jobs while there are free places.

        The tenant with the fewest running jobs is first, then the tenant served longest ago.
        """
        takes_more = self._client.health().state is EngineState.RUNNING
        while takes_more and len(self._running) < self._most:
            ready = [job for id, job in self._queued.items() if id not in self._running]
            if not ready:
                return
            counts = Counter(running.tenant for running in self._running.values())
            turns = self._turns
            job = min(ready, key=lambda each: (counts[each.tenant], turns[each.tenant], each.id))
            turns[job.tenant] = max(turns.values(), default=0) + 1
            del self._queued[job.id]
            self._running[job.id] = job
            self._do(self._run(job))

    async def _run(self, job: JobRecord) -> None:
        try:
            await self._order(job)
        except EngineError:  # the job resumes after the server's restart
            self._running.pop(job.id, None)
            self._end_pause(job)
        except Exception as error:
            kind = text = None
            if isinstance(error, PcgError):
                kind, text = type(error).__name__, str(error)
            else:
                LOG.error("job %s cannot start", job.id, exc_info=error)
            await self._settle(job, JobEnd("failed", is_final=True, kind=kind, text=text))

    async def _order(self, job: JobRecord) -> None:
        """Start a job on the engine, unless it was paused or cancelled."""
        folder = self.folder(job)
        order = order_of(job, folder)
        digests = await self.files.read(partial(held_data, job=job.id))
        if digests:
            await asyncio.to_thread(folder.check_data, digests)
        step, damage = await asyncio.to_thread(folder.last_good)
        begun = f"Fine-tuning job resumed after step {step}" if step else "Fine-tuning job started"
        if damage:
            LOG.error("job %s: %s", job.id, damage)
            begun += f"; {damage}"

        def act(connection: sqlite3.Connection) -> bool:
            if records.change(connection, job.id, ACTIVE, status=RUNNING) is None:
                return False  # paused or cancelled
            records.say(connection, job.id, begun)
            return True

        if not await self._write(job, act):
            await tidy_job(self.files, job, self.folder(job))
            self._leave(job)
            return
        emit = partial(self._post, asyncio.get_running_loop(), job)
        await asyncio.wrap_future(self._client.call(StartJob(order), emit))
        row = await self.files.read(lambda db: records.find(db, job.id))
        changed = row is not None and row.status not in ACTIVE  # during the start
        if job.id in self._pauses or changed:
            interrupts = row is None or row.status in (*ACTIVE, PAUSED)
            await self._end_on_engine(job, interrupts=interrupts)

    def _post(self, loop: asyncio.AbstractEventLoop, job: JobRecord, event: JobEvent) -> None:
        """Pass an event to the event loop; after its end, the job's checkpoint has the step."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._take, job, event)

    def _take(self, job: JobRecord, event: JobEvent) -> None:
        """Handle the events of a job in order, even if a full disk delays them."""
        if isinstance(event, JobStep):
            self._do(self._stepped(job, event))
        elif isinstance(event, JobSamples):
            self._gradings[job.id] = self._do(self._grade(job, event))
        else:
            self._do(self._settle(job, event))

    def _turn(self, job: JobRecord) -> asyncio.Lock:
        return self._locks.setdefault(job.id, asyncio.Lock())

    async def _stepped(self, job: JobRecord, event: JobStep) -> None:
        write = partial(add_step, job=job, folder=self.folder(job), event=event)
        async with self._turn(job):
            changes = await self._write(job, write)
            await self._apply(job, changes)
        if not changes.new:
            return
        try:
            await self.files.read(lambda db: self.files.quota.check_bytes(db, job.tenant, 0))
        except ApiError as error:
            await self._fail(job, _error("insufficient_quota", str(error.detail)))
            await self._end_on_engine(job, interrupts=False)

    async def _grade(self, job: JobRecord, samples: JobSamples) -> None:
        rewards, refusal = await graded(self._grading, job, samples)
        name = engine_name(job.tenant, job.name)
        await asyncio.wrap_future(self._client.call(PutGrades(name, rewards, refusal)))

    async def _apply(self, job: JobRecord, changes: Changes) -> None:
        """Serve the models that a write added, and stop serving those that it removed."""
        for model in changes.new:
            if model.name not in changes.gone:
                self._kept.put(model)
        for name in changes.gone:
            folder = await self._kept.drop(job.tenant, name)
            await self._unload(job.tenant, name)
            if folder is not None:
                await asyncio.to_thread(rmtree, folder, True)

    async def _unload(self, tenant: str, name: str) -> None:
        with suppress(AdapterError, EngineError):
            await self._loader.unload(engine_name(tenant, name))

    def _leave(self, job: JobRecord) -> None:
        """Forget a job that the engine no longer runs, and stop grading it."""
        self._running.pop(job.id, None)
        self._end_pause(job)
        self._locks.pop(job.id, None)
        if (grading := self._gradings.pop(job.id, None)) is not None:
            grading.cancel()
        self._fill()

    def _end_pause(self, job: JobRecord) -> None:
        if (pause := self._pauses.pop(job.id, None)) is not None:
            pause.set_result(None)

    async def _settle(self, job: JobRecord, end: JobEnd) -> None:
        """Store the end of a job when there is room, and start queued jobs."""
        async with self._turn(job):
            await self._keep_end(job, end)
        self._leave(job)

    async def _keep_end(self, job: JobRecord, end: JobEnd) -> None:
        while True:
            try:
                if end.state == SUCCEEDED:
                    await self._succeed(job, end)
                elif end.is_final:
                    await self._fail(job, failure_of(end, self.folder(job)))
                elif job.id in self._pauses:
                    await self._paused(job)
                await tidy_job(self.files, job, self.folder(job))
                break
            except StoreFullError as error:
                LOG.error("the end of job %s waits to be stored: %s", job.id, error)
                await asyncio.sleep(_AGAIN_S)
            except Exception as error:  # the next start resumes the job; free its place now
                LOG.error("the end of job %s cannot be stored", job.id, exc_info=error)
                break

    async def _paused(self, job: JobRecord) -> None:
        """Store that a job is paused, with its last checkpoint."""
        folder = self.folder(job)
        await self._apply(job, await self.files.write(partial(catch_up, job=job, folder=folder)))
        step = max(folder.saved(), default=0)
        with suppress(ApiError):  # the job was cancelled
            await self._change(job, ACTIVE, PAUSED, f"The job was paused after step {step}")

    async def _fail(self, job: JobRecord, error: str) -> None:
        def act(connection: sqlite3.Connection) -> None:
            changed = records.change(
                connection, job.id, ACTIVE, status=FAILED, finished_s=now(), error=error
            )
            if changed is not None:
                records.say(connection, job.id, json.loads(error)["message"], level="error")

        await self.files.write(act)

    async def _succeed(self, job: JobRecord, end: JobEnd) -> None:
        folder = self.folder(job)
        await self._apply(job, await self.files.write(partial(catch_up, job=job, folder=folder)))
        model = await keep_results(self.files, job, folder, end.tokens)
        if model is not None:
            self._kept.put(model)
        else:  # the job was cancelled
            await self._unload(job.tenant, job.name)
