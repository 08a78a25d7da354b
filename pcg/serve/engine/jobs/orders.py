"""The finetuning jobs of an engine that a server ordered."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from pathlib import Path

from pcg.errors import EngineError, FinetuneInterrupted, PcgError
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import write_adapter
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import JobState
from pcg.runtime.training.options import FinetuneResult, StepRecord
from pcg.serve.engine.engine_names import owned
from pcg.serve.engine.jobs.news import (
    DPO,
    REINFORCEMENT,
    JobEnd,
    JobOrder,
    JobStep,
    Tell,
    start_of,
)
from pcg.serve.engine.jobs.reinforcement import ReinforcementRun
from pcg.train.preference.job import PreferenceJob, step_numbers
from pcg.train.preference.records import PreferenceResult, PreferenceStep

ALL_CHECKPOINTS = 2**31
"""Who ordered the job removes what it does not keep."""


class OrderedJobs:
    """The jobs of an engine that were ordered and are not over.

    Args:
        threads: writes the adapters that jobs end with.
    """

    def __init__(self, executor: Executor, engine: AsyncEngine, threads: Threads) -> None:
        self._executor = executor
        self._engine = engine
        self._threads = threads
        self._running: dict[str, RunningJob] = {}
        self._runs: dict[str, ReinforcementRun] = {}
        self._preferences: dict[str, PreferenceJob] = {}

    def begin(self, order: JobOrder, tell: Tell) -> None:
        """Begin a job.

        Args:
            tell: is called with what comes of it, on the engine's thread or another one.
        Raises:
            EngineError: the engine takes nothing new.
            FinetuneError: bad options.
        """
        if order.method == REINFORCEMENT:
            run = ReinforcementRun(self._executor, self._engine, order, tell)
            self._runs[order.adapter] = run
            run.begin(lambda: self._forget(order.adapter))
            return
        if order.method == DPO:
            self._begin_preferences(order, tell)
            return

        def on_step(record: StepRecord) -> None:
            tell(_step_of(record))

        running = self._engine.finetune(
            Path(order.data),
            order.adapter,
            peft=start_of(order),
            eval_data=None if order.eval_data is None else Path(order.eval_data),
            checkpoint_dir=Path(order.checkpoints),
            keep_last=ALL_CHECKPOINTS,
            on_step=on_step,
            tenant=owned(order.adapter).tenant,
            **order.options,
        )
        self._running[order.adapter] = running

        def end(done: Future[FinetuneResult]) -> None:
            self._running.pop(order.adapter, None)
            error = done.exception()
            if error is not None:
                tell(_end_of(running, error))
                return
            # No later version can have taken its place: this is still the engine's thread.
            adapter, tokens = self._executor.adapters[order.adapter], done.result().tokens
            self._threads.submit(_finish, adapter, Path(order.output), tokens, tell)

        running.on_end(end)

    def _forget(self, adapter: str) -> None:
        self._runs.pop(adapter, None)

    def _begin_preferences(self, order: JobOrder, tell: Tell) -> None:
        """Begin a job on preferences."""

        def on_step(record: PreferenceStep) -> None:
            tell(_step_of_preferences(record))

        def end(result: PreferenceResult | None, error: Exception | None, is_final: bool) -> None:
            self._preferences.pop(order.adapter, None)
            if result is None:
                tell(JobEnd("failed", is_final, kind=type(error).__name__, text=str(error)))
                return
            adapter = self._executor.adapters.get(order.adapter)
            if adapter is None:  # removed meanwhile
                text = "the adapter was removed before it was saved"
                tell(JobEnd("failed", is_final=True, kind="AdapterNotFoundError", text=text))
                return
            _finish(adapter, Path(order.output), result.tokens, tell)

        job = PreferenceJob(
            self._executor,
            end,
            {
                "data": Path(order.data),
                "adapter": order.adapter,
                "peft": start_of(order),
                "eval_data": None if order.eval_data is None else Path(order.eval_data),
                "checkpoint_dir": Path(order.checkpoints),
                "keep_last": ALL_CHECKPOINTS,
                "on_step": on_step,
                **order.options,
            },
        )
        self._preferences[order.adapter] = job
        job.begin()

    def end(self, adapter: str, *, interrupts: bool) -> None:
        """End a job: after its step, with a checkpoint, or now."""
        job = self._preferences.get(adapter)
        if job is not None and interrupts:
            job.stop()
        elif job is not None:
            job.cancel()
        run = self._runs.get(adapter)
        if run is not None:
            run.end(interrupts=interrupts)
        running = self._running.get(adapter)
        if running is not None and interrupts:
            running.interrupt()
        elif running is not None:
            running.cancel()

    def put_grades(self, adapter: str, rewards: Sequence[float], error: str | None) -> None:
        """Give a job the grades of the completions that it told last, or why there are none."""
        run = self._runs.get(adapter)
        if run is not None:
            run.put_grades(rewards, error)


def _step_of_preferences(record: PreferenceStep) -> JobStep:
    return JobStep(
        record.step,
        record.total_steps,
        record.loss,
        None if record.evaluation is None else record.evaluation["loss"],
        record.learning_rate,
        record.gradient_norm,
        record.tokens,
        record.tokens_per_second,
        None if record.checkpoint is None else record.checkpoint.name,
        step_numbers(record),
    )


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
    )


def _end_of(running: RunningJob, error: BaseException) -> JobEnd:
    goes_on = isinstance(error, FinetuneInterrupted | EngineError)
    is_final = not goes_on and running.state is not JobState.CANCELLED
    return JobEnd(str(running.state), is_final, kind=type(error).__name__, text=str(error))


def _finish(adapter: Adapter, output: Path, tokens: int, tell: Tell) -> None:
    """Write the adapter that a job ended with, and tell."""
    try:
        write_adapter(adapter, output)
    except PcgError as error:
        tell(JobEnd("failed", is_final=True, kind=type(error).__name__, text=str(error)))
    else:
        tell(JobEnd("succeeded", is_final=True, tokens=tokens))
