"""The engine on a thread of its own, for others to ask: streams of requests, and jobs to await.

    with executor.engine(limits).start() as front:
        stream = front.submit("def main(", adapter="sql", max_new_tokens=64)
        job = front.finetune("train.jsonl", "mine", peft="lora")
        async for chunk in stream: …
        result = await job.result()

The thread alone touches the engine. It takes what was asked between two steps, sleeps while there
is nothing to do, and ends every stream and job, whatever ends it. What a job needs before its first
step, its data read and its program compiled, another thread makes ready, so that no step waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, Self, TypeVar, Unpack

import torch

from pcg.errors import EngineError, FinetuneError, PcgError
from pcg.keywords import takes
from pcg.peft.adapter import Adapter
from pcg.runtime.engine.job import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.prompts import make_request
from pcg.runtime.engine.request import Chunk, Request, RequestFields
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.engine.stream import Stream
from pcg.runtime.model.specialised import ServingProgram
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.options import JobArguments

Result = TypeVar("Result")

_BLOCKED_S = 0.01
"""Between two steps that find nothing to run, as where a paused job holds the pages."""


class AsyncEngine:
    """Takes requests and jobs from any thread; a context manager, with `async` or without.

    Attributes:
        engine: whose steps the thread runs; nobody else may call it meanwhile.
    """

    def __init__(
        self, engine: EngineLoop, state: ModelState, prepare_job: Callable[[JobArguments], Job]
    ) -> None:
        """Start the thread.

        Args:
            engine: the engine that it runs.
            state: the model.
            prepare_job: makes a finetuning job ready, on any thread; see `Engine.prepare_job`.
        """
        self.engine = engine
        self._state = state
        self._prepare_job = prepare_job
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._lock = Lock()
        self._ended: EngineError | None = None
        self._closing = False
        self._streams: dict[int, tuple[str, Stream]] = {}
        self._jobs: list[RunningJob] = []
        self._awaited: dict[str, RunningJob] = {}
        self._preparing = ThreadPoolExecutor(1, "pcg jobs")
        self._thread = Thread(target=self._run, name="pcg engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- asking

    def submit(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> Stream:
        """Have a prompt continued.

        Args:
            prompt: text, or token ids.
            adapter: name; None for the base.
            fields: as `Executor.request` takes them.
        Returns:
            Its chunks; a refusal is raised there.
        Raises:
            GenerationError: an empty prompt, text without a tokenizer, or bad options.
            AdapterError: there is no adapter of that name.
            EngineError: the thread has ended.
        """
        self._check_open()
        request = make_request(self._state, prompt, adapter, fields)
        stream = Stream(self._cancel)
        asked = self.call(
            functools.partial(self._begin, request, stream, self.engine.clock.now_s())
        )
        asked.add_done_callback(functools.partial(_refuse, stream))
        return stream

    @takes(JobArguments, FinetuneError)
    def finetune(self, given: JobArguments) -> RunningJob:
        """Train an adapter beside what is served.

        Returns:
            The job; errors of the data and of the adapter are raised by its result.
        Raises:
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        self._check_open()
        running = RunningJob(given.adapter, self.engine, self.call)
        asked = self.call(functools.partial(self._reserve, running))

        def prepare(asked: Future[None]) -> None:
            if _refuse(running, asked):
                return
            with contextlib.suppress(RuntimeError):  # closed meanwhile, and the job is cancelled
                self._preparing.submit(self._prepare, running, given)

        asked.add_done_callback(prepare)
        return running

    def add_adapter(
        self, name: str, path_or_config: object = "lora", *, seed: int = 0
    ) -> Future[Adapter]:
        """Load an adapter; it is read, and what serves it compiled, while steps go on.

        Args:
            name: to use it by.
            path_or_config: as `Executor.add_adapter` takes it.
            seed: of a fresh adapter's weights.
        Returns:
            The adapter, once requests may name it; or as an error why not: that of
            `Executor.add_adapter`, EngineError where the thread has ended.
        """
        self._check_open()
        state = self._state
        end: Future[Adapter] = Future()
        end.set_running_or_notify_cancel()

        def put(adapter: Adapter, ready: ServingProgram) -> Adapter:
            state.check_free(name)
            return state.put_adapter(adapter, ready)

        def prepare() -> None:
            try:
                self._check_open()
                state.check_free(name)
                made = state.make_adapter(name, path_or_config, seed=seed)
                adapter = made.map(torch.clone)  # not to be read from the disk by a step
                ready = state.program_for(adapter)
                asked = self.call(functools.partial(put, adapter, ready))
            except BaseException as error:  # theirs who asked
                end.set_exception(error)
            else:
                asked.add_done_callback(functools.partial(_hand_on, end))

        try:
            self._preparing.submit(prepare)
        except RuntimeError:  # closed meanwhile
            end.set_exception(EngineError("the engine was closed; start it again"))
        return end

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Have the thread do something between two steps, such as adding an adapter.

        Returns:
            What came of it; EngineError where the thread has ended.
        """
        asked = _Asked(act)
        with self._lock:
            if self._ended is None:
                self._asked.put(asked)
                return asked.future
        asked.future.set_exception(self._ended)
        return asked.future

    def close(self) -> None:
        """End the thread after its step; what is left is cancelled."""

        def stop() -> None:
            self._closing = True

        self.call(stop)
        if current_thread() is not self._thread:
            self._thread.join()
        self._preparing.shutdown(wait=False)

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

    def _prepare(self, running: RunningJob, given: JobArguments) -> None:
        """On the other thread: make a job ready, and hand it to the engine's."""
        try:
            self._check_open()
            job = self._prepare_job(given)
        except Exception as error:  # theirs who asked
            self.call(functools.partial(self._awaited.pop, running.name, None))
            running.fail(error)
            return
        asked = self.call(functools.partial(self._begin_job, running, job))
        asked.add_done_callback(functools.partial(_refuse, running))

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        ended = EngineError("the engine was closed; start it again")
        try:
            while not self._closing:
                self._obey()
                if not self._closing and not self.engine.is_idle:
                    self._deliver(self.engine.step())
                self._settle_jobs()
            self._cancel_all()
        except BaseException as error:
            ended = EngineError(f"the engine's thread ended by {type(error).__name__}: {error}")
            ended.__cause__ = error
        self._end(ended)

    def _obey(self) -> None:
        """Do what was asked; with nothing to do, wait for it."""
        engine = self.engine
        try:
            if engine.is_idle:
                self._asked.get().do()
            elif not engine.worked:
                self._asked.get(timeout=_BLOCKED_S).do()
            while True:
                self._asked.get_nowait().do()
        except Empty:
            return

    def _begin(self, request: Request, stream: Stream, came_s: float) -> None:
        number = self.engine.submitted
        self._streams[number] = (self.engine.submit(request, came_s), stream)

    def _reserve(self, running: RunningJob) -> None:
        """Keep a name for a job, so that it starts from what the one before it made."""
        name = running.name
        self.engine.jobs.check_none(name)
        if name in self._awaited:
            raise PcgError(f"there is a job {name!r} already; cancel it, or wait for its end")
        self._awaited[name] = running

    def _begin_job(self, running: RunningJob, job: Job) -> None:
        del self._awaited[running.name]
        running.begin(self.engine.add_job(job))
        self._jobs.append(running)

    def _deliver(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.index in self._streams:
                _, stream = self._streams[chunk.index]
                stream.put(chunk)
                if chunk.completion is not None:
                    del self._streams[chunk.index]

    def _settle_jobs(self) -> None:
        self._jobs = [running for running in self._jobs if not running.settle()]

    def _cancel_all(self) -> None:
        for request, _ in self._streams.values():
            self.engine.cancel(request)
        for running in self._jobs:
            self.engine.cancel_job(running.name)
        self._settle_jobs()
        for name, running in self._awaited.items():
            running.fail(FinetuneError(f"job {name!r} was cancelled"))
        if self._streams:
            self._deliver(self.engine.step())

    def _end(self, error: EngineError) -> None:
        """Nothing is taken any more; whoever still waits hears why."""
        with self._lock:
            self._ended = error
        for _, stream in self._streams.values():
            stream.fail(error)
        for running in (*self._jobs, *self._awaited.values()):
            running.fail(error)
        while not self._asked.empty():
            self._asked.get().future.set_exception(error)


class _Asked:
    """Something to do on the thread, and what comes of it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self._act = act

    def do(self) -> None:
        try:
            self.future.set_result(self._act())
        except Exception as error:  # theirs who asked, not the thread's
            self.future.set_exception(error)


def _hand_on(end: Future[Result], asked: Future[Result]) -> None:
    """End as what was asked did."""
    error = asked.exception()
    if error is None:
        end.set_result(asked.result())
    else:
        end.set_exception(error)


def _refuse(handle: Stream | RunningJob, asked: Future[None]) -> bool:
    """End what could not begin; whether it could not."""
    error = asked.exception()
    if error is not None:
        handle.fail(error)
    return error is not None
