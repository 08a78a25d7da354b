"""A step that a device has begun to run: its forward first, then its tokens, then the host's copy.

A GPU works beside the host, so that a step's forward may begin before the tokens of the step before
are read (`flight.py`). To choose its own tokens the device needs what these were: penalties, guides
and stop conditions depend on them. So a step is drawn apart from its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pcg.runtime.requests.step_results import StepResults


class StartedStep(Protocol):
    """A step whose forward is under way."""

    def draw(self) -> None:
        """Choose the tokens after its sequences that still run, once the tokens before are known.

        The device does so in its own time.
        """

    def read(self) -> StepResults:
        """Wait for the end, and return what the step computed."""

    @property
    def is_replayed(self) -> bool:
        """True if recorded steps ran all of its forward."""

    @property
    def device_s(self) -> float | None:
        """The device's own time for the step, once it was read; None if it has no such clock."""


@dataclass(frozen=True)
class FinishedStep:
    """A step of a device that is done when it is started, and how its results are had."""

    results: Callable[[], StepResults]
    is_replayed: bool = False
    device_s: float | None = None

    def draw(self) -> None:
        """Do nothing: the tokens are chosen."""

    def read(self) -> StepResults:
        """Return what the step computed."""
        return self.results()
