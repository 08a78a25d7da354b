"""The costs of an engine's steps, fitted to the measured times of other steps.

    step      f = a₀ + a₁ · tokens + a₂ · pairs + a₃ · sampled + a₄ · [trained > 0] + a₅ · trained
    part      g = b₀ + b₁ · tokens + b₂ · pairs, of each phase
    update    the mean of the measured times

a₃ is the cost of a sequence beside its tokens: its attention over pages, sampling, and the host's
bookkeeping. a₄ and a₅ are the cost of a training window, which follows the requests' tokens. A
phase without parts in the profile takes half as long as backward. The fit is the least squares of
relative errors with no coefficient below 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import torch

from pcg.errors import CostModelError
from pcg.parallel.costs.step_costs import SequenceChunk, StepShape
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.engine.device.clock import Clock
from pcg.runtime.engine.device.device import Device, Launched, SideStream
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step import Load
from pcg.runtime.training.work_units import Forward, Part, Phase, Reading


@dataclass
class StepProfile:
    """The measured times of an engine's steps.

    Attributes:
        steps: the shape of each step, and its seconds without parts and updates.
        parts: the phase and the load of each group of parts, and its seconds.
        updates: the seconds of optimizers' updates.
    """

    steps: list[tuple[StepShape, float]] = field(default_factory=list)
    parts: list[tuple[Phase, Load, float]] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    def parts_of(self, phase: Phase) -> list[tuple[list[float], float]]:
        """Return the amounts and the seconds of the parts of a phase."""
        return [(_of_load(load), took) for of_phase, load, took in self.parts if of_phase is phase]

    def watch(self, engine: EngineLoop, job: Job) -> ProfiledDevice:
        """Measure what an engine's device and a job do from now on."""
        device = ProfiledDevice(engine.device, engine.clock, self)
        engine.device = engine.parts._device = device
        advance = job.advance

        def timed() -> None:
            is_update, started = isinstance(job.unit, Reading), engine.clock.now_s()
            advance()
            if is_update:
                took = engine.clock.now_s() - started
                self.updates.append(took)
                device.behind_s += took

        job.advance = timed  # type: ignore[method-assign]
        return device


class ProfiledDevice:
    """A device whose work is measured.

    Attributes:
        cache: the device's cache.
        side: None, so that each part is measured by itself.
        is_ahead: False, so that each step is.
        shape: the shape of the last step; None where it ran no tokens.
        behind_s: the seconds of the last step's parts and updates.
    """

    def __init__(self, device: Device, clock: Clock, profile: StepProfile) -> None:
        self.cache = device.cache
        self.side: SideStream | None = None
        self.shape: StepShape | None = None
        self.behind_s = 0.0
        self.open, self.evict, self.reset = device.open, device.evict, device.reset
        self.prefetch, self.is_copying = device.prefetch, device.is_copying
        self.copy_page = device.copy_page
        self.fails_alike, self.check_alive = device.fails_alike, device.check_alive
        self.is_ahead = False
        self._device = device
        self._clock = clock
        self._profile = profile

    @property
    def layers(self) -> int:
        return self._device.layers

    @property
    def late(self) -> Mapping[str, int]:
        return self._device.late

    @property
    def copies_bytes(self) -> int:
        return self._device.copies_bytes

    def step(self, engine: EngineLoop) -> int:
        """Run and measure a step of the engine; returns how many requests ended."""
        self.shape, self.behind_s = None, 0.0
        started = self._clock.now_s()
        ended = sum(chunk.completion is not None for chunk in engine.step())
        if self.shape is not None:
            took = self._clock.now_s() - started - self.behind_s
            self._profile.steps.append((self.shape, took))
        return ended

    def start(
        self, chunks: List[tuple[Sequence, int]], windows: List[tuple[Forward, int]]
    ) -> Launched:
        served = [SequenceChunk(n, s.cached, n == s.pending) for s, n in chunks]
        trained = [SequenceChunk(n, unit.context, False, True) for unit, n in windows]
        self.shape = StepShape.of([*served, *trained])
        return self._device.start(chunks, windows)

    def run_parts(self, parts: List[Part]) -> None:
        phase, load = parts[0].stage.phase, sum((part.load for part in parts), Load())
        started = self._clock.now_s()
        self._device.run_parts(parts)
        took = self._clock.now_s() - started
        self.behind_s += took
        self._profile.parts.append((phase, load, took))


