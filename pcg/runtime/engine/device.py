"""The engine's interface to the device that runs its steps, real or simulated."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.sequence import Sequence
from pcg.runtime.training.work_units import Backward, Forward


class Side(Protocol):
    """Runs backward units beside a step's forward, which does not wait for them."""

    def begin(self) -> None:
        """Note that a forward begins; units beside it do not depend on its work."""

    def beside(self) -> AbstractContextManager[None]:
        """Run what is launched inside on the side."""

    def timed(self) -> AbstractContextManager[None]:
        """Measure what runs inside."""

    def join(self) -> list[float]:
        """Wait until all is done; returns the seconds of each measurement since the last call."""


class Device(Protocol):
    """Runs a program, on the real device or in simulated time.

    Attributes:
        cache: keys and values for jobs.
        side: runs backward units; None if they follow the forward.
    """

    cache: Any
    side: Side | None

    def open(self, request: Request, number: int) -> Sequence:
        """Return the state of a new request; GenerationError if the model cannot run it."""

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        """Begin to copy adapters that have pages, beside what runs, in the order of their turns."""

    def is_copying(self, adapter: ServedAdapter) -> bool:
        """Return True while an adapter is being copied, so that a step that runs it would wait."""

    def evict(self, adapter: ServedAdapter) -> None:
        """Note that an adapter gives its pages up."""

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Callable[[], list[int]]:
        """Run sequences' next tokens and windows of jobs together.

        Args:
            chunks: sequences, and how many of their pending tokens run.
            windows: units of jobs, and how many of their tokens run.
        Returns:
            A function that waits for the end, and returns the token that follows each sequence,
                meaningless where more tokens are pending.
        """

    def back(self, units: List[Backward]) -> None:
        """Run backward units of one layer together, each of another job."""
