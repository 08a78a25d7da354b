"""Jobs on preferences beside what an engine serves, a thread each.

The thread waits: what runs the model are a trainer's units and requests of the engine. Rows become
tokens in a process of their own.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from threading import Lock
from typing import Any

from pcg.errors import EngineError, FinetuneError, FinetuneInterrupted, as_pcg_error
from pcg.kernels.devices import device_thread
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.data.tokenizing import Cancelling, load_apart
from pcg.runtime.executor import Executor
from pcg.train.preference.options import DpoArguments
from pcg.train.preference.records import PreferenceResult, PreferenceStep
from pcg.train.preference.run import PreferenceRun


class PreferenceJob:
    """A job on preferences, from its beginning to its end.

    Args:
        end: is called on the job's thread with its result, or its error and whether it goes on when
            it is ordered again.
        arguments: those of `DpoArguments`.
    """

    def __init__(
        self,
        executor: Executor,
        end: Callable[[PreferenceResult | None, Exception | None, bool], None],
        arguments: dict[str, Any],
    ) -> None:
        self._executor = executor
        self._end = end
        self._arguments = arguments
        self._cancelling = Cancelling(arguments["adapter"])
        self._lock = Lock()
        self._run: PreferenceRun | None = None
        self._is_stopped = False

    def begin(self) -> None:
        """Begin on a thread."""
        name = f"pcg preferences of {self._arguments['adapter']}"
        device_thread(self._executor.device, self._work, name).start()

    def interrupt(self) -> None:
        """End after the step under way, with a checkpoint."""
        with self._lock:
            self._is_stopped = True
            if self._run is not None:
                self._run.stop()

    def cancel(self) -> None:
        """End now; it does not wait for that."""
        self._cancelling.cancel()
        with self._lock:
            if self._run is not None:  # which waits for the unit under way
                name = f"pcg end of {self._arguments['adapter']}"
                device_thread(self._executor.device, self._run.cancel, name).start()

    def _work(self) -> None:
        try:
            result = self._train()
        except Exception as error:
            goes_on = isinstance(error, FinetuneInterrupted | EngineError)
            is_final = not goes_on and not self._cancelling.is_cancelled
            known = as_pcg_error(error, "the job", FinetuneError)
            self._end(None, known, is_final)
        else:
            self._end(result, None, True)

    def _train(self) -> PreferenceResult:
        tokenizer = pickle.dumps(self._executor.tokenizer)
        load = functools.partial(load_apart, tokenizer, self._cancelling)
        run = PreferenceRun(self._executor, DpoArguments(**self._arguments), load, DataLimits())
        with self._lock:
            self._run = run
            if self._is_stopped:
                run.stop()
        if self._cancelling.is_cancelled:
            run.cancel()
        return run.run()


def step_numbers(record: PreferenceStep) -> dict[str, float]:
    """Return what a step tells beside what every job's has."""
    evaluation = record.evaluation or {}
    of_evaluation = {f"valid_{name}": x for name, x in evaluation.items() if name != "loss"}
    return {**record.metrics, **of_evaluation}
