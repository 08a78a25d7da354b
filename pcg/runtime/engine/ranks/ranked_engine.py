"""An engine's thread over ranks: the part that is alike on the first rank and on the others.

Besides the thread that runs the steps there is one that looks whether another rank has ended: then
this engine ends, too, although its thread may wait for that rank within a step. The step's thread
is left to itself in this case, as nothing interrupts a message that it waits for.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from threading import Event, current_thread
from typing import TypeVar

import torch

from pcg.errors import EngineError, ParallelError, UnsupportedError
from pcg.kernels.devices import device_thread
from pcg.ranks.group import broadcast_from_first
from pcg.ranks.line import LOOK_S, Line
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.guest_work import GuestWork
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.trainers.async_trainer import AsyncTrainer
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.options import JobArguments
from pcg.runtime.training.trainer.datum import TrainerArguments
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter

Result = TypeVar("Result")


class RankedEngine(AsyncEngine):
    """An async engine on one of several ranks."""

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
        data_limits: DataLimits,
        line: Line,
        free: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
            line: the line between the ranks.
            free: called at the end: all ranks are called alike again.
        """
        self._line = line
        self._free = free
        self._over = Event()
        self._has_ended = False
        self._ranks = state.world
        super().__init__(engine, state, prepare_job, self._no_trainer, data_limits)
        if line.has_words:
            device_thread(None, self._watch, "pcg ranks").start()

    # ------------------------------------------------------------------------------- refused

    def _no_trainer(self, given: TrainerArguments) -> TrainedAdapter:
        raise UnsupportedError(f"trainers over {self._line.size} ranks; use one, or finetune")

    def begin_trainer(self, given: TrainerArguments) -> AsyncTrainer:
        self._no_trainer(given)
        raise AssertionError

    def host(self) -> GuestWork:
        raise UnsupportedError(
            f"the engine of {self._line.size} ranks runs no products of clients; use one rank, or "
            "pcg serve-base --tp"
        )

    def run(self, act: Callable[[], Result]) -> Result:
        raise UnsupportedError(
            f"a function between two steps of {self._line.size} ranks, which the others do not "
            "know; close the engine first, and make the call on all ranks"
        )

    # ------------------------------------------------------------------------------- its end

    def join(self) -> EngineError:
        self._over.wait()
        assert self.ended is not None
        return self.ended

    def _close(self, timeout_s: float | None) -> None:
        if current_thread() is not self._thread:
            self._over.wait(timeout_s)

    def _run(self) -> None:
        self._run_steps()
        ended = self.ended
        if ended is not None and ended.__cause__ is not None:
            self._line.leave_word(str(ended))
        self._finish()

    @abstractmethod
    def _run_steps(self) -> None:
        """Run steps until the end, which `_end` notes."""

    def _finish(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._free()
            self._over.set()

    def _end(self, error: EngineError) -> None:
        if self._ends():
            super()._end(error)

    def _ends(self) -> bool:
        """Return True to the first that asks, which is the one to end it."""
        with self._lock:
            ends, self._has_ended = not self._has_ended, True
        return ends

    def _watch(self) -> None:
        """End when another rank has."""
        while not self._over.wait(LOOK_S):
            try:
                word = self._line.word()
            except ParallelError as error:
                word = str(error)
            if word is not None:
                self._lose(word)
                return

    def _lose(self, word: str) -> None:
        """End although the thread may wait for a rank that is gone."""
        # It usually hears by itself, with its own error.
        if self._over.wait(2 * LOOK_S):
            return
        error = EngineError(f"the engine over {self._line.size} ranks ended: {word}")
        error.__cause__ = ParallelError(word)
        if not self._ends():
            return
        self._line.leave_word(str(error))
        with self._lock:
            self.ended = error
            self.state.engine_thread = None
            held = self._arrivals.clear()
        for stream in (*self._streams.values(), *held):
            stream.fail(error)
        for running in (*self._jobs, *self._reserved.values()):
            running.fail(error)
        self._preparation.close()
        while not self._calls.empty():
            self._calls.get().future.set_exception(error)
        with contextlib.suppress(InvalidStateError):
            self._drained.set_result(None)
        self._finish()

    # ------------------------------------------------------------------------------- the thread

    def _is_called(self) -> bool:
        """Return whether somebody waits for the first rank; all ranks ask at the same places."""
        own = torch.tensor([int(super()._is_called())])
        return bool(broadcast_from_first(self._ranks, own))
