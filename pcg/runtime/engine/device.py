"""What the engine asks of the device that runs its steps: a real one, or one in simulated time."""

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
    """Where backward units run beside a step's forward, and it does not wait for them."""

    def begin(self) -> None:
        """Hear that a forward begins: what it does, units beside it do not depend on."""

    def beside(self) -> AbstractContextManager[None]:
        """Run there what is asked for inside."""

    def timed(self) -> AbstractContextManager[None]:
        """Measure what runs inside."""

    def join(self) -> list[float]:
        """Wait until all is done; seconds of what was measured since the last time."""


class Device(Protocol):
    """What runs a program: the real one, or one that takes simulated time.

    Attributes:
        cache: keys and values, for jobs.
        side: for backward units; None where they come behind the forward.
    """

    cache: Any
    side: Side | None

    def open(self, request: Request, number: int) -> Sequence:
        """A request's state, before anything ran.

        Raises:
            GenerationError: the model cannot run it.
        """

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        """Begin to copy adapters that have pages, beside what runs, in the order of their turns."""

    def is_copying(self, adapter: ServedAdapter) -> bool:
        """Whether one is being copied, so that a step that runs it would wait."""

    def evict(self, adapter: ServedAdapter) -> None:
        """Hear that one gives its pages up."""

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Callable[[], list[int]]:
        """Run sequences' next tokens and windows of jobs together.

        Returns:
            What waits for the end, and returns for each sequence the token that follows; it means
            nothing where more are pending.
        """

    def back(self, units: List[Backward]) -> None:
        """Run backward units of one layer together, each of another job."""
