"""Orders: engine commands that need the server's parts, and the jobs that they start.

Jobs read and write the server's folders. The engine, `pcg.train.preference` or `pcg.train.grpo`
trains a job; its progress is sent as events.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pcg.errors import EngineError, FinetuneInterrupted, PcgError
from pcg.kernels.devices import device_pool
from pcg.keys import Key, Keys
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import write_adapter
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.commands import Command
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import JobState
from pcg.runtime.training.options import FinetuneResult, StepRecord
from pcg.serve.engine.messages import (
    DPO,
    KTO,
    REINFORCEMENT,
    Emit,
    JobEnd,
    JobOrder,
    JobStep,
    start_of,
)
from pcg.serve.engine.reinforcement import ReinforcementRun
from pcg.train.preference.dpo import PreferenceJob, step_numbers
from pcg.train.preference.kto import KtoArguments, LabelledOutputs
from pcg.train.preference.options import DpoArguments
from pcg.train.preference.run import PreferenceResult, Preferences

Reply = TypeVar("Reply")

ALL_CHECKPOINTS = 2**31
"""Keep every checkpoint; the server deletes old ones."""


class SplitBase(Protocol):
    """The base executor of split clients."""

    keys: Keys

    def drain(self) -> Future[None]:
        """Refuse new clients; complete when the connected clients have left."""


class ServedEngine(Protocol):
    """An engine with the server's additional parts."""

    engine: AsyncEngine
    jobs: OrderedJobs

    @property
    def base(self) -> SplitBase | None:
        """The base executor of split clients, or None."""


class Order(Command[Reply], frozen=True):
    """A command that needs the server's parts."""

    def apply(self, served: ServedEngine, emit: Emit | None = None) -> Reply | Future[Reply]:
        """Execute the order; `emit` receives its events and is called on any thread."""
        raise NotImplementedError


class StartJob(Order[None], frozen=True):
    """Start a finetuning job, or resume it from its last checkpoint.

    Raises:
        EngineError: the engine takes nothing new.
        FinetuneError: bad options.
    """

    job: JobOrder

    def apply(self, served: ServedEngine, emit: Emit | None = None) -> None:
        assert emit is not None
        served.jobs.begin(self.job, emit)


class EndJob(Order[None], frozen=True):
    """End a job: after its step with a checkpoint, or now. `StartJob` sends the end event."""

    adapter: str
    interrupts: bool

    def apply(self, served: ServedEngine, emit: Emit | None = None) -> None:
        job = served.jobs.running.get(self.adapter)
        if job is not None and self.interrupts:
            job.interrupt()
        elif job is not None:
            job.cancel()


class PutGrades(Order[None], frozen=True):
    """Deliver to a job the grades of its latest samples, or the grader's error."""

    adapter: str
    rewards: list[float]
    error: str | None = None

    def apply(self, served: ServedEngine, emit: Emit | None = None) -> None:
        job = served.jobs.running.get(self.adapter)
        if isinstance(job, ReinforcementRun):
            job.put_grades(self.rewards, self.error)


class SetKeys(Order[None], frozen=True):
    """Replace the keys that split clients of the engine's base may use."""

    keys: list[Key]

    def apply(self, served: ServedEngine, emit: Emit | None = None) -> None:
        if served.base is not None:
            served.base.keys.become(Keys(self.keys))


class Drain(Order[None], frozen=True):
    """Finish the present work and take nothing new, as `AsyncEngine.drain`; reply at the end."""

    timeout_s: float

    def apply(self, served: ServedEngine, emit: Emit | None = None) -> Future[None]:
        drained = served.engine.drain(self.timeout_s)
        return drained if served.base is None else _both(drained, served.base.drain())


def _both(first: Future[None], other: Future[None]) -> Future[None]:
    both: Future[None] = Future()

    def wait_for_other(_: Future[None]) -> None:
        other.add_done_callback(lambda _: both.set_result(None))

    first.add_done_callback(wait_for_other)
    return both


# -------------------------------------------------------------------------------------------- jobs


class OrderedJob(Protocol):
    """A running job."""

    def interrupt(self) -> None:
        """End the job after its step, with a checkpoint."""

    def cancel(self) -> None:
        """End the job now."""


