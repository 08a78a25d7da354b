"""The runner of jobs: those that are queued begin on the engine, and what comes of them is kept.

A job's state is in the store alone; the engine's process has what runs. So a job is paused by
interrupting it with a checkpoint, and goes on, after a pause as after a crash, from its last one.
"""

from __future__ import annotations

import asyncio
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
from pcg.serve.adapters import kept_models
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.adapters.engine_names import engine_name
from pcg.serve.adapters.kept_models import KeptModels, new_model
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.job_orders import JobEnd, JobNews, JobOrder, JobStep
from pcg.serve.errors import LOG
from pcg.serve.files import records as file_records
from pcg.serve.files.files import Files, new_file
from pcg.serve.files.records import RESULTS
from pcg.serve.files.wire import now
from pcg.serve.jobs import event_records, records
from pcg.serve.jobs.endings import check_count, failure_of, in_status
from pcg.serve.jobs.folders import JobFolder, folder_of, folders_of, sweep
from pcg.serve.jobs.progress import (
    Changes,
    add_step,
    catch_up,
    table_of,
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
from pcg.serve.options import ServeOptions

Result = TypeVar("Result")
_AGAIN_S = 5.0
"""Time after which it is tried again to keep something on a full disk, seconds."""


class JobRunner:
    """Runs the jobs of all tenants; for one event loop.

    Attributes:
        files: files, and the store with the jobs' rows.
    """

    def __init__(
        self, client: EngineClient, files: Files, catalog: Catalog, options: ServeOptions
    ) -> None:
        assert catalog.kept is not None
        self.files = files
        self._client = client
        self._kept: KeptModels = catalog.kept
        self._loader = catalog.loader
        self._most = options.max_jobs
        self._queued: dict[str, JobRecord] = {}
        self._running: dict[str, JobRecord] = {}
        self._turns: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Go on with the jobs that are kept."""
        self._do(self._recover(folders_of(self.files.store)))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.error("a job's progress cannot be kept", exc_info=error)

    def folder(self, job: JobRecord) -> JobFolder:
        """Return the folder of a job."""
        return folder_of(self.files.store, job.id)

    async def _recover(self, folders: Sequence[Path]) -> None:
        """Add what the jobs did before the server ended, and queue those that are not over.

        Args:
            folders: those of jobs before there was a request, which may make others meanwhile.
        """

        def ids(connection: sqlite3.Connection) -> set[str]:
            return {row["id"] for row in connection.execute("SELECT id FROM jobs")}

        await asyncio.to_thread(sweep, folders, await self.files.read(ids))
        for job in await self.files.read(lambda one: records.of_status(one, UNFINISHED)):
            try:
                await self._catch_up(job)
            except Exception as error:  # others go on, whatever became of its folder
                LOG.error("job %s: its progress cannot be read", job.id, exc_info=error)
            if job.status != PAUSED:
                self._queued[job.id] = job
        self._fill()

    async def _catch_up(self, job: JobRecord) -> None:
        """Add what a job did before the server ended, and remove checkpoints that no row names."""
        folder = self.folder(job)
        changes = await self._write(job, partial(catch_up, job=job, folder=folder))
        await self._apply(job, changes)
        stale = await self.files.read(partial(unnamed_checkpoints, job=job.id, folder=folder))
        for name in stale:
            await asyncio.to_thread(rmtree, folder.checkpoints / name, True)

    async def _write(self, job: JobRecord, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """Write what a job needs to go on, once there is room to."""
        while True:
            try:
                return await self.files.write(act)
            except StoreFullError as error:
                LOG.error("job %s waits to go on: %s", job.id, error)
                await asyncio.sleep(_AGAIN_S)

    # ------------------------------------------------------------------------------- changes

    async def create(self, job: JobRecord, most: int) -> JobRecord:
        """Keep a job whose folder is there, and queue it.

        Args:
            most: the most jobs of a tenant that are not over.
        Raises:
            ApiError: it has as many.
        """

        def act(connection: sqlite3.Connection) -> None:
            check_count(records.count_unfinished(connection, job.tenant), most)
            records.insert(connection, job)
            for message in (
                f"Created fine-tuning job: {job.id}",
                f"Validating training file: {job.training_file}",
                "Files validated, moving job to queued state",
            ):
                event_records.say(connection, job.id, message)

        await self.files.write(act)
        self._queued[job.id] = job
        self._fill()
        return job

    async def cancel(self, job: JobRecord) -> JobRecord:
        """Cancel a job. ApiError: it is over."""
        message = "The job was cancelled"
        changed = await self._change(job, UNFINISHED, CANCELLED, message, finished_s=now())
        self._queued.pop(job.id, None)
        if job.id in self._running:
            await self._end_on_engine(job, interrupts=False)
        else:
            await self._tidy(job)
        return changed

    async def pause(self, job: JobRecord) -> JobRecord:
        """Pause a job behind its step. ApiError: it does not go on now."""
        changed = await self._change(job, ACTIVE, PAUSED, "The job was paused")
        self._queued.pop(job.id, None)
        if job.id in self._running:
            await self._end_on_engine(job, interrupts=True)
        return changed

    async def resume(self, job: JobRecord) -> JobRecord:
        """Queue a paused job. ApiError: it is not paused."""
        changed = await self._change(job, (PAUSED,), QUEUED, "The job was resumed")
        self._queued[job.id] = changed
        self._fill()
        return changed

    async def _change(
        self, job: JobRecord, before: tuple[str, ...], status: str, message: str, **more: Any
    ) -> JobRecord:
        def act(connection: sqlite3.Connection) -> JobRecord:
            changed = records.change(connection, job.id, before, status=status, **more)
            if changed is None:
                found = records.find(connection, job.id)
                raise in_status(job.id, "gone" if found is None else found.status, before)
            event_records.say(connection, job.id, message)
            return changed

        return await self.files.write(act)

    async def _end_on_engine(self, job: JobRecord, *, interrupts: bool) -> None:
        name = engine_name(job.tenant, job.name)
        await asyncio.wrap_future(self._client.end_job(name, interrupts=interrupts))

    # ------------------------------------------------------------------------------- running

    def _fill(self) -> None:
        """Begin queued jobs while there are places.

        The tenant that has the fewest comes first, then the one whose turn is the longest ago.
        """
        takes_more = self._client.health().state is EngineState.RUNNING
        while takes_more and len(self._running) < self._most:
            ready = [job for id, job in self._queued.items() if id not in self._running]
            if not ready:
                return
            counts = Counter(one.tenant for one in self._running.values())
            turns = self._turns
            job = min(ready, key=lambda one: (counts[one.tenant], turns[one.tenant], one.id))
            turns[job.tenant] = max(turns.values(), default=0) + 1
            del self._queued[job.id]
            self._running[job.id] = job
            self._do(self._run(job))

    async def _run(self, job: JobRecord) -> None:
        """Begin a job on the engine."""
        try:
            await self._order(job)
        except EngineError:  # it goes on when the server is started again
            self._running.pop(job.id, None)
        except Exception as error:
            kind = text = None
            if isinstance(error, PcgError):
                kind, text = type(error).__name__, str(error)
            else:
                LOG.error("job %s cannot begin", job.id, exc_info=error)
            await self._settle(job, JobEnd("failed", is_final=True, kind=kind, text=text))

    async def _order(self, job: JobRecord) -> None:
        """Have the engine begin a job, unless it was changed meanwhile."""
        folder = self.folder(job)
        resolved = job.resolved
        order = JobOrder(
            engine_name(job.tenant, job.name),
            str(folder.training),
            str(folder.validation) if job.validation_file else None,
            resolved["peft"],
            str(folder.checkpoints),
            str(folder.model),
            {**resolved["options"], "seed": job.seed, "progress": False},
        )
        step = max(folder.saved(), default=0)
        begun = f"Fine-tuning job goes on behind step {step}" if step else "Fine-tuning job started"

        def act(connection: sqlite3.Connection) -> bool:
            if records.change(connection, job.id, ACTIVE, status=RUNNING) is None:
                return False  # paused or cancelled meanwhile
            event_records.say(connection, job.id, begun)
            return True

        if not await self._write(job, act):
            await self._tidy(job)
            self._leave(job)
            return
        tell = partial(self._tell, asyncio.get_running_loop(), job)
        await asyncio.wrap_future(self._client.begin_job(order, tell))
        found = await self.files.read(lambda one: records.find(one, job.id))
        if found is not None and found.status not in ACTIVE:  # changed before it began
            await self._end_on_engine(job, interrupts=found.status == PAUSED)

    def _tell(self, loop: asyncio.AbstractEventLoop, job: JobRecord, news: JobNews) -> None:
        """Take news on the event loop; what comes behind its end is in the job's checkpoint."""
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(self._take, job, news)

    def _take(self, job: JobRecord, news: JobNews) -> None:
        """Keep what came of a job; writes stay in the order in which they are asked for."""
        if isinstance(news, JobStep):
            write = partial(add_step, job=job, folder=self.folder(job), news=news)
            kept = asyncio.wrap_future(self.files.store.database.write(write))
            self._do(self._stepped(job, kept))
        else:
            self._do(self._settle(job, news))

    async def _stepped(self, job: JobRecord, kept: asyncio.Future[Changes]) -> None:
        await self._apply(job, await kept)

    async def _apply(self, job: JobRecord, changes: Changes) -> None:
        """Serve the models that came by a write, and end serving those that went."""
        for model in changes.made:
            if model.name not in changes.gone:
                self._kept.put(model)
        for name in changes.gone:
            folder = await self._kept.forget(job.tenant, name)
            await self._unload(job.tenant, name)
            if folder is not None:
                await asyncio.to_thread(rmtree, folder, True)

    async def _unload(self, tenant: str, name: str) -> None:
        """Have the engine forget a model, if it has it."""
        with suppress(AdapterError, EngineError):
            await self._loader.unload(engine_name(tenant, name))

    def _leave(self, job: JobRecord) -> None:
        """Note that the engine does not run a job any more."""
        self._running.pop(job.id, None)
        self._fill()

    async def _settle(self, job: JobRecord, end: JobEnd) -> None:
        """Keep how a job ended, once there is room to, and have others begin."""
        while True:
            try:
                if end.state == SUCCEEDED:
                    await self._succeed(job, end)
                elif end.is_final:
                    await self._fail(job, end)
                await self._tidy(job)
                break
            except StoreFullError as error:
                LOG.error("the end of job %s waits to be kept: %s", job.id, error)
                await asyncio.sleep(_AGAIN_S)
            except Exception as error:  # the next start goes on with it; its place is free
                LOG.error("the end of job %s cannot be kept", job.id, exc_info=error)
                break
        self._leave(job)

    async def _tidy(self, job: JobRecord) -> None:
        """Remove the data of a job that is over, and what only a job that goes on needs."""
        found = await self.files.read(lambda one: records.find(one, job.id))
        if found is not None and found.status not in UNFINISHED:
            await asyncio.to_thread(self.folder(job).tidy)

    async def _fail(self, job: JobRecord, end: JobEnd) -> None:
        error = failure_of(end, self.folder(job))

        def act(connection: sqlite3.Connection) -> None:
            changed = records.change(
                connection, job.id, ACTIVE, status=FAILED, finished_s=now(), error=error.json
            )
            if changed is not None:
                event_records.say(connection, job.id, error.message, level="error")

        await self.files.write(act)

    async def _succeed(self, job: JobRecord, end: JobEnd) -> None:
        folder, store = self.folder(job), self.files.store
        await self._apply(job, await self.files.write(partial(catch_up, job=job, folder=folder)))
        told = await self.files.read(lambda one: event_records.metrics(one, job.id))
        content = await asyncio.to_thread(store.contents.begin)
        try:
            await asyncio.to_thread(content.write, table_of(told))
            await asyncio.to_thread(content.finish)
            result = new_file(job.tenant, "step_metrics.csv", RESULTS, content, None)
            model = new_model(job.name, job.tenant, folder.relative(folder.model))

            def act(connection: sqlite3.Connection) -> bool:
                changed = records.change(
                    connection,
                    job.id,
                    UNFINISHED,
                    status=SUCCEEDED,
                    finished_s=now(),
                    trained_tokens=end.tokens,
                    result_file=result.id,
                )
                if changed is None:  # cancelled meanwhile
                    return False
                store.contents.put(content)
                file_records.insert(connection, result)
                kept_models.insert(connection, model)
                said = f"New fine-tuned model created: {job.name}"
                event_records.say(connection, job.id, said)
                event_records.say(connection, job.id, "The job has successfully completed")
                return True

            if await self.files.write(act):
                self._kept.put(model)
            else:
                await self._unload(job.tenant, job.name)
        finally:
            content.drop()
