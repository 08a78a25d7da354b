"""The engine over a simulated device: the scheduler, pool and policies are the real ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pcg.keywords import takes
from pcg.parallel.costs.step_costs import StepCosts
from pcg.runtime.adapters.cache import AdapterCache
from pcg.runtime.admission.backlog import UNLIMITED
from pcg.runtime.engine.clock import SimulatedClock
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.options import EngineOptions
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.memory.prefixes import Prefixes
from pcg.runtime.metrics.events import EventLog, Kind
from pcg.runtime.training.recorded.window_sizes import WindowSizes
from pcg.simulate.ahead_device import AheadDevice
from pcg.simulate.simulated_device import SimulatedDevice
from pcg.simulate.simulated_training import simulated_steps


@dataclass(frozen=True)
class SimulatedArguments(EngineOptions):
    """Arguments of `SimulatedEngine`.

    Attributes:
        costs: the costs of the device's steps.
        pages: pages of the pool.
        page_bytes: bytes of a page; adapters take pages by it.
        limits: the limits of a step, and the SLOs; those of `Limits()` by default.
        log: the event log to write to; by default one that keeps all events.
        queue: the most that may wait; without it, everything may.
        latencies: what the engine plans by and corrects; without it, it keeps no SLO.
        most_positions: positions of the model; None for any number.
        prefix_caching: let requests share the blocks of common prefixes; off by default, as the
            requests of workloads have lengths and no tokens.
        is_ahead: whether the device works beside its host, so that steps overlap.
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
    def __init__(self, given: SimulatedArguments) -> None:
        """Start at 0 s with nothing to do."""
        pool, clock = PagePool(given.pages), SimulatedClock()
        adapters = AdapterCache(pool, lambda adapter: -(-adapter.size_bytes // given.page_bytes))
        prefixes = None
        if given.prefix_caching:
            prefixes = Prefixes(pool, between_tenants=given.prefixes_between_tenants)
        limits = given.limits or Limits()
        queue = given.queue or UNLIMITED
        scheduler = Scheduler(pool, adapters, limits, given.policy, prefixes, queue)
        made = AheadDevice if given.is_ahead else SimulatedDevice
        device = made(given.costs, clock, given.most_positions)
        log = EventLog() if given.log is None else given.log
        super().__init__(device, scheduler, clock, replace(given, log=log))
        self._costs = given.costs

    def finetune(
        self,
        name: str,
        batches: Iterable[Sequence[int]],
        rank: int = 16,
        sizes: WindowSizes | None = None,
    ) -> Job:
        """Train an adapter beside what is served.

        Args:
            name: the name of the adapter, and of the job.
            batches: the lengths of each step's sequences; may have no end.
            rank: the adapter's rank.
            sizes: the sizes of its windows, as of a GPU that records them; None for any.
        Raises:
            PcgError: a job has the name.
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
