"""The engine over a simulated device: the same scheduler, pool and policies, and a clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pcg.parallel.costs.step_costs import StepCosts
from pcg.runtime.adapters.cache import AdapterCache
from pcg.runtime.engine.clock import SimulatedClock
from pcg.runtime.engine.events import EventLog, Kind
from pcg.runtime.engine.job import Job
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.policies import Policy
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.sharing import Sharing
from pcg.runtime.memory.pool import PagePool
from pcg.runtime.memory.prefixes import Prefixes
from pcg.simulate.device import SimulatedDevice
from pcg.simulate.job import simulated_steps


class SimulatedEngine(EngineLoop):
    """Serves and trains in simulated time; see `EngineLoop`."""

    device: SimulatedDevice
    clock: SimulatedClock

    def __init__(
        self,
        costs: StepCosts,
        pages: int,
        page_bytes: int,
        limits: Limits | None = None,
        *,
        policy: Policy | None = None,
        latencies: Latencies | None = None,
        log: EventLog | None = None,
        job_share: float = 0.5,
        most_positions: int | None = None,
        sharing: Sharing | None = None,
        prefix_caching: bool = False,
    ) -> None:
        """Start at 0 s with nothing to do.

        Args:
            costs: of the device.
            pages: of the pool.
            page_bytes: of one; adapters take pages by it.
            limits: of a step.
            policy: of admission; first come, first served by default.
            latencies: that the engine plans by and corrects; None promises nothing.
            log: to write to.
            job_share: of the pool, that finetuning may hold at most.
            most_positions: of the model; None for any number.
            sharing: as much finetuning as fits within the promises by default.
            prefix_caching: whether requests share the blocks of common prefixes; off by default,
                as the requests of workloads have lengths and no tokens.
        """
        pool, clock = PagePool(pages), SimulatedClock()
        adapters = AdapterCache(pool, lambda adapter: -(-adapter.size_bytes // page_bytes))
        prefixes = Prefixes(pool) if prefix_caching else None
        limits = Limits() if limits is None else limits
        scheduler = Scheduler(pool, adapters, limits, policy, prefixes)
        device = SimulatedDevice(costs, clock, most_positions)
        super().__init__(
            device,
            scheduler,
            clock,
            log=log,
            latencies=latencies,
            job_share=job_share,
            sharing=sharing,
        )
        self._costs = costs

    def finetune(self, name: str, batches: Iterable[Sequence[int]], rank: int = 16) -> Job:
        """Train an adapter beside what is served.

        Args:
            name: of the adapter, and of the job.
            batches: lengths of the sequences of each step; without end for a job that has none.
            rank: of the adapter.
        Raises:
            PcgError: there is such a job.
        """
        steps = 0

        def stepped(tokens: int) -> None:
            nonlocal steps
            steps += 1
            self._note(Kind.STEPPED, name, step=steps, tokens=tokens)

        work = simulated_steps(batches, self._costs.layers, self.device.update, stepped, rank)
        return self.add_job(Job(name, work))
