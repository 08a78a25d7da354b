"""Finetuning jobs that a server orders from its engine, and the news of them.

A job writes its checkpoints in a folder of its own before the news of a step goes out, and the
adapter that it ends with before the news of its end. So whatever was told is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pcg.errors import EngineError, FinetuneInterrupted, PcgError
from pcg.peft.adapter import Adapter
from pcg.peft.writer import write_adapter
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.jobs import JobState
from pcg.runtime.engine.running_job import RunningJob
from pcg.runtime.executor import Executor
from pcg.runtime.training.result import FinetuneResult, StepRecord

ALL_CHECKPOINTS = 2**31
"""Who ordered the job removes what it does not keep."""


class JobOrder(msgspec.Struct, frozen=True):
    """A job that the engine is to run, or to go on with from its last checkpoint.

    Attributes:
        adapter: the engine's name of the adapter, and of the job.
        data: the training data; `eval_data` is None for a job that is not evaluated.
        peft: the recipe as of adapter_config.json.
        checkpoints: the folder of its checkpoints.
        output: the folder that will have the adapter.
        options: further options of `FinetuneOptions`.
    """

    adapter: str
    data: str
    eval_data: str | None
    peft: dict[str, Any]
    checkpoints: str
    output: str
    options: dict[str, Any]


class JobStep(msgspec.Struct, frozen=True, tag="step"):
    """A step that is done; the fields are those of `StepRecord`.

    Attributes:
        checkpoint: the name of the last checkpoint's folder; None without one.
    """

    step: int
    total_steps: int
    loss: float
    eval_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    checkpoint: str | None


class JobEnd(msgspec.Struct, frozen=True, tag="end"):
    """The end of a job, for now or for good.

    Attributes:
        state: how it ended.
        is_final: False for one that goes on from its checkpoint when it is ordered again: it was
            interrupted, or the engine ends.
        tokens: tokens that went through the model, of a job that succeeded.
        kind: the class of its error, and `text` what it says.
    """

    state: str
    is_final: bool
    tokens: int | None = None
    kind: str | None = None
    text: str | None = None


JobNews: TypeAlias = JobStep | JobEnd
Tell: TypeAlias = Callable[[JobNews], None]


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

    def begin(self, order: JobOrder, tell: Tell) -> None:
        """Begin a job.

        Args:
            tell: is called with what comes of it, on the engine's thread or another one.
        Raises:
            EngineError: the engine takes nothing new.
            FinetuneError: bad options.
        """

        def on_step(record: StepRecord) -> None:
            tell(_step_of(record))

        running = self._engine.finetune(
            Path(order.data),
            order.adapter,
            peft=order.peft,
            eval_data=None if order.eval_data is None else Path(order.eval_data),
            checkpoint_dir=Path(order.checkpoints),
            keep_last=ALL_CHECKPOINTS,
            on_step=on_step,
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

    def end(self, adapter: str, *, interrupts: bool) -> None:
        """End a job: after its step, with a checkpoint, or now."""
        running = self._running.get(adapter)
        if running is not None and interrupts:
            running.interrupt()
        elif running is not None:
            running.cancel()


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
