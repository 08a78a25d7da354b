"""Trainers of an async engine: run training commands in order, while requests are served.

Each stage of a command that runs the model is a job of the engine, scheduled like any other job.
A trainer without a pending command uses no steps and no pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from threading import Lock
from typing import Any, Generic, Self, TypeVar

from pcg.errors import EngineError, FinetuneError, as_pcg_error
from pcg.kernels.devices import device_thread
from pcg.keywords import takes
from pcg.runtime.engine.preparation import PreparingThread
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.metrics.status import JobState
from pcg.runtime.training.trainer.commands import (
    Aside,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Publish,
    SaveState,
    Stages,
    TrainerCommand,
)
from pcg.runtime.training.trainer.datum import Saved, Scored, Snapshot, Stepped, TrainerArguments
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter

Result = TypeVar("Result")


class TrainerCall(Generic[Result]):
    """The pending result of a command: `await call`, or `call.wait()` in a thread.

    Attributes:
        is_cancelled: True after `cancel`.
        begin: function that returns the command's stages.
    """

    def __init__(
        self,
        what: str,
        begin: Callable[[TrainedAdapter | None], Stages[Result]],
        cancel: Callable[[TrainerCall[Any]], None],
    ) -> None:
        self.is_cancelled = False
        self.begin = begin
        self._what = what
        self._cancel = cancel
        self._done: Future[Result] = Future()
        self._done.set_running_or_notify_cancel()  # cancelling a wait must not cancel it

    @property
    def is_over(self) -> bool:
        return self._done.done()

    @property
    def future(self) -> Future[Result]:
        """The future of the result."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> Result:
        """Block until the result is available. TimeoutError: the timeout has passed."""
        return self._done.result(timeout_s)

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._done).__await__()

    def cancel(self) -> None:
        """Cancel the command, whether it waits or runs; the trainer's state stays unchanged."""
        self.is_cancelled = True
        self._cancel(self)

    def finish(self, result: Result) -> None:
        """Set the result."""
        with contextlib.suppress(InvalidStateError):
            self._done.set_result(result)

    def fail(self, error: BaseException | None = None) -> None:
        """Set an error, by default that of a cancelled command; no effect on an ended call."""
        with contextlib.suppress(InvalidStateError):
            self._done.set_exception(error or FinetuneError(f"{self._what} was cancelled"))


