"""The preparation of jobs and adapters in the background, while the engine's steps run.

    read the caller's data   a thread per job, as an iterator may block forever
    tokenize rows            a process per job, at most `at_once` (`pcg.runtime.data.tokenizing`)
    read adapters            a few threads
    compile programs         a single thread, in order of the calls

A job waits for no other job's iterator, and can be cancelled during preparation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch

from pcg.errors import DataError, EngineError, FinetuneError, as_pcg_error
from pcg.kernels.devices import device_pool, device_thread
from pcg.runtime.data.dataset import Dataset
from pcg.runtime.data.sources import DataLimits, NamedSources, RowMeter, bytes_of, gather
from pcg.runtime.data.tokenizing import Cancelling, load_apart
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.rank_commands import RankCommand
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.options import JobArguments
from pcg.runtime.training.training_data import settled, splits_of, training_data

_LOADS = 4
"""The number of threads that read adapters."""


Result = TypeVar("Result")


class PreparingThread(Protocol):
    """The interface of the engine's thread for jobs and trainers."""

    engine: EngineLoop
    state: ModelState
    device: torch.device
    preparation: Preparation

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps."""

    def asked(
        self, command: Callable[..., RankCommand], *fields: Any
    ) -> AbstractContextManager[None]:
        """Broadcast a command for the action that rank 0 performs within the `with`."""

    def check_open(self) -> None:
        """Raise an EngineError if the engine accepts no new work."""

    def compile_aside(self, act: Callable[[], None]) -> None:
        """Run a function on the compile thread. EngineError: the engine was closed."""


class Preparation:
    """The threads that prepare jobs and adapters."""

    def __init__(self, state: ModelState, limits: DataLimits) -> None:
        self._state = state
        self._limits = limits
        self._tokenizer = pickle.dumps(state.tokenizer)
        self._tokenizing = device_pool(None, limits.at_once, "pcg data")
        self._loading = device_pool(state.device, _LOADS, "pcg adapters")
        self._compiling = device_pool(state.device, 1, "pcg jobs")
        self._lock = Lock()
        self._jobs: set[Cancelling] = set()
        self._is_closed = False

    def load(self, act: Callable[[], None]) -> None:
        """Run a function that reads an adapter. EngineError: the engine was closed."""
        _submit(self._loading, act)

    def compile(self, act: Callable[[], None]) -> None:
        """Run a compiling function after all earlier ones. EngineError: the engine was closed."""
        _submit(self._compiling, act)

    def read(self, arguments: JobArguments, cancelling: Cancelling) -> Future[JobArguments]:
        """Read the data of a job; return the future of the job with its examples.

        The future ends immediately on cancellation. Its error is a PcgError: faulty data, too many
        jobs under preparation, or cancellation.
        """
        read: Future[JobArguments] = Future()
        read.set_running_or_notify_cancel()
        with self._lock:
            is_full = len(self._jobs) >= self._limits.waiting
            is_closed = self._is_closed
            if not is_full:
                self._jobs.add(cancelling)
        if is_full:
            read.set_exception(
                FinetuneError(
                    f"{self._limits.waiting} jobs are being prepared, as many as this engine "
                    "takes; wait until one begins, or have DataLimits(waiting=…) raised"
                )
            )
            return read
        read.add_done_callback(lambda _: self._jobs.discard(cancelling))
        cancelling.add(functools.partial(_fail, read, cancelling.error))
        if is_closed:
            cancelling.cancel()
        else:
            act = functools.partial(self._gather, arguments, cancelling, read)
            device_thread(None, act, f"pcg data of {arguments.adapter}").start()
        return read

    def close(self) -> None:
        """Cancel all jobs under preparation, and drop results of running reads and compiles."""
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs)
        for cancelling in jobs:
            cancelling.cancel()
        for pool in (self._tokenizing, self._loading, self._compiling):
            pool.shutdown(wait=False)

    def _gather(
        self, arguments: JobArguments, cancelling: Cancelling, read: Future[JobArguments]
    ) -> None:
        """Collect the rows of a job, on the job's own thread; a blocked thread is abandoned."""
        with _failing(read, arguments):
            arguments = settled(arguments, self._state)
            splits = splits_of(arguments, is_first=True)
            take = functools.partial(_take, cancelling, self._limits)

            def gathered_of(source: Any) -> Any:
                if isinstance(source, NamedSources):
                    return NamedSources({name: gathered_of(x) for name, x in source.items()})
                is_read = source is None or isinstance(source, Dataset)
                return source if is_read else gather(source, take, arguments.columns)

            gathered = [gathered_of(source) for source in (*splits.train, splits.evaluation)]
            act = functools.partial(self._tokenize, arguments, gathered, cancelling, read)
            _submit(self._tokenizing, act)

    def _tokenize(
        self,
        arguments: JobArguments,
        gathered: list[Any],
        cancelling: Cancelling,
        read: Future[JobArguments],
    ) -> None:
        with _failing(read, arguments):
            cancelling.check()
            load = functools.partial(load_apart, self._tokenizer, cancelling)
            *sources, evaluation = (
                None
                if source is None
                else training_data(
                    source,
                    arguments,
                    self._state,
                    load,
                    self._limits,
                    formatting_func=arguments.formatting_func,
                )
                for source in gathered
            )
            data = Dataset.joined([source for source in sources if source is not None])
            prepared = dataclasses.replace(arguments, data=data, eval_data=evaluation)
            with contextlib.suppress(InvalidStateError):  # cancelled
                read.set_result(prepared)


def _submit(pool: ThreadPoolExecutor, act: Callable[[], None]) -> None:
    try:
        pool.submit(act)
    except RuntimeError as error:
        raise EngineError("the engine was closed; start it again") from error


def _take(cancelling: Cancelling, limits: DataLimits, rows: Iterator[Any]) -> list[Any]:
    """Collect the rows of an iterator within the limits, until cancellation."""
    meter, taken = RowMeter(limits), []
    for index, row in enumerate(rows):
        cancelling.check()
        meter.add(bytes_of(row, limits.row_bytes), f"data[{index}]")
        taken.append(row)
    return taken


@contextlib.contextmanager
def _failing(read: Future[JobArguments], arguments: JobArguments) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _fail(read, as_pcg_error(error, f"reading the data of {arguments.adapter!r}", DataError))


def _fail(read: Future[JobArguments], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # already ended
        read.set_exception(error)
