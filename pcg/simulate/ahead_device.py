"""A simulated device that works beside its host, as a GPU does.

What is started runs behind what was started before, and the clock stands still: the host's own work
takes no time. It moves when the host waits, for the results of a step or for parts of jobs. Parts
beside a forward take their time behind it, as two things at once on a device that one fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass

from pcg.parallel.costs.step_costs import StepCosts
from pcg.runtime.engine.clock import SimulatedClock
from pcg.runtime.engine.device import SideStream
from pcg.runtime.engine.steps.started import FinishedStep
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step_results import StepResults
from pcg.runtime.training.work_units import Forward
from pcg.simulate.simulated_device import SimulatedDevice


@dataclass(frozen=True)
class _AheadStep(FinishedStep):
    """A step that ends at a time."""

    clock: SimulatedClock | None = None
    ends_s: float = 0.0

    def read(self) -> StepResults:
        assert self.clock is not None
        self.clock.wait_until(self.ends_s)
        return super().read()


class AheadSide(SideStream):
    """The second stream of such a device, which runs parts of jobs behind what was started."""

    def __init__(self, device: AheadDevice) -> None:
        """Make a stream without a GPU's."""
        self._device = device
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Do nothing: all is in one order."""

    def rejoin(self) -> None:
        """Do nothing: all is in one order."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    @contextmanager
    def timed(self) -> Iterator[None]:
        busy_s = self._device.busy_s
        yield
        self._seconds.append(self._device.busy_s - busy_s)

    def join(self) -> list[float]:
        """Wait until all that was started is done; returns the seconds of each measurement."""
        self._device.ahead_clock.wait_until(self._device.free_s)
        seconds, self._seconds = self._seconds, []
        return seconds


class AheadDevice(SimulatedDevice):
    """A device on which a step may begin before the one before is read."""

    def __init__(
        self, costs: StepCosts, clock: SimulatedClock, most_positions: int | None = None
    ) -> None:
        super().__init__(costs, clock, most_positions)
        self.is_ahead = True
        self.side = AheadSide(self)
        self.free_s = 0.0
        self.ahead_clock = clock

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> _AheadStep:
        """Run a step as `SimulatedDevice.start`, behind what was started before."""
        busy_s = self.busy_s
        done = super().start(chunks, windows)
        took_s = self.busy_s - busy_s
        return _AheadStep(done.results, device_s=took_s, clock=self.ahead_clock, ends_s=self.free_s)

    def _take(self, seconds: float) -> None:
        self.busy_s += seconds
        self.free_s = max(self.free_s, self.ahead_clock.now_s()) + seconds
