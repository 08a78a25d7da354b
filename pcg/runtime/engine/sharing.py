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

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from pcg.errors import FinetuneError
from pcg.runtime.engine.latency import Latencies
from pcg.runtime.engine.limits import Limits
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Forward


@dataclass
class Step:
    """A step, as a rule sees it.

    Attributes:
        limits: of any step.
        latencies: of work here; None where they are not known.
        promised_s: the least promised time a token; None where nothing is promised.
        slack_s: that the step may take before a promise is broken; it grows with steps that took
            less than was promised.
        load: of requests, and of the finetuning tokens that were added so far.
        is_served: whether requests are in it.
        is_awaited: whether a request waits for its first token.
        units: that went back, so far.
    """

    limits: Limits
    latencies: Latencies | None
    promised_s: float | None = None
    slack_s: float = math.inf
    load: Load = field(default_factory=Load)
    is_served: bool = False
    is_awaited: bool = False
    units: int = 0

    def most_seconds(self, burst: float = 1.0) -> float:
        """That a step may take whose requests have all the slack that they can use.

        So many promised times a token, and no longer than a request that comes may have to wait.
        """
        idle = self.limits.idle_step_s
        return idle if self.promised_s is None else burst * min(self.promised_s, idle)

    def seconds(self, burst: float = 1.0) -> float:
        """That the step may take: so long, and no longer than there is slack.

        While a request waits for its first token, one promised time at most.
        """
        return min(self.most_seconds(1.0 if self.is_awaited else burst), self.slack_s)


class Sharing(ABC):
    """Says what of finetuning goes into a step.

    Attributes:
        trains: whether finetuning comes to its end; a job waits forever otherwise.
        needs_latencies: whether it goes by how long work takes, promises or not.
        burst: promised times a token that a step may last where its requests have the slack.
    """

    trains = True
    needs_latencies = False
    burst = 1.0

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
    def backward(self, step: Step, load: Load, elapsed_s: float) -> bool:
        """Whether units of so much work run in the step, which began so long ago."""

    def ran(self, step: Step, seconds: float) -> None:  # noqa: B027
        """Hear of backward units that took so long."""


