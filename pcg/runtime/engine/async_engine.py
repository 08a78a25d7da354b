"""The async engine: an engine on a thread of its own, with streams of requests and awaitable jobs.

    with executor.engine(limits).start() as engine:
        stream = engine.submit("def main(", adapter="sql", max_new_tokens=64)
        job = engine.finetune("train.jsonl", "mine", peft="lora")
        async for chunk in stream: …
        result = await job.result()

Only this thread touches the engine. It runs calls of others between two steps, sleeps while there
is nothing to do, and ends every stream and job when it ends itself. A job's data is read and its
program compiled beside the steps (`pcg.runtime.engine.preparation`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count, islice
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Self, TypeVar, Unpack

import torch

from pcg.errors import EngineError, FinetuneError, PcgError
from pcg.keywords import takes
from pcg.peft.adapter import Adapter
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.preparation import Preparation
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.model.specialised import ServingProgram
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.request import Chunk, Request, RequestFields, make_request
from pcg.runtime.requests.stream import Stream
from pcg.runtime.training.options import JobArguments

Result = TypeVar("Result")

_BLOCKED_S = 0.01
"""Time between two steps that find nothing to run, as when a paused job holds the pages."""


class AsyncEngine:
    """Takes requests and jobs from any thread; a context manager, with `async` or without.

    Nobody else may call `engine`, whose steps the thread runs.
    """

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
        data_limits: DataLimits,
    ) -> None:
        self.engine = engine
        self._state = state
        self._prepare_job = prepare_job
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._lock = Lock()
        self._ended: EngineError | None = None
        self._closing = False
        self._streams: dict[int, tuple[str, Stream]] = {}
        self._jobs: list[RunningJob] = []
        self._reserved: dict[str, RunningJob] = {}
        self._preparation = Preparation(state, data_limits)
        self._thread = Thread(target=self._run, name="pcg engine", daemon=True)
        state.engine_thread = self
        self._thread.start()

    # ------------------------------------------------------------------------------- for any thread

    def submit(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> Stream:
        """Submit a prompt; see `Executor.request`. EngineError: the thread has ended."""
        self._check_open()
        return self.submit_request(make_request(self._state, prompt, adapter, fields))

    def submit_request(self, request: Request) -> Stream:
        """Submit a request that `Executor.request` made. EngineError: the thread has ended."""
        self._check_open()
        stream = Stream(self._cancel)
        begun = self.call(
            functools.partial(self._begin, request, stream, self.engine.clock.now_s())
        )
        begun.add_done_callback(functools.partial(_pass_error, stream))
        return stream

    @takes(JobArguments, FinetuneError)
    def finetune(self, given: JobArguments) -> RunningJob:
        """Train an adapter beside what is served; errors of the data are raised by the result.

        Raises:
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        self._check_open()
        running = RunningJob(given.adapter, self.engine, self.call)
        reserved = self.call(functools.partial(self._reserve, running))

        def read(reserved: Future[None]) -> None:
            if not _pass_error(running, reserved):
                examples = self._preparation.read(given, running.cancelling)
                examples.add_done_callback(functools.partial(self._compile, running))

        reserved.add_done_callback(read)
        return running

    def add_adapter(
        self, name: str, path_or_config: object = "lora", *, seed: int = 0
    ) -> Future[Adapter]:
        """Load an adapter while steps go on; it is read, and a program for it compiled, meanwhile.

        Returns:
            The adapter, once requests may name it, or an error: those of `Executor.add_adapter`,
                and EngineError.
        """
        self._check_open()
        state = self._state
        end: Future[Adapter] = Future()
        end.set_running_or_notify_cancel()

        def put(adapter: Adapter, program: ServingProgram) -> Adapter:
            state.check_free(name)
            return state.put_adapter(adapter, program)

        def load() -> None:
            self._check_open()
            state.check_free(name)
            made = state.make_adapter(name, path_or_config, seed=seed)
            adapter = made.map(torch.clone)  # read now, and not by a step
            self._preparation.compile(passing(functools.partial(add, adapter)))

        def add(adapter: Adapter) -> None:
            self._check_open()
            added = self.call(functools.partial(put, adapter, state.program_for(adapter)))
            added.add_done_callback(functools.partial(_pass_result, end))

        def passing(act: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    act()
                except BaseException as error:  # the caller's
                    end.set_exception(error)

            return run

        passing(lambda: self._preparation.load(passing(load)))()
        return end

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps; returns its result, an EngineError after the end."""
        call = _Call(act)
        with self._lock:
            if self._ended is None:
                self._calls.put(call)
                return call.future
        call.future.set_exception(self._ended)
        return call.future

    def stream_all(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Serve requests; returns their chunks, those of the first request first.

        Two batches of them are in the engine at once, so that any number fits into its queue.

        Raises:
            EngineError: the thread has ended, or this is that thread, which cannot wait for itself.
        """
        if current_thread() is self._thread:
            raise EngineError(
                "a callback of the engine waits for the engine; submit a request there"
            )
        most = 2 * self.engine.scheduler.limits.running
        begun = deque(self.submit_request(request) for request in requests[:most])
        return self._in_order(begun, iter(requests[most:]))

    def _in_order(self, begun: deque[Stream], left: Iterator[Request]) -> Iterator[Chunk]:
        for index in count():
            if not begun:
                return
            for chunk in begun.popleft():
                yield dataclasses.replace(chunk, index=index)
            begun.extend(self.submit_request(request) for request in islice(left, 1))

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a function between two steps, and wait for it; on the engine's own thread now."""
        return act() if current_thread() is self._thread else self.call(act).result()

    def close(self) -> None:
        """End the thread after its step, and cancel what is left."""

        def stop() -> None:
            self._closing = True

        self.call(stop)
        if current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _cancel(self, stream: Stream) -> None:
        def act() -> None:
            for request, other in self._streams.values():
                if other is stream:
                    self.engine.cancel(request)

        self.call(act)

    def _compile(self, running: RunningJob, read: Future[JobArguments]) -> None:
        """Have a job made of its examples, on the thread that compiles."""
        if _pass_error(running, read):
            self.call(functools.partial(self._release, running))
            return
        with contextlib.suppress(EngineError):  # closed meanwhile, and the job is cancelled
            self._preparation.compile(functools.partial(self._prepare, running, read.result()))

    def _prepare(self, running: RunningJob, given: JobArguments) -> None:
        """Make a job ready, on the thread that compiles."""
        try:
            self._check_open()
            running.cancelling.check()
            job = self._prepare_job(given)
        except Exception as error:  # the caller's
            running.fail(error)
            self.call(functools.partial(self._release, running))
            return
        begun = self.call(functools.partial(self._begin_job, running, job))

        def settle(begun: Future[None]) -> None:
            if _pass_error(running, begun):
                job.cancel()

        begun.add_done_callback(settle)

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        ended = EngineError("the engine was closed; start it again")
        try:
            while not self._closing:
                self._run_calls()
                if not self._closing and not self.engine.is_idle:
                    self._deliver(self.engine.step())
                self._settle_jobs()
            self._cancel_all()
        except BaseException as error:
            ended = EngineError(f"the engine's thread ended by {type(error).__name__}: {error}")
            ended.__cause__ = error
        self._end(ended)

    def _run_calls(self) -> None:
        engine = self.engine
        try:
            if engine.is_idle:
                self._calls.get().run()
            elif not engine.worked:
                self._calls.get(timeout=_BLOCKED_S).run()
            while True:
                self._calls.get_nowait().run()
        except Empty:
            return

    def _begin(self, request: Request, stream: Stream, submitted_s: float) -> None:
        number = self.engine.submitted
        self._streams[number] = (self.engine.submit(request, submitted_s), stream)

    def _reserve(self, running: RunningJob) -> None:
        """Reserve a name for a job, so that it starts from the result of the job before it."""
        name = running.name
        self.engine.jobs.check_free(name)
        if name in self._reserved:
            raise PcgError(f"there is a job {name!r} already; cancel it, or wait for its end")
        self._reserved[name] = running

    def _release(self, running: RunningJob) -> None:
        """Release the name of a job that does not begin."""
        if self._reserved.get(running.name) is running:
            del self._reserved[running.name]

    def _begin_job(self, running: RunningJob, job: Job) -> None:
        self._release(running)
        running.cancelling.check()
        running.begin(self.engine.jobs.add(job))
        self._jobs.append(running)

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.index in self._streams:
                _, stream = self._streams[chunk.index]
                stream.put(chunk)
                if chunk.is_last:
                    del self._streams[chunk.index]

    def _settle_jobs(self) -> None:
        self._jobs = [running for running in self._jobs if not running.settle()]

    def _cancel_all(self) -> None:
        for request, _ in self._streams.values():
            self.engine.cancel(request)
        for running in self._jobs:
            self.engine.cancel_job(running.name)
        self._settle_jobs()
        for name, running in self._reserved.items():
            running.fail(FinetuneError(f"job {name!r} was cancelled"))
        if self._streams:
            self._deliver(self.engine.step())

    def _end(self, error: EngineError) -> None:
        """Refuse further calls, and fail all that still waits."""
        with self._lock:
            self._ended = error
        self._state.engine_thread = None
        self._preparation.close()
        for _, stream in self._streams.values():
            stream.fail(error)
        for running in (*self._jobs, *self._reserved.values()):
            running.fail(error)
        for job in self.engine.jobs:
            job.cancel()
        while not self._calls.empty():
            self._calls.get().future.set_exception(error)


class _Call:
    """A function to run on the thread, and its result."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self._act = act

    def run(self) -> None:
        try:
            self.future.set_result(self._act())
        except Exception as error:  # the caller's, not the thread's
            self.future.set_exception(error)


def _pass_result(end: Future[Result], done: Future[Result]) -> None:
    error = done.exception()
    if error is None:
        end.set_result(done.result())
    else:
        end.set_exception(error)


def _pass_error(handle: Stream | RunningJob, done: Future[Any]) -> bool:
    """Fail a stream or job that could not begin; returns True if it could not."""
    error = done.exception()
    if error is not None:
        handle.fail(error)
    return error is not None
