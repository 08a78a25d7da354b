"""How serving and finetuning share the device: what of finetuning goes into a step.

    CoServing         as much as fits beside the step's requests within their promises
    TemporalSharing   nothing for n steps, then one whole mini-batch and no requests
    SpatialSharing    a fixed part of the time, whatever was promised
    InferenceOnly     nothing

The first is the engine's own; the others are what it is compared with. While nothing is served all
but the last train: nothing is gained by leaving the device idle.

Source: FlexLLM v2 §6.2 for the first, §2 and §8.2 (figure 11) for the second and third. There the
two run at once on parts of a GPU; here a part of each step's time stands for a part of the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pcg.errors import FinetuneError
from pcg.runtime.engine.latency import Load
from pcg.runtime.engine.units import Backward, Forward

if TYPE_CHECKING:
    from pcg.runtime.engine.engine import Latencies
    from pcg.runtime.engine.scheduler import Limits


@dataclass
class Step:
    """A step, as a rule sees it.

    Attributes:
        limits: of any step.
        latencies: of work here; None where they are not known.
        seconds: that it may take before a promise is broken; None where nothing is promised.
        load: of requests, and of the finetuning tokens that were added so far.
        is_served: whether requests are in it.
        windows: of finetuning, so far.
        units: that went back, so far.
    """

    limits: Limits
    latencies: Latencies | None
    seconds: float | None
    load: Load = field(default_factory=Load)
    is_served: bool = False
    windows: int = 0
    units: int = 0

    @property
    def most_seconds(self) -> float:
        """That the step may take: what is promised, and what one that comes may have to wait."""
        idle = self.limits.idle_step_s
        return idle if self.seconds is None else min(self.seconds, idle)


class Sharing(ABC):
    """Says what of finetuning goes into a step.

    Attributes:
        trains: whether finetuning comes to its end; a job waits forever otherwise.
        needs_latencies: whether it goes by how long work takes, promises or not.
    """

    trains = True
    needs_latencies = False

    def serves(self, has_work: bool) -> bool:
        """Whether the next step may serve requests.

        Args:
            has_work: whether a job has something to run.
        """
        return True

    def begin(self, step: Step) -> None:  # noqa: B027 (nothing follows from it for most)
        """Hear of a step before any finetuning is in it."""

    @abstractmethod
    def forward(self, step: Step, unit: Forward) -> int:
        """The most tokens of a job that go forward in the step."""

    @abstractmethod
    def backward(self, step: Step, unit: Backward, elapsed_s: float) -> bool:
        """Whether a job's unit runs in the step, which began so long ago."""

    def ran(self, step: Step, seconds: float) -> None:  # noqa: B027
        """Hear of a backward unit that took so long."""


class CoServing(Sharing):
    """As much as fits within the promises: s = argmax f(c, s) ≤ SLO, and units in what is left."""

    def forward(self, step: Step, unit: Forward) -> int:
        room = step.limits.tokens - step.load.tokens
        if step.latencies is None:
            return room if step.is_served else unit.remaining
        seconds = step.most_seconds
        fitting = step.latencies.forward.tokens_within(seconds, unit.context, step.load)
        # One layer of the window has to fit into a step on its way back, too.
        back = step.latencies.backward.tokens_within(seconds / 2, unit.context, Load())
        return min(room, fitting, max(back, 1))

    def backward(self, step: Step, unit: Backward, elapsed_s: float) -> bool:
        if step.latencies is None:
            return not step.is_served and not step.units
        left = step.most_seconds - elapsed_s
        is_first = not step.is_served and left > 0
        return is_first or step.latencies.backward.seconds(unit.load) <= left


class TemporalSharing(Sharing):
    """After so many steps that serve comes one that takes a mini-batch forward and all the way.

    Attributes:
        frequency: n, steps that serve between two that train; FlexLLM v2 figure 11 has 64 to 512.
    """

    def __init__(self, frequency: int = 128) -> None:
        if frequency < 1:
            raise FinetuneError(f"frequency={frequency}; use at least 1 step that serves")
        self.frequency = frequency
        self._served = 0

    def serves(self, has_work: bool) -> bool:
        return not has_work or self._served < self.frequency

    def begin(self, step: Step) -> None:
        self._served = self._served + 1 if step.is_served else 0

    def forward(self, step: Step, unit: Forward) -> int:
        return 0 if step.is_served or step.windows else unit.remaining

    def backward(self, step: Step, unit: Backward, elapsed_s: float) -> bool:
        return not step.is_served


class SpatialSharing(CoServing):
    """A fixed part of the time of steps that serve, whatever was promised.

    Steps whose requests take t seconds earn share / (1 - share) · t for finetuning; a unit runs
    once its seconds are earned.

    Attributes:
        share: of the time, that finetuning gets; above 0 and below 1.
    """

    needs_latencies = True

    def __init__(self, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise FinetuneError(f"share={share:g}; use a part above 0 and below 1")
        self.share = share
        self._earned_s = 0.0
        self._step_s = 0.0

    def begin(self, step: Step) -> None:
        if step.latencies is None:
            raise FinetuneError(
                "spatial sharing gives finetuning a part of the time, and the engine has no "
                "latencies; call its calibrate() before the first step"
            )
        self._step_s = 0.0
        if step.is_served:
            served_s = step.latencies.forward.seconds(step.load)
            self._step_s = self.share / (1 - self.share) * served_s
        # While nothing is served finetuning has all; nothing is owed for it, and nothing saved up.
        self._earned_s = self._earned_s + self._step_s if step.is_served else 0.0

    def forward(self, step: Step, unit: Forward) -> int:
        if not step.is_served:
            return super().forward(step, unit)
        latencies = step.latencies
        assert latencies is not None
        before_s = latencies.forward.seconds(step.load)
        fitting = latencies.forward.tokens_within(
            before_s + self._earned_s, unit.context, step.load
        )
        least = min(step.limits.least_chunk, unit.remaining)
        back = latencies.backward.tokens_within(self._step_s, unit.context, Load())
        room = step.limits.tokens - step.load.tokens
        tokens = min(room, fitting, max(back, least), unit.remaining)
        if tokens < least:
            return 0
        after_s = latencies.forward.seconds(step.load + Load.of(tokens, unit.context))
        self._earned_s -= after_s - before_s
        return tokens

    def backward(self, step: Step, unit: Backward, elapsed_s: float) -> bool:
        if not step.is_served:
            return super().backward(step, unit, elapsed_s)
        assert step.latencies is not None
        return step.latencies.backward.seconds(unit.load) <= self._earned_s

    def ran(self, step: Step, seconds: float) -> None:
        if step.is_served:
            self._earned_s -= seconds


class InferenceOnly(Sharing):
    """Nothing: jobs wait."""

    trains = False

    def forward(self, step: Step, unit: Forward) -> int:
        return 0

    def backward(self, step: Step, unit: Backward, elapsed_s: float) -> bool:
        return False