class CoServing(Sharing):
    """As much as fits within the promises: s = argmax f(c, s) ≤ SLO, and units in what is left.

    A window of s tokens takes C for itself, forward and in each layer's backward, and m a token:

        efficiency    e(s) = s · m / (C + s · m)

    A step that has room for s, where it would have room for S with all the slack that a step can
    use, takes a window where

        e(s) ≥ d · min(e(S), 0.93)

    and otherwise leaves it to the next ones, for which slack is saved. d falls from 0.99 with every
    step that takes none, so that windows come however small the rooms stay, and rises again with
    larger ones. What is left of a batch is split evenly over the windows that it needs.

    Attributes:
        burst: a step may last so many promised times a token where the slack of all its requests
            allows it, as those before took less, and none waits for its first token.
    """

    def __init__(self, burst: float = 4.0) -> None:
        """Save nothing yet.

        Args:
            burst: gaps between a request's tokens may get so many promised times long, while their
                mean stays within the promise; 1 keeps every step within it. What larger ones train
                more, and what they cost, is in docs/engine.md.
        Raises:
            FinetuneError: it is below 1.
        """
        if not burst >= 1:
            raise FinetuneError(f"burst={burst:g}; use at least 1 promised time a token")
        self.burst = burst
        self._demanded = _DEMANDED
        self._last = 0

    def forward(self, step: Step, unit: Forward) -> int:
        latencies = step.latencies
        if latencies is None:
            room = step.limits.tokens - step.load.tokens
            return room if step.is_served else unit.remaining
        there = self._window(step, unit, latencies, step.seconds(self.burst))
        if there < 1:
            # Longer than a step may take; where nothing is served, it would wait forever.
            is_alone = not step.is_served and not step.load.windows
            return min(unit.remaining, step.limits.least_chunk) if is_alone else 0
        most = self._window(step, unit, latencies, step.most_seconds(self.burst))
        enough = min(_efficiency(unit, latencies, most), _ENOUGH)
        of_most = _efficiency(unit, latencies, there) / enough
        if of_most < self._demanded:
            self._demanded *= _GROWING if there > self._last else _STILL
            self._last = there
            return 0
        self._demanded, self._last = min(_DEMANDED, _MORE * of_most), 0
        return there

    def _window(self, step: Step, unit: Forward, latencies: Latencies, seconds: float) -> int:
        """Tokens of a window in a step that may take so long, if the rest has windows like it."""
        room = step.limits.tokens - step.load.tokens
        load = step.load + Load(windows=1)
        fitting = latencies.forward.tokens_within(seconds, unit.context, load, is_trained=True)
        # One layer of the window has to fit into any step on its way back, too.
        back = latencies.backward.tokens_within(step.most_seconds() / 2, unit.context, Load())
        most = min(room, fitting, max(back, 1))
        return -(-unit.remaining // -(-unit.remaining // most)) if most > 0 else 0

    def backward(self, step: Step, load: Load, elapsed_s: float) -> bool:
        if step.latencies is None:
            return not step.is_served and not step.units
        left = step.seconds(self.burst) - elapsed_s
        is_first = not step.is_served and left > 0
        return is_first or step.latencies.backward.seconds(load) <= left


def _efficiency(unit: Forward, latencies: Latencies, tokens: int) -> float:
    """Of a window's time, forward and back, what its tokens take; the rest is its constant."""
    forward, backward, layers = latencies.forward, latencies.backward, unit.layers
    window, of_tokens = Load(windows=1), Load.of_window(tokens, unit.context)
    constant_s = forward.seconds(window) - forward.seconds(Load())
    constant_s += layers * backward.seconds(Load())
    tokens_s = forward.seconds(of_tokens) - forward.seconds(window)
    tokens_s += layers * (backward.seconds(of_tokens) - backward.seconds(Load()))
    return tokens_s / (constant_s + tokens_s) if tokens_s > 0 else 1.0


_ENOUGH = 0.93
"""Efficiency of a window that no larger one is waited for; what is left to gain is little."""
_DEMANDED = 0.99
"""Of the efficiency of the largest window, that one has at least, while steps may offer it."""
_GROWING, _STILL = 0.995, 0.95
"""Of what is demanded, after a step with no window, with more room than the last or not."""
_MORE = 1.1
"""Of what a window had, demanded of the next."""


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
        return 0 if step.is_served or step.load.windows else unit.remaining

    def backward(self, step: Step, load: Load, elapsed_s: float) -> bool:
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
        super().__init__(burst=1.0)
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
            before_s + self._earned_s, unit.context, step.load + Load(windows=1), is_trained=True
        )
        least = min(step.limits.least_chunk, unit.remaining)
        back = latencies.backward.tokens_within(self._step_s, unit.context, Load())
        room = step.limits.tokens - step.load.tokens
        tokens = min(room, fitting, max(back, least), unit.remaining)
        if tokens < least:
            return 0
        after_s = latencies.forward.seconds(step.load + Load.of_window(tokens, unit.context))
        self._earned_s -= after_s - before_s
        return tokens

    def backward(self, step: Step, load: Load, elapsed_s: float) -> bool:
        if not step.is_served:
            return super().backward(step, load, elapsed_s)
        assert step.latencies is not None
        return step.latencies.backward.seconds(load) <= self._earned_s

    def ran(self, step: Step, seconds: float) -> None:
        if step.is_served:
            self._earned_s -= seconds


class InferenceOnly(Sharing):
    """Nothing: jobs wait."""

    trains = False

    def forward(self, step: Step, unit: Forward) -> int:
        return 0

    def backward(self, step: Step, load: Load, elapsed_s: float) -> bool:
        return False
