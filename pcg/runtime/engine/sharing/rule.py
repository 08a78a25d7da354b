"""A rule of sharing: how much finetuning goes into each step beside serving."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Forward, Part, Phase


class Sharing(ABC):
    """Decides how much finetuning goes into a step.

    `is_due` is True for a job that no step had room for in a long time; its smallest piece of work
    is then allowed to exceed the room.

    Attributes:
        trains: True if jobs come to their ends; otherwise they wait forever.
    """

    trains = True

    def serves(self, has_work: bool) -> bool:
        """Return True if the next step may serve requests; `has_work` tells if a job could run."""
        return True

    def begin(self, step: Step) -> None:  # noqa: B027 (most rules do nothing)
        """Prepare for a step before any finetuning is in it."""

    @abstractmethod
    def forward(self, step: Step, unit: Forward) -> int:
        """Return the most tokens of a job that go forward in the step, through all layers."""

    def in_layers(self, step: Step, unit: Forward, ahead_s: float, *, is_due: bool) -> int:
        """Return the tokens of a window that begins to go forward in parts, a layer each."""
        return 0

    @abstractmethod
    def fits(
        self, step: Step, phase: Phase, load: Load, ahead_s: float, *, is_due: bool = False
    ) -> bool:
        """Return True if parts of this load run before work that takes `ahead_s` more."""

    def part(self, step: Step, part: Part, beside: Load, ahead_s: float, *, is_due: bool) -> int:
        """Return how many tokens of a part run beside others of its stage: of a loss any number."""
        load = part.load
        fits = self.fits(step, part.stage.phase, beside + load, ahead_s, is_due=is_due)
        return load.tokens if fits else 0

    def ran(self, step: Step, seconds: float) -> None:  # noqa: B027
        """Record the time of parts.

        Of those beside the forward it is the predicted time, and later by how much it was exceeded.
        """
