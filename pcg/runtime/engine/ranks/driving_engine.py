"""The engine of the first rank: takes requests, adapters and jobs, and has all ranks do them.

What is read or tokenized is so on threads of this rank. What ranks do together, compiling a job or
a program for an adapter included, is done between two steps, by the thread that runs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty

import torch

from pcg.peft.adapter import Adapter
from pcg.ranks.line import BEAT_S, Line
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.engine.calls import Call
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.ranks.adapter_order import put_adapter, put_order
from pcg.runtime.engine.ranks.driver import Driver
from pcg.runtime.engine.ranks.job_order import prepare_order
from pcg.runtime.engine.ranks.orders import Remove
from pcg.runtime.engine.ranks.ranked_engine import RankedEngine
from pcg.runtime.engine.step_thread import StepThread
from pcg.runtime.model.adapter_loads import Loads, begun, pass_result, passing
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.options import JobArguments


class DrivingEngine(RankedEngine):
    """The async engine of the first rank."""

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
        data_limits: DataLimits,
        line: Line,
        driver: Driver,
        free: Callable[[], None],
    ) -> None:
        self._driver = driver
        self._prepare_here = prepare_job
        super().__init__(engine, state, self._prepare_everywhere, data_limits, line, free)

    def _made_loads(self) -> Loads:
        return _DrivingLoads(self, self.state, self._driver)

    # ------------------------------------------------------------------------------- its end

    def _close(self, timeout_s: float | None) -> None:
        def stop() -> None:
            self._closing = True

        self.call(stop)
        super()._close(timeout_s)

    def _run_steps(self) -> None:
        StepThread._run(self)
        ended = self.ended
        assert ended is not None
        try:
            if ended.__cause__ is None:
                self._driver.end(str(ended))
        except Exception as error:
            ended.__cause__ = error
        self._driver.close()

    # ------------------------------------------------------------------------------- the thread

    def compile_aside(self, act: Callable[[], None]) -> None:
        self.call(act)

    def _next_call(self, timeout_s: float | None) -> Call:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = BEAT_S if until is None else max(0.0, until - time.monotonic())
            try:
                return super()._next_call(min(BEAT_S, left_s))
            except Empty:
                if left_s < BEAT_S:
                    raise
                self._driver.tell()

    def _prepare_everywhere(self, given: JobArguments) -> Job:
        """Make a job on all ranks."""
        with self._driver.asked(prepare_order(given)):
            return self._prepare_here(given)


class _DrivingLoads(Loads):
    """Adds and removes adapters of all ranks."""

    def __init__(self, engine: DrivingEngine, state: ModelState, driver: Driver) -> None:
        super().__init__(
            state, engine._preparation, engine.call, engine._check_open, engine._check_unreserved
        )
        self._driver = driver

    def add(
        self, name: str, path_or_config: object, seed: int, check_free: Callable[[], None]
    ) -> Future[Adapter]:
        state, end = self._state, begun()

        def check() -> None:
            self._check_open()
            self._check_unreserved(name)
            check_free()

        def load() -> None:
            check()
            made = state.make_adapter(name, path_or_config, seed=seed).map(torch.clone)
            order = put_order(name, path_or_config, seed)

            def put() -> Adapter:
                check()
                with self._driver.asked(order):
                    return put_adapter(state, name, lambda: made)

            self._call(put).add_done_callback(partial(pass_result, end))

        self._in_turn(name, end, lambda: self._threads.load(passing(end, load)))
        return end

    def _remove(self, name: str) -> None:
        with self._driver.asked(Remove(name)):
            super()._remove(name)