class AsyncTrainer:
    """Trains an adapter by commands; for any thread or coroutine. See `AsyncEngine.trainer`.

    Each method returns a `TrainerCall` immediately, and the calls run in order. A failed or
    cancelled call leaves the trainer's state unchanged, and later calls still run. The trainer is a
    context manager, also an async one, that closes the trainer.

    Attributes:
        name: the adapter's name, reserved until the trainer is closed.
        created: the creation of the adapter. Every call waits for it, and fails with its error.
    """

    def __init__(
        self,
        name: str,
        trainers: Trainers,
        make: Callable[[], TrainedAdapter],
        ends: Callable[[], None],
        tenant: str = "",
    ) -> None:
        """Start the creation of the adapter.

        Args:
            make: creates the adapter and its program, on the compile thread.
            ends: releases the name.
        """
        self.name = name
        self._tenant = tenant
        self._trainers = trainers
        self._thread = trainers.thread
        self._ends = ends
        self._lock = Lock()
        self._trained: TrainedAdapter | None = None
        self._is_closed = self._has_ended = False
        self._queue: deque[TrainerCall[Any]] = deque()
        self._current: TrainerCall[Any] | None = None
        self._stages: Stages[Any] | None = None
        self._job: Job | None = None
        self._tokens = 0

        def create(_: TrainedAdapter | None) -> Stages[None]:
            self._trained = yield Aside(make, compiles=True)

        # Set `created` before the engine's thread reads it.
        self.created: TrainerCall[None] = self._call("its making", create)
        self._submit(self.created)

    # ------------------------------------------------------------------------------- for any thread

    @takes(Forward, FinetuneError)
    def forward(self, command: Forward) -> TrainerCall[Scored]:
        """Compute a loss without gradients and without dropout."""
        return self.run(command)

    @takes(ForwardBackward, FinetuneError)
    def forward_backward(self, command: ForwardBackward) -> TrainerCall[Scored]:
        """Compute a summed loss and accumulate its gradients for `optim_step`."""
        return self.run(command)

    @takes(OptimStep, FinetuneError)
    def optim_step(self, command: OptimStep) -> TrainerCall[Stepped]:
        """Update the adapter by the gradients accumulated since the last update."""
        return self.run(command)

    @takes(SaveState, FinetuneError)
    def save_state(self, command: SaveState) -> TrainerCall[Saved]:
        """Save the adapter and the optimizer state while steps run.

        Accumulated gradients are kept, but not saved.
        """
        return self.run(command)

    @takes(LoadState, FinetuneError)
    def load_state(self, command: LoadState) -> TrainerCall[Saved]:
        """Load a saved state bit for bit and discard accumulated gradients."""
        return self.run(command)

    def snapshot(self) -> TrainerCall[Snapshot]:
        """Publish the current adapter as the next version of its name."""
        return self.run(Publish())

    def run(self, command: TrainerCommand[Result]) -> TrainerCall[Result]:
        """Queue a command. EngineError: the engine accepts no new work."""

        def begin(trained: TrainedAdapter | None) -> Stages[Result]:
            assert trained is not None
            return command.stages(trained)

        return self._submit(self._call(type(command).__name__, begin))

    def close(self) -> Future[None]:
        """Cancel all calls and free the trainer; published versions remain served."""
        return self._thread.call(self.end_now)

    def end(self) -> None:
        """Close the trainer and block until the trainer is closed."""
        error = self.close().exception()
        if error is not None and not isinstance(error, EngineError):  # an ended engine freed it
            raise error

    def _call(
        self, what: str, begin: Callable[[TrainedAdapter | None], Stages[Result]]
    ) -> TrainerCall[Result]:
        return TrainerCall(f"trainer {self.name!r}: {what}", begin, self._cancel)

    def _submit(self, call: TrainerCall[Result]) -> TrainerCall[Result]:
        self._thread.check_open()
        with self._lock:
            if self._is_closed:
                raise FinetuneError(f"trainer {self.name!r} was closed; make another one")
            self._queue.append(call)
        try:
            self._thread.call(self._go_on).add_done_callback(lambda begun: _pass_error(call, begun))
        except BaseException:
            call.fail()
            raise
        return call

    def _cancel(self, call: TrainerCall[Any]) -> None:
        def act() -> None:
            if call is self._current and self._job is not None and not self._job.is_over:
                self._thread.engine.cancel_job(self.name)
                self.settle()
            elif call is not self._current:
                call.fail()

        self._thread.call(act)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.end)

    # ------------------------------------------------------------------------------- the engine's

    @property
    def is_open(self) -> bool:
        return not (self._is_closed or self._has_ended)

    @property
    def is_busy(self) -> bool:
        """True while a call is queued or running."""
        return self._current is not None or bool(self._queue)

    def _go_on(self) -> None:
        """Start the next call if no call is running."""
        while self._current is None and not self._is_closed:
            with self._lock:
                call = self._queue.popleft() if self._queue else None
            if call is None:
                return
            if call.is_cancelled:
                call.fail()
                continue
            if self._trained is None and call is not self.created:
                call.fail(_error_of(self.created))
                continue
            self._current = call
            self._stages = call.begin(self._trained)
            self._advance(lambda stages: next(stages))

    def _advance(self, resume: Callable[[Stages[Any]], Aside | Any]) -> None:
        """Advance the current call to its next stage or its end."""
        call, stages = self._current, self._stages
        assert call is not None
        assert stages is not None
        try:
            stage = resume(stages)
            if call.is_cancelled:
                stages.close()
                self._end(call, None)
                return
        except StopIteration as end:
            if call is self.created and call.is_cancelled:
                self._end(call, None)
                return
            # A call that was cancelled after its last stage still returns its result.
            self._current = self._stages = None
            call.finish(end.value)
            self._thread.call(self._go_on)
            return
        except Exception as error:
            self._end(call, as_pcg_error(error, f"trainer {self.name!r}", FinetuneError))
            return
        try:
            self._begin_stage(call, stage)
        except Exception as error:
            self._job = None
            stages.close()
            self._end(call, as_pcg_error(error, f"trainer {self.name!r}", FinetuneError))

    def _begin_stage(self, call: TrainerCall[Any], stage: Aside | Any) -> None:
        if isinstance(stage, Aside):
            self._run_aside(call, stage)
            return
        jobs = self._thread.engine.jobs
        self._job = Job(self.name, stage, tenant=self._tenant)
        # Jobs take turns by tokens, and a trainer's tokens are those of its earlier calls.
        self._job.tokens = max(self._tokens, min((job.tokens for job in jobs), default=0))
        self._trainers.runs(self)
        jobs.add(self._job)

    def _end(self, call: TrainerCall[Any], error: Exception | None) -> None:
        self._current = self._stages = None
        if call is self.created:
            self._free()
        call.fail(error)
        self._thread.call(self._go_on)

    def _free(self) -> None:
        """Release the name and the adapter."""
        self._trained = None
        if not self._has_ended:
            self._has_ended = True
            self._ends()

    def _run_aside(self, call: TrainerCall[Any], stage: Aside) -> None:
        def act() -> None:
            try:
                result = stage.act()
            except BaseException as error:  # the caller's function may raise SystemExit
                failed = error if isinstance(error, Exception) else FinetuneError(repr(error))
                self._thread.call(functools.partial(self._aside_done, call, failed, None))
            else:
                self._thread.call(functools.partial(self._aside_done, call, None, result))

        if stage.compiles:
            try:
                self._thread.compile_aside(act)
            except EngineError as error:  # the engine was closed
                self._end(call, error)
        else:
            device_thread(self._thread.device, act, f"pcg trainer {self.name}").start()

    def _aside_done(self, call: TrainerCall[Any], error: BaseException | None, result: Any) -> None:
        if call is not self._current:
            return  # the trainer was closed
        if error is not None:
            self._advance(lambda stages: stages.throw(error))
        else:
            self._advance(lambda stages: stages.send(result))

    def settle(self) -> bool:
        """Advance the call if its job has ended; return True if no job runs afterwards."""
        job = self._job
        if job is None:
            return True
        if not job.is_over:
            return False
        self._job, self._tokens = None, job.tokens
        assert self._current is not None
        if job.error is not None:
            error = job.error
            self._advance(lambda stages: stages.throw(error))
        elif job.state is JobState.CANCELLED:
            assert self._stages is not None
            self._stages.close()
            self._end(self._current, None)
        else:
            self._advance(lambda stages: stages.send(job.result))
        return self._job is None

    def end_now(self) -> None:
        """Close the trainer, on the engine's thread."""
        if self._job is not None and not self._job.is_over:
            self._thread.engine.cancel_job(self.name)
        self.fail(None)

    def fail(self, error: Exception | None) -> None:
        """Fail all calls with an error, None for that of a cancelled call; free the trainer."""
        with self._lock:
            self._is_closed = True
            left = [*self._queue]
            self._queue.clear()
        current, stages = self._current, self._stages
        self._current = self._stages = self._job = None
        if stages is not None:
            stages.close()
        self._free()
        for call in (*([] if current is None else [current]), *left):
            call.fail(error)


