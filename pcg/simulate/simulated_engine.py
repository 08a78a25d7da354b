"""The engine over a simulated device: the scheduler, pool and policies are the real ones.

A simulated device that runs asynchronously to its host, like a GPU.

Started work runs after earlier work without advancing the clock: the host's own work takes no time.
The clock advances when the host waits, for the results of a step or for parts of jobs. Parts
concurrent with a forward take their time after it, as on a device that the forward fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pcg.keywords import takes
from pcg.parallel.costs.step_costs import StepCosts
from pcg.runtime.adapters.cache import AdapterCache
from pcg.runtime.admission.backlog import UNLIMITED
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.device.clock import SimulatedClock
from pcg.runtime.engine.device.device import Finished, SideStream
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.engine.scheduling.scheduler import Scheduler
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.metrics.events import EventLog, Kind
from pcg.runtime.requests.prefixes import Prefixes
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step import Results
from pcg.runtime.training.recorded.window_sizes import WindowSizes
from pcg.runtime.training.work_units import Forward
from pcg.simulate.simulated_device import SimulatedDevice, simulated_steps


@dataclass(frozen=True)
class _AheadStep(Finished):
    clock: SimulatedClock | None = None
    ends_s: float = 0.0

    def read(self) -> Results:
        assert self.clock is not None
        self.clock.wait_until(self.ends_s)
        return super().read()


class AheadSide(SideStream):
    """The second stream of an `AheadDevice`; it runs parts of jobs after the started work."""

    def __init__(self, device: AheadDevice) -> None:
        self._device = device
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Do nothing: all work is in order."""

    def rejoin(self) -> None:
        """Do nothing: all work is in order."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    @contextmanager
    def timed(self) -> Iterator[None]:
        busy_s = self._device.busy_s
        yield
        self._seconds.append(self._device.busy_s - busy_s)

    def join(self) -> list[float]:
        """Wait for all started work; return the seconds of each measurement."""
        self._device.ahead_clock.wait_until(self._device.free_s)
        seconds, self._seconds = self._seconds, []
        return seconds


class AheadDevice(SimulatedDevice):
    """A device that may start a step before the results of the previous step are read."""

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
        """Run a step as `SimulatedDevice.start`, after the work started before."""
        busy_s = self.busy_s
        finished = super().start(chunks, windows)
        took_s = self.busy_s - busy_s
        return _AheadStep(
            finished.results, device_s=took_s, clock=self.ahead_clock, ends_s=self.free_s
        )

    def _take(self, seconds: float) -> None:
        self.busy_s += seconds
        self.free_s = max(self.free_s, self.ahead_clock.now_s()) + seconds


@dataclass(frozen=True)
class SimulatedArguments(EngineOptions):
    """Arguments of `SimulatedEngine`.

    Attributes:
        costs: the costs of the device's steps.
        pages: pages of the pool.
        page_bytes: bytes of a page; determines the pages of an adapter.
        limits: the limits of a step, and the SLOs; those of `Limits()` by default.
        log: the event log; by default a log that keeps all events.
        queue: limits of the queue; unlimited by default.
        latencies: the engine's predicted latencies; without them, the engine keeps no SLO.
        most_positions: positions of the model; None for any number.
        prefix_caching: let requests share the blocks of common prefixes; off by default, as a
            workload's requests have lengths but no tokens.
        is_ahead: True if the device runs asynchronously to its host, so that steps overlap.
    """

    costs: StepCosts
    pages: int
    page_bytes: int
    limits: Limits | None = None
    most_positions: int | None = field(default=None, kw_only=True)
    prefix_caching: bool = field(default=False, kw_only=True)
    is_ahead: bool = field(default=False, kw_only=True)


class SimulatedEngine(EngineLoop):
    """Serves and trains in simulated time; see `EngineLoop`."""

    device: SimulatedDevice
    clock: SimulatedClock

    @takes(SimulatedArguments)
    def __init__(self, arguments: SimulatedArguments) -> None:
        pool, clock = PagePool(arguments.pages), SimulatedClock()
        adapters = AdapterCache(
            pool, lambda adapter: -(-adapter.size_bytes // arguments.page_bytes)
        )
        prefixes = None
        if arguments.prefix_caching:
            prefixes = Prefixes(pool, between_tenants=arguments.prefixes_between_tenants)
        limits = arguments.limits or Limits()
        queue = arguments.queue or UNLIMITED
        scheduler = Scheduler(pool, adapters, limits, arguments.policy, prefixes, queue)
        kind = AheadDevice if arguments.is_ahead else SimulatedDevice
        device = kind(arguments.costs, clock, arguments.most_positions)
        log = EventLog() if arguments.log is None else arguments.log
        super().__init__(device, scheduler, clock, replace(arguments, log=log))
        self._costs = arguments.costs

    def finetune(
        self,
        name: str,
        batches: Iterable[List[int]],
        rank: int = 16,
        sizes: WindowSizes | None = None,
    ) -> Job:
        """Train an adapter concurrently with serving.

        Args:
            name: the name of the adapter, and of the job.
            batches: the lengths of each step's sequences; may be infinite.
            rank: the adapter's rank.
            sizes: the sizes of its windows, as on a GPU that records windows; None for any size.
        Raises:
            PcgError: a job already has the name.
        """
        steps = 0

        def stepped(tokens: int) -> None:
            nonlocal steps
            steps += 1
            self._note(Kind.STEPPED, name, step=steps, tokens=tokens)

        work = simulated_steps(
            batches, self._costs.layers, self.device.update, stepped, rank, sizes
        )
        return self.add_job(Job(name, work))
