"""Punica §7.3, figure 13: sixteen GPUs with requests consolidated on the fullest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.requests.sequence import Sequence as Served
from pcg.simulate.distributions import (
    SHAREGPT_FIRST_OUTPUTS,
    SHAREGPT_FIRST_PROMPTS,
    Lengths,
    RateCurve,
    Skewed,
)
from pcg.simulate.simulated_program import SimulatedProgram, simulated_program
from pcg.simulate.simulation import FullestFirst, Migration, Simulation, working_set
from pcg.simulate.synthetic import assign_adapters, synthetic
from pcg.simulate.workload import Workload

PUNICA_GPUS = 16
PUNICA_BATCH = 32
"""Maximum number of requests of a GPU (§5.1)."""


@dataclass(frozen=True)
class ClusterMinute:
    """A minute of the cluster.

    Attributes:
        minute: its number from 0.
        busy: the share of the minute that each GPU computed.
        batch: the mean number of requests in a step of each GPU; 0 for an idle GPU.
        moved: the number of requests that moved between GPUs.
        freed: the number of GPUs that became empty by such moves.
    """

    minute: int
    requests_per_s: float
    output_tokens_per_s: float
    busy: tuple[float, ...]
    batch: tuple[float, ...]
    moved: int
    freed: int

    @property
    def used(self) -> float:
        """The mean number of GPUs in use: a GPU with requests is always computing."""
        return sum(self.busy)


def cluster_program() -> SimulatedProgram:
    """Return Llama-2-7B on an A100 of 40 GB, with adapters at all dense projections."""
    return simulated_program("meta-llama/Llama-2-7b-hf", "A100-40")


def hour_workload(
    rate_per_s: float,
    *,
    seed: int,
    duration_s: float = 3600.0,
    prompts: Lengths = SHAREGPT_FIRST_PROMPTS,
    outputs: Lengths = SHAREGPT_FIRST_OUTPUTS,
) -> Workload:
    """Return Punica's hour: a rate that rises and falls, adapters Zipf-1.5.

    The paper shows the rate's curve without numbers: here it rises linearly from 0 to twice the
    mean at half-time and falls to 0.
    """
    arrivals = RateCurve(rate_per_s, duration_s, (0.0, 1.0, 0.0))
    workload = synthetic(arrivals, prompts, outputs, seed=seed, duration_s=duration_s)
    return assign_adapters(workload, Skewed(1.5), seed=seed)


def cluster_hour(
    program: SimulatedProgram,
    rate_per_s: float,
    *,
    seed: int = 0,
    duration_s: float = 3600.0,
    prompts: Lengths = SHAREGPT_FIRST_PROMPTS,
    outputs: Lengths = SHAREGPT_FIRST_OUTPUTS,
    migrates: bool = True,
) -> tuple[tuple[ClusterMinute, ...], float]:
    """Serve Punica's hour: each request goes to the fullest GPU with room.

    Returns:
        The minutes, and the mean time to the first token in seconds.
    """
    workload = hour_workload(
        rate_per_s, seed=seed, duration_s=duration_s, prompts=prompts, outputs=outputs
    )
    adapters = {name: program.adapter(name, 16) for name in workload.adapters}
    limits = Limits(running=PUNICA_BATCH)
    # An hour has tens of millions of tokens: the log counts events but keeps none.
    engines = [program.engine(limits, log=EventLog(0)) for _ in range(PUNICA_GPUS)]
    simulation = Simulation(engines, FullestFirst(PUNICA_BATCH), adapters)
    if migrates:
        simulation.migration = Migration(PUNICA_BATCH)
    tally = _Tally(simulation)
    simulation.run(workload)
    came = Counter(int(request.time_s // 60) for request in workload)
    return tally.minutes(came), tally.first_s / len(workload)


class _Tally:
    """Counts the work of engines, by minute.

    Attributes:
        first_s: the sum of all requests' times to the first token.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.first_s = 0.0
        self._engines = engines = simulation.engines
        self._resumed = simulation.resumed
        simulation.on_step, simulation.on_move = self.stepped, self.moved
        self._busy_before = [0.0] * len(engines)
        self._busy: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._steps: Counter[tuple[int, int]] = Counter()
        self._batch: Counter[tuple[int, int]] = Counter()
        self._tokens: Counter[int] = Counter()
        self._moved: Counter[int] = Counter()
        self._freed: Counter[int] = Counter()
        for place, engine in enumerate(engines):
            engine.log.listen(partial(self._hear, place))
        self._submitted_s: dict[tuple[int, str], float] = {}

    def stepped(self, place: int) -> None:
        """Count a step."""
        engine = self._engines[place]
        if not engine.worked:
            return  # it became empty
        where = int(engine.clock.now_s() // 60), place
        self._steps[where] += 1
        self._batch[where] += len(engine.scheduler.running)
        self._busy[where] += engine.device.busy_s - self._busy_before[place]
        self._busy_before[place] = engine.device.busy_s

    def moved(self, place: int, sequence: Served) -> None:
        """Count a request that moves, and its GPU if it becomes empty."""
        engine = self._engines[place]
        minute = int(engine.clock.now_s() // 60)
        self._moved[minute] += 1
        self._freed[minute] += working_set(engine) == 1
        self._submitted_s.pop((place, sequence.id), None)

    def minutes(self, came: Mapping[int, int]) -> tuple[ClusterMinute, ...]:
        """Return all minutes up to the last token."""
        places = range(len(self._engines))
        return tuple(
            ClusterMinute(
                minute,
                came.get(minute, 0) / 60,
                self._tokens[minute] / 60,
                tuple(self._busy[minute, place] / 60 for place in places),
                tuple(
                    self._batch[minute, place] / max(self._steps[minute, place], 1)
                    for place in places
                ),
                self._moved[minute],
                self._freed[minute],
            )
            for minute in range(1 + max(self._tokens, default=0))
        )

    def _hear(self, place: int, event: Event) -> None:
        key = place, event.subject
        if event.kind is Kind.SUBMITTED:
            self._submitted_s[key] = event.time_s
        elif event.kind is Kind.TOKEN:
            self._tokens[int(event.time_s // 60)] += 1
            submitted_s = self._submitted_s.pop(key, None)
            if submitted_s is not None and key not in self._resumed:
                self.first_s += event.time_s - submitted_s
