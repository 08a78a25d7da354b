"""The costs of an engine's steps, fitted to what other steps of it took.

    step      f = a₀ + a₁ · tokens + a₂ · pairs + a₃ · sampled + a₄ · [trained > 0] + a₅ · trained
    unit      g = b₀ + b₁ · tokens + b₂ · pairs
    update    what it took on average

a₃ is what a sequence costs beside its tokens: its attention over pages, sampling, and the host's
bookkeeping. a₄ and a₅ are a window's, which runs behind the requests' tokens, and its loss. Least
squares of relative errors; a coefficient that would be below 0 is 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import torch

from pcg.errors import CostModelError
from pcg.parallel.costs.step_costs import SequenceChunk, StepShape
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.engine.clock import Clock
from pcg.runtime.engine.device import Device, Side
from pcg.runtime.engine.job import Job
from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.sequence import Sequence
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Backward, Forward, Release


@dataclass
class StepProfile:
    """What an engine's steps took.

    Attributes:
        steps: what each ran, and its seconds without what follows.
        units: backward units likewise.
        updates: seconds of optimizers' updates.
    """

    steps: list[tuple[StepShape, float]] = field(default_factory=list)
    units: list[tuple[Load, float]] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    def watch(self, engine: EngineLoop, job: Job) -> ProfiledDevice:
        """Note what an engine's device and a job do from now on."""
        device = ProfiledDevice(engine.device, engine.clock, self)
        engine.device = device
        advance = job.advance

        def timed() -> None:
            is_update, started = isinstance(job.unit, Release), engine.clock.now_s()
            advance()
            if is_update:
                took = engine.clock.now_s() - started
                self.updates.append(took)
                device.behind_s += took

        job.advance = timed  # type: ignore[method-assign]
        return device


class ProfiledDevice:
    """A device whose work is noted.

    Attributes:
        cache: of the device.
        side: none, so that each part is measured by itself.
        shape: of the last step; None where it ran no tokens.
        behind_s: seconds of units and updates of the step.
    """

    def __init__(self, device: Device, clock: Clock, profile: StepProfile) -> None:
        self.cache = device.cache
        self.side: Side | None = None
        self.shape: StepShape | None = None
        self.behind_s = 0.0
        self._device = device
        self._clock = clock
        self._profile = profile

    def step(self, engine: EngineLoop) -> int:
        """Run a step of the engine and note it; how many requests ended."""
        self.shape, self.behind_s = None, 0.0
        started = self._clock.now_s()
        ended = sum(chunk.completion is not None for chunk in engine.step())
        if self.shape is not None:
            took = self._clock.now_s() - started - self.behind_s
            self._profile.steps.append((self.shape, took))
        return ended

    def open(self, request: Request, number: int) -> Sequence:
        return self._device.open(request, number)

    def prefetch(self, adapters: List[ServedAdapter]) -> None:
        self._device.prefetch(adapters)

    def is_copying(self, adapter: ServedAdapter) -> bool:
        return self._device.is_copying(adapter)

    def evict(self, adapter: ServedAdapter) -> None:
        self._device.evict(adapter)

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Callable[[], list[int]]:
        served = [SequenceChunk(n, s.cached, n == s.pending) for s, n in chunks]
        trained = [SequenceChunk(n, unit.context, False, True) for unit, n in windows]
        self.shape = StepShape.of([*served, *trained])
        return self._device.start(chunks, windows)

    def back(self, units: List[Backward]) -> None:
        load, started = sum((unit.load for unit in units), Load()), self._clock.now_s()
        self._device.back(units)
        took = self._clock.now_s() - started
        self.behind_s += took
        self._profile.units.append((load, took))


class ProfiledCosts:
    """What a profile foretells of any step; see `StepCosts`.

    Args:
        profile: of steps like those that will be asked for.
        layers: of the model.
    Raises:
        CostModelError: there are too few steps.
    """

    def __init__(self, profile: StepProfile, layers: int) -> None:
        if min(len(profile.steps), len(profile.units)) < 16 or not profile.updates:
            raise CostModelError(
                f"a profile of {len(profile.steps)} steps, {len(profile.units)} backward units and "
                f"{len(profile.updates)} updates; profile at least 16, 16 and 1"
            )
        self.layers = layers
        self._step = _fitted([(_of_step(shape), took) for shape, took in profile.steps])
        self._unit = _fitted([(_of_load(load), took) for load, took in profile.units])
        self._update_s = statistics.fmean(profile.updates)

    def latencies(self) -> Latencies:
        """What an engine begins to plan by: the same, and nothing is free."""
        constant_s, token_s, key_s, sampled_s, window_s, trained_s = map(max, self._step, _LEAST_S)
        forward = Latency(constant_s, token_s, key_s, sampled_s, trained_s, window_s)
        return Latencies(forward, Latency(*map(max, self._unit, _LEAST_S[:3])))

    def step_seconds(self, shape: StepShape) -> float:
        return _dot(self._step, _of_step(shape))

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        return _dot(self._unit, _of_load(Load(shape.tokens, shape.pairs)))

    def update_seconds(self) -> float:
        return self._update_s

    def copy_seconds(self, size_bytes: int) -> float:
        """None: an adapter of the host's device is where it is."""
        return 0.0


_LEAST_S = (1e-6, 1e-9, 1e-15, 1e-9, 1e-6, 1e-9)
"""Of a step's coefficients, for what is learned relative to them."""


def _of_step(shape: StepShape) -> list[float]:
    of_window = [float(shape.trained > 0), float(shape.trained)]
    return [1.0, float(shape.tokens), float(shape.pairs), float(shape.sampled), *of_window]


def _of_load(load: Load) -> list[float]:
    return [1.0, float(load.tokens), float(load.keys)]


def _dot(coefficients: List[float], row: List[float]) -> float:
    return sum(a * x for a, x in zip(coefficients, row, strict=True))


def _fitted(observed: List[tuple[list[float], float]]) -> list[float]:
    """Coefficients of at least 0 with the least relative errors; outliers count as others do."""
    took = torch.tensor([seconds for _, seconds in observed]).double().clamp(min=1e-9)
    rows = torch.tensor([row for row, _ in observed]).double() / took.unsqueeze(-1)
    used = [i for i in range(rows.shape[1]) if bool(rows[:, i].any())]
    while True:
        scales = rows[:, used].abs().amax(0)
        ones = torch.ones(len(observed), 1).double()
        solution = torch.linalg.lstsq(rows[:, used] / scales, ones, driver="gelsd").solution
        found = (solution.squeeze(-1) / scales).tolist()
        if min(found) >= 0:
            break
        used.pop(found.index(min(found)))
    coefficients = [0.0] * rows.shape[1]
    for place, value in zip(used, found, strict=True):
        coefficients[place] = value
    return coefficients
