"""The preparation of jobs and adapters beside an engine's steps.

    data of the caller's own   a thread a job, as an iterator may wait for ever
    rows become tokens         a process a job, `at_once` of them (`pcg.runtime.data.tokenizing`)
    adapters are read          a few threads
    programs are compiled      one thread, in the order of asking

A job waits for no other job's iterator, and can be cancelled while it is prepared.
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
from pcg.runtime.data.sources import DataLimits, RowMeter, bytes_of, gather
from pcg.runtime.data.tokenizing import Cancelling, load_apart
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.rank_commands import RankCommand
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.options import JobArguments
from pcg.runtime.training.training_data import splits_of, training_data, with_planned_batch

_LOADS = 4
"""Adapters that are read at once."""


Result = TypeVar("Result")


class PreparingThread(Protocol):
    """The engine's thread, as its jobs and trainers see it."""

    engine: EngineLoop
    state: ModelState
    device: torch.device
    preparation: Preparation

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps."""

    def asked(
        self, command: Callable[..., RankCommand], *fields: Any
    ) -> AbstractContextManager[None]:
        """Have all ranks do what is done within the `with`, by the command of these fields."""

    def check_open(self) -> None:
        """Raise an EngineError if no new work is taken."""

    def compile_aside(self, act: Callable[[], None]) -> None:
        """Run a function on the thread that compiles. EngineError: the engine was closed."""


class Preparation:
    """The threads that prepare jobs and adapters, until it is closed."""

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
        """Run what reads an adapter. EngineError: closed meanwhile."""
        _submit(self._loading, act)

    def compile(self, act: Callable[[], None]) -> None:
        """Run what compiles, after what was asked for before. EngineError: closed meanwhile."""
        _submit(self._compiling, act)

    def read(self, arguments: JobArguments, cancelling: Cancelling) -> Future[JobArguments]:
        """Read the data of a job; returns the job with its examples.

        The future ends as soon as it is cancelled. Its error is a PcgError: of the data, of too
        many jobs, or that it was cancelled.
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
        """Cancel all jobs under preparation; what is read or compiled meanwhile is dropped."""
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
        """List the rows of a job, on a thread of its own, which is left alone if it is stuck."""
        with _failing(read, arguments):
            splits = splits_of(with_planned_batch(arguments, self._state), is_first=True)
            take = functools.partial(_take, cancelling, self._limits)
            gathered = [
                source if source is None or isinstance(source, Dataset) else gather(source, take)
                for source in (splits.train, splits.evaluation)
            ]
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
            data, evaluation = (
                None
                if source is None
                else training_data(source, arguments, self._state, load, self._limits)
                for source in gathered
            )
            assert data is not None
            prepared = dataclasses.replace(arguments, data=data, eval_data=evaluation)
            with contextlib.suppress(InvalidStateError):  # cancelled
                read.set_result(prepared)


def _submit(pool: ThreadPoolExecutor, act: Callable[[], None]) -> None:
    try:
        pool.submit(act)
    except RuntimeError as error:
        raise EngineError("the engine was closed; start it again") from error


def _take(cancelling: Cancelling, limits: DataLimits, rows: Iterator[Any]) -> list[Any]:
    """List the rows of an iterator, as many as the limits allow, until it is cancelled."""
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
    with contextlib.suppress(InvalidStateError):  # it has ended
        read.set_exception(error)