class OrderedJobs:
    """The jobs that a server started on an engine.

    Attributes:
        running: running jobs by the names of their adapters.
    """

    def __init__(self, executor: Executor, engine: AsyncEngine) -> None:
        self.running: dict[str, OrderedJob] = {}
        self._executor = executor
        self._engine = engine
        self._writing = device_pool(executor.device, 1, "pcg models")

    def begin(self, order: JobOrder, emit: Emit) -> None:
        """Start a job. Raises the errors of `StartJob`.

        Args:
            emit: receives the job's events, on any thread.
        """
        if order.method == REINFORCEMENT:
            run = ReinforcementRun(self._executor, self._engine, order, emit)
            self.running[order.adapter] = run
            run.begin(lambda: self._forget(order))
        elif order.method in (DPO, KTO):
            self._begin_preferences(order, emit)
        else:
            self._begin_supervised(order, emit)

    def close(self) -> None:
        """Stop writing adapters."""
        self._writing.shutdown(cancel_futures=True)

    def _forget(self, order: JobOrder) -> None:
        self.running.pop(order.adapter, None)

    def _begin_supervised(self, order: JobOrder, emit: Emit) -> None:
        running = self._engine.finetune(
            **_arguments(order, lambda record: emit(_step_of(record))), tenant=order.tenant
        )
        self.running[order.adapter] = running

        def end(future: Future[FinetuneResult]) -> None:
            self._forget(order)
            error = future.exception()
            if error is None:
                # On the engine's thread, so no later version can have replaced the adapter.
                adapter, tokens = self._executor.adapters[order.adapter], future.result().tokens
                self._writing.submit(_finish, adapter, Path(order.output), tokens, emit)
                return
            resumes = isinstance(error, FinetuneInterrupted | EngineError)
            is_final = not resumes and running.state is not JobState.CANCELLED
            emit(JobEnd(str(running.state), is_final, kind=type(error).__name__, text=str(error)))

        running.on_end(end)

    def _begin_preferences(self, order: JobOrder, emit: Emit) -> None:
        def end(result: PreferenceResult | None, error: Exception | None, is_final: bool) -> None:
            self._forget(order)
            if result is None:
                emit(JobEnd("failed", is_final, kind=type(error).__name__, text=str(error)))
                return
            adapter = self._executor.adapters.get(order.adapter)
            if adapter is None:  # removed before this callback
                text = "the adapter was removed before it was saved"
                emit(JobEnd("failed", is_final=True, kind="AdapterNotFoundError", text=text))
                return
            _finish(adapter, Path(order.output), result.tokens, emit)

        kind, objective = (
            (KtoArguments, LabelledOutputs) if order.method == KTO else (DpoArguments, Preferences)
        )
        arguments = kind(**_arguments(order, lambda record: emit(_step_of(record))))
        job = PreferenceJob(self._executor, end, arguments, objective)
        self.running[order.adapter] = job
        job.begin()


def _arguments(order: JobOrder, on_step: Callable[[Any], None]) -> dict[str, Any]:
    named = order.eval_data
    return {
        "data": Path(order.data),
        "adapter": order.adapter,
        "peft": start_of(order),
        "eval_data": {name: Path(path) for name, path in named.items()}
        if isinstance(named, dict)
        else named and Path(named),
        "checkpoint_dir": Path(order.checkpoints),
        "keep_last": ALL_CHECKPOINTS,
        "on_step": on_step,
        **order.options,
    }


def _step_of(record: StepRecord) -> JobStep:
    return JobStep(
        record.step,
        record.total_steps,
        record.loss,
        record.eval_loss,
        record.learning_rate,
        record.gradient_norm,
        record.tokens,
        record.tokens_per_second,
        None if record.checkpoint is None else record.checkpoint.name,
        step_numbers(record),
    )


def _finish(adapter: Adapter, output: Path, tokens: int, emit: Emit) -> None:
    """Write the trained adapter of a job and report the job's end."""
    try:
        write_adapter(adapter, output)
    except PcgError as error:
        emit(JobEnd("failed", is_final=True, kind=type(error).__name__, text=str(error)))
    else:
        emit(JobEnd("succeeded", is_final=True, tokens=tokens))
