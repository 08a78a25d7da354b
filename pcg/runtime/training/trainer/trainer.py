"""The synchronous trainer: trains an adapter by commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from pcg.errors import FinetuneError
from pcg.kernels.devices import on_device
from pcg.keywords import takes
from pcg.runtime.model.state import ModelState
from pcg.runtime.training.checkpoints import CheckpointStore, TrainerRun, TrainerState
from pcg.runtime.training.options import Numbers
from pcg.runtime.training.run import Objective, of_evaluation
from pcg.runtime.training.trainer.commands import (
    Aside,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Publish,
    SaveState,
    TrainerCommand,
)
from pcg.runtime.training.trainer.datum import Saved, Scored, Snapshot, Stepped, TrainerArguments
from pcg.runtime.training.trainer.trained_adapter import TrainedAdapter
from pcg.runtime.training.work_units import run_to_end

Result = TypeVar("Result")


class Trainer:
    """Trains an adapter by commands; see `Executor.trainer`.

    Each method blocks until its result is available. A failed command changes nothing, and the
    trainer remains usable. The trainer is a context manager that closes the trainer.

    Attributes:
        name: the adapter's name, reserved until the trainer is closed.
    """

    def __init__(
        self, name: str, run: Callable[[TrainerCommand[Any]], Any], end: Callable[[], None]
    ) -> None:
        """Create a handle; `run` runs a command, and `end` closes the trainer."""
        self.name = name
        self._run = run
        self._end = end

    @takes(Forward, FinetuneError)
    def forward(self, command: Forward) -> Scored:
        """Compute a loss without gradients and without dropout.

        Raises:
            DataError: a datum does not fit the model or the loss; names its place.
            FinetuneError: bad options, or non-finite numbers.
        """
        return self._did(command)

    @takes(ForwardBackward, FinetuneError)
    def forward_backward(self, command: ForwardBackward) -> Scored:
        """Compute a summed loss and accumulate its gradients for `optim_step`.

        Raises:
            DataError: a datum does not fit the model or the loss; names its place.
            FinetuneError: bad options, or non-finite numbers.
        """
        return self._did(command)

    @takes(OptimStep, FinetuneError)
    def optim_step(self, command: OptimStep) -> Stepped:
        """Update the adapter by the gradients accumulated since the last update.

        Raises:
            FinetuneError: no accumulated gradients, or a bad option.
        """
        return self._did(command)

    @takes(SaveState, FinetuneError)
    def save_state(self, command: SaveState) -> Saved:
        """Save the adapter and the optimizer state; accumulated gradients are kept, not saved.

        Raises:
            FinetuneError: the path already exists, or cannot be written.
        """
        return self._did(command)

    @takes(LoadState, FinetuneError)
    def load_state(self, command: LoadState) -> Saved:
        """Load a saved state bit for bit and discard accumulated gradients.

        Raises:
            FinetuneError: no state, a damaged state, or a state of another base or recipe.
        """
        return self._did(command)

    def snapshot(self) -> Snapshot:
        """Publish the current adapter as the next version of its name."""
        return self._did(Publish())

    def close(self) -> None:
        """Free the trainer's memory and name; published versions remain served."""
        self._end()

    def _did(self, command: TrainerCommand[Result]) -> Result:
        result: Result = self._run(command)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def trainer_here(state: ModelState, arguments: TrainerArguments) -> Trainer:
    """Create a trainer that runs commands on the calling thread, without an engine.

    Raises:
        AdapterConflictError: a job or trainer already trains an adapter of that name.
        FinetuneError, UnsupportedError: training with the recipe or the optimizer is impossible.
    """
    ends = state.begin_training(arguments.name)
    held: list[TrainedAdapter] = []
    try:
        with _gradients(state.device):
            held.append(TrainedAdapter(state, arguments, windows=False))
    except BaseException:
        ends()
        raise

    def run(command: TrainerCommand[Result]) -> Result:
        if not held:
            raise FinetuneError(f"trainer {arguments.name!r} was closed; make another one")
        state.check_no_engine("a trainer that was made before", "make one by trainer() now")
        with _gradients(state.device):
            return run_here(command, held[0])

    def end() -> None:
        if held:
            held.clear()
            ends()

    return Trainer(arguments.name, run, end)


@contextmanager
def _gradients(device: torch.device) -> Iterator[None]:
    """Enable gradients on a device, in any grad mode of the caller."""
    with torch.inference_mode(False), torch.enable_grad(), on_device(device):
        yield


def run_here(command: TrainerCommand[Result], trained: TrainedAdapter) -> Result:
    """Run all stages of a command in turn."""
    stages = command.stages(trained)
    try:
        stage = next(stages)
        while True:
            try:
                value = stage.act() if isinstance(stage, Aside) else run_to_end(stage)
            except BaseException as error:  # Ctrl-C, too
                stage = stages.throw(error)
            else:
                stage = stages.send(value)
    except StopIteration as end:
        result: Result = end.value
        return result


class TrainerObjective(Objective[Result]):
    """An objective that trains through a trainer's commands."""

    trainer: Trainer

    def __init__(self, name: str) -> None:
        self.name = name
        self.history: list[dict[str, float]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def read(self, path: Path) -> TrainerRun:
        return TrainerRun.read(path)

    def load(self, checkpoint: tuple[Path, TrainerRun] | None) -> None:
        """Load a checkpoint, if any."""
        if checkpoint is not None:
            path, saved = checkpoint
            self.trainer.load_state(path)
            self.history, self.evaluations = saved.history, saved.evaluations

    def save(
        self, store: CheckpointStore, state: TrainerState, trajectory: Mapping[str, Any]
    ) -> Path:
        notes = TrainerRun(state, trajectory, self.history, self.evaluations).notes
        return store.save(state.step, lambda path: self.trainer.save_state(path, notes=notes))

    def undo(self) -> None:
        self.trainer.close()

    def end(self) -> None:
        self.trainer.close()

    def recorded_before(self, step: int, state: TrainerState) -> Numbers:
        evaluated = dict(self.evaluations).get(step)
        return {**self.history[step - 1], **of_evaluation(evaluated)}
