"""A rule of sharing: how much finetuning goes into each step beside serving."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Forward, Part, Phase


class Sharing(ABC):
    """Decides how much finetuning goes into a step.

    Attributes:
        trains: True if jobs come to their ends; otherwise they wait forever.
        burst: how many times its TPOT SLO a step may last if its requests have the slack.
    """

    trains = True
    burst = 1.0

    @property
    def patience(self) -> int:
        """Steps without room for a job's part after which its step begins again, with others."""
        return 256

    def serves(self, has_work: bool) -> bool:
        """Return True if the next step may serve requests; `has_work` tells if a job could run."""
        return True

    def begin(self, step: Step) -> None:  # noqa: B027 (most rules do nothing)
        """Note a step before any finetuning is in it."""

    @abstractmethod
    def forward(self, step: Step, unit: Forward) -> int:
        """Return the most tokens of a job that go forward in the step."""

    def in_layers(self, step: Step, unit: Forward, ahead_s: float) -> int:
        """Return the tokens of a window that begins to go forward in parts, a layer each."""
        return 0

    @abstractmethod
    def fits(self, step: Step, phase: Phase, load: Load, ahead_s: float) -> bool:
        """Return True if parts of this load run before what takes `ahead_s` more."""

    def part(self, step: Step, part: Part, beside: Load, ahead_s: float) -> int:
        """Return how many tokens of a part run, beside others of its stage: of a loss any."""
        load = part.load
        fits = self.fits(step, part.stage.phase, beside + load, ahead_s)
        return load.tokens if fits else 0

    def ran(self, step: Step, seconds: float) -> None:  # noqa: B027
        """Note the time of parts; as it is predicted where they run beside what is served."""

    def corrected(self, step: Step, seconds: float) -> None:  # noqa: B027
        """Note that parts took so much longer than `ran` was told."""