def _error_of(created: TrainerCall[None]) -> BaseException | None:
    try:
        created.wait(0)
    except Exception as error:
        return error
    return None


def _pass_error(call: TrainerCall[Any], begun: Future[None]) -> None:
    error = begun.exception()
    if error is not None:
        call.fail(error)


class Trainers:
    """The trainers of an async engine.

    Attributes:
        with_jobs: trainers that currently run a stage as a job.
    """

    def __init__(
        self, thread: PreparingThread, prepare: Callable[[TrainerArguments], TrainedAdapter]
    ) -> None:
        self.thread = thread
        self._prepare = prepare
        self._open: dict[str, AsyncTrainer] = {}
        self.with_jobs: list[AsyncTrainer] = []
        self._lock = Lock()

    def begin(self, arguments: TrainerArguments) -> AsyncTrainer:
        """Create a trainer; raises the errors of `AsyncEngine.trainer`."""
        self.thread.check_open()
        ends = self.thread.state.begin_training(arguments.name)

        def end() -> None:
            ends()
            with self._lock:
                self._open = {
                    name: trainer for name, trainer in self._open.items() if trainer.is_open
                }

        try:
            make = functools.partial(self._prepare, arguments)
            trainer = AsyncTrainer(arguments.name, self, make, end, arguments.tenant)
        except BaseException:
            ends()
            raise
        with self._lock:
            self._open[arguments.name] = trainer
        return trainer

    def get(self, name: str) -> AsyncTrainer | None:
        """Return an open trainer by name; None if no trainer has the name."""
        return self._open.get(name)

    # ------------------------------------------------------------------- the engine's thread

    @property
    def are_busy(self) -> bool:
        """True while a command is queued or running."""
        return any(trainer.is_busy for trainer in self._open.values())

    def runs(self, trainer: AsyncTrainer) -> None:
        """Call a trainer's `settle` after each step, until `settle` returns True."""
        if trainer not in self.with_jobs:
            self.with_jobs.append(trainer)

    def settle(self) -> None:
        """Advance the trainers whose jobs have ended."""
        self.with_jobs = [trainer for trainer in list(self.with_jobs) if not trainer.settle()]

    def cancel_all(self) -> None:
        for trainer in list(self._open.values()):
            trainer.end_now()

    def fail_all(self, error: EngineError) -> None:
        for trainer in list(self._open.values()):
            trainer.fail(error)
