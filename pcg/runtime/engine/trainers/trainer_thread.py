"""The engine's thread with trainers, whose commands it runs beside requests and jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock

from pcg.errors import EngineError, FinetuneError
from pcg.keywords import takes
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.preparation import Preparation
from pcg.runtime.engine.step_thread import StepThread
from pcg.runtime.engine.trainers.async_trainer import AsyncTrainer
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.trainer.datum import TrainerArguments
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter

PrepareTrainer = Callable[[TrainerArguments], TrainedAdapter]


class TrainerThread(StepThread):
    """A thread that runs an engine's steps, and trainers' commands."""

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_trainer: PrepareTrainer,
        preparation: Preparation,
    ) -> None:
        super().__init__(engine, state.device)
        self._preparation = preparation
        self.state = state
        self._prepare_trainer = prepare_trainer
        self.trainers: dict[str, AsyncTrainer] = {}
        self._with_jobs: list[AsyncTrainer] = []
        self._trainers_lock = Lock()

    @takes(TrainerArguments, FinetuneError)
    def trainer(self, given: TrainerArguments) -> AsyncTrainer:
        """Make a trainer: an adapter that is trained command by command, beside what is served.

        It returns at once; errors of the recipe are raised by `created`, and by every call.

        Raises:
            AdapterConflictError: something trains an adapter of that name.
            EngineError: the thread has ended.
            FinetuneError: bad options.
        """
        return self.begin_trainer(given)

    def begin_trainer(self, given: TrainerArguments) -> AsyncTrainer:
        """Do as `trainer` does, with arguments that are one object."""
        self.check_open()
        ends = self.state.begin_training(given.name)

        def end() -> None:
            ends()
            with self._trainers_lock:
                self.trainers = {name: one for name, one in self.trainers.items() if one.is_open}

        try:
            make = partial(self._prepare_trainer, given)
            made = AsyncTrainer(given.name, self, make, end, given.tenant)
        except BaseException:
            ends()
            raise
        with self._trainers_lock:
            self.trainers[given.name] = made
        return made

    def compile_aside(self, act: Callable[[], None]) -> None:
        self._preparation.compile(act)

    def check_open(self) -> None:
        self._check_open()

    def runs_trainer(self, trainer: AsyncTrainer) -> None:
        if trainer not in self._with_jobs:
            self._with_jobs.append(trainer)

    # ------------------------------------------------------------------------------- the thread

    def _settle(self) -> None:
        self._with_jobs = [one for one in list(self._with_jobs) if not one.settle()]

    @property
    def trains(self) -> bool:
        """True while a command of a trainer waits or runs."""
        return any(one.is_busy for one in self.trainers.values())

    def _cancel_all(self) -> None:
        for one in list(self.trainers.values()):
            one.end_now()

    def _fail_all(self, error: EngineError) -> None:
        for one in list(self.trainers.values()):
            one.fail(error)