class ProfiledCosts:
    """The costs of any step, predicted from a profile; see `StepCosts`.

    Args:
        profile: the measured times of similar steps.
        layers: the number of the model's layers.
    Raises:
        CostModelError: the profile has too few steps.
    """

    def __init__(self, profile: StepProfile, layers: int) -> None:
        backward = profile.parts_of(Phase.BACKWARD)
        if min(len(profile.steps), len(backward)) < 16 or not profile.updates:
            raise CostModelError(
                f"a profile of {len(profile.steps)} steps, {len(backward)} layers backward and "
                f"{len(profile.updates)} updates; profile at least 16, 16 and 1"
            )
        self.layers = layers
        self._step = _fitted([(_of_step(shape), took) for shape, took in profile.steps])
        self._backward = _fitted(backward)
        half = [part / 2 for part in self._backward]
        layer, loss = (profile.parts_of(phase) for phase in (Phase.FORWARD, Phase.LOSS))
        self._layer = _fitted(layer) if len(layer) >= 16 else half
        self._loss = _fitted(loss) if loss else half
        self._update_s = statistics.fmean(profile.updates)

    def latencies(self) -> Latencies:
        """Return the latencies that an engine first plans by: the same, with nothing free."""
        constant_s, token_s, key_s, sampled_s, window_s, trained_s = map(max, self._step, _LEAST_S)
        forward = Latency(constant_s, token_s, key_s, sampled_s, trained_s, window_s)
        backward, loss = (
            Latency(*map(max, part, _LEAST_S[:3])) for part in (self._backward, self._loss)
        )
        return Latencies(forward, backward, loss)

    def step_seconds(self, shape: StepShape) -> float:
        return _dot(self._step, _of_step(shape))

    def layer_seconds(self, layer: int, shape: StepShape) -> float:
        return _dot(self._layer, _of_load(Load(shape.tokens, shape.pairs)))

    def loss_seconds(self, tokens: int) -> float:
        return _dot(self._loss, _of_load(Load(tokens)))

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        return _dot(self._backward, _of_load(Load(shape.tokens, shape.pairs)))

    def update_seconds(self) -> float:
        return self._update_s

    def copy_seconds(self, size_bytes: int) -> float:
        """Return 0: an adapter on the host's device is not copied."""
        return 0.0


_LEAST_S = (1e-6, 1e-9, 1e-15, 1e-9, 1e-6, 1e-9)
"""The least of a step's coefficients, as corrections are relative to them."""


def _of_step(shape: StepShape) -> list[float]:
    of_window = [float(shape.trained > 0), float(shape.trained)]
    return [1.0, float(shape.tokens), float(shape.pairs), float(shape.sampled), *of_window]


def _of_load(load: Load) -> list[float]:
    return [1.0, float(load.tokens), float(load.keys)]


def _dot(coefficients: List[float], row: List[float]) -> float:
    return sum(a * x for a, x in zip(coefficients, row, strict=True))


def _fitted(observed: List[tuple[list[float], float]]) -> list[float]:
    """Return coefficients of at least 0 with the least relative errors."""
    took = torch.tensor([seconds for _, seconds in observed]).double().clamp(min=1e-9)
    rows = torch.tensor([row for row, _ in observed]).double() / took.unsqueeze(-1)
    used = [i for i in range(rows.shape[1]) if bool(rows[:, i].any())]
    while True:
        scales = rows[:, used].abs().amax(0)
        ones = torch.ones(len(observed), 1).double()
        solution = torch.linalg.lstsq(rows[:, used] / scales, ones, driver="gelsd").solution
        coefficients_used = (solution.squeeze(-1) / scales).tolist()
        if min(coefficients_used) >= 0:
            break
        used.pop(coefficients_used.index(min(coefficients_used)))
    coefficients = [0.0] * rows.shape[1]
    for place, value in zip(used, coefficients_used, strict=True):
        coefficients[place] = value
    return coefficients
