"""Sharing: how much finetuning goes into each step beside serving.

    CoServing         as much as fits beside the step's requests within their SLOs; a share of the
                      time beside requests without
    TemporalSharing   nothing for n steps, then one whole mini-batch and no requests
    SpatialSharing    a fixed share of the time, whatever the SLOs
    InferenceOnly     nothing

The first is the engine's own; the others are what it is compared with. While nothing is served, all
but the last train: nothing is gained by leaving the device idle.

Source: FlexLLM v2 §6.2 for the first, §2 and §8.2 (figure 11) for the second and third. There the
two run at once on parts of a GPU; here a share of each step's time stands for a part of the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from pcg.errors import FinetuneError
from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.limits import Limits
from pcg.runtime.model.load import Load
from pcg.runtime.model.margins import kind_of
from pcg.runtime.requests.step_plan import StepPlan
from pcg.runtime.training.work_units import Forward


@dataclass
class Step:
    """A step, as the rules of sharing see it.

    Attributes:
        tpot_slo_s: the least SLO per token of the requests that it serves; None if none has any.
        gap_s: time, from its beginning, until the first gap between tokens exceeds its SLO.
        slack_s: time until the first mean of a request's gaps does.
        decoded: the load of the requests that decode in it.
        load: what goes forward in it so far.
        elapsed_s: the time since it began.
    """

    limits: Limits
    latencies: Latencies | None
    tpot_slo_s: float | None = None
    gap_s: float = math.inf
    slack_s: float = math.inf
    decoded: Load = field(default_factory=Load)
    load: Load = field(default_factory=Load)
    is_served: bool = False
    awaits_first_token: bool = False
    units: int = 0
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, plan: StepPlan, limits: Limits, latencies: Latencies | None) -> Step:
        """Return a step that serves what is planned."""
        return cls(
            limits,
            latencies,
            plan.tpot_slo_s,
            plan.gap_s,
            plan.slack_s,
            plan.decoded,
            plan.load,
            is_served=bool(plan.chunks),
            awaits_first_token=plan.awaits_first_token,
        )

    def most_seconds(self, burst: float = 1.0) -> float:
        """Return the most time that a step may take if it begins with a token of each request.

        That is `burst` times the TPOT SLO, and no longer than a new request may have to wait.
        """
        idle = self.limits.idle_step_s
        return idle if self.tpot_slo_s is None else burst * min(self.tpot_slo_s, idle)

    def left_s(self, burst: float = 1.0) -> float:
        """Return the time that is left until the step has to end.

        While a request waits for its first token, no gap gets longer than its SLO.
        """
        burst = 1.0 if self.awaits_first_token else burst
        most_s = min(self.most_seconds(burst), self.gap_s + (burst - 1) * (self.tpot_slo_s or 0.0))
        return (most_s if burst == 1 else min(most_s, self.slack_s)) - self.elapsed_s

    def ahead_s(self) -> float:
        """Return how long what it serves takes at most."""
        if self.latencies is None or not self.load.tokens:
            return 0.0
        return self.latencies.forward.bound_s(self.load, self.decoded)

    def ran_forward(self, took_s: float) -> None:
        """Learn from the time of its forward."""
        if self.latencies is not None:
            self._learn(self.latencies.forward, self.load, self.decoded, took_s)
            self.latencies.forward.observe(self.load, took_s)

    def ran_units(self, load: Load, took_s: float, with_update_s: float) -> None:
        """Learn from the time of backward units, without and with what followed from them."""
        if self.latencies is not None:
            self._learn(self.latencies.backward, load, Load(), with_update_s)
            self.latencies.backward.observe(load, took_s)

    def _learn(self, latency: Latency, load: Load, decoded: Load, took_s: float) -> None:
        """Learn margins where something is promised: steps without a promise may be far longer."""
        if self.gap_s < math.inf and self.latencies is not None:
            lost_s = self.gap_s - self.latencies.forward.seconds(self.decoded)
            latency.learn_margin(load, decoded, took_s, lost_s)


class Sharing(ABC):
    """Decides how much finetuning goes into a step.

    Attributes:
        trains: True if jobs come to their ends; otherwise they wait forever.
        burst: how many times its TPOT SLO a step may last if its requests have the slack.
    """

    trains = True
    burst = 1.0

    def serves(self, has_work: bool) -> bool:
        """Return True if the next step may serve requests; `has_work` tells if a job could run."""
        return True

    def begin(self, step: Step) -> None:  # noqa: B027 (most rules do nothing)
        """Note a step before any finetuning is in it."""

    @abstractmethod
    def forward(self, step: Step, unit: Forward) -> int:
        """Return the most tokens of a job that go forward in the step."""

    @abstractmethod
    def backward(self, step: Step, load: Load, ahead_s: float) -> bool:
        """Return True if backward units of this load run before what takes `ahead_s` more."""

    def ran(self, step: Step, seconds: float) -> None:  # noqa: B027
        """Note the time of backward units."""


class CoServing(Sharing):
    """Fits as much as the SLOs allow: s = argmax f(c, s) ≤ SLO, and units in the remaining time.

    A window of s tokens takes C for itself, forward and in each layer's backward, and m a token:

        efficiency    e(s) = s · m / (C + s · m)

    A step with room for s, which would have room for S with all the time that a step can have,
    runs a window if

        e(s) ≥ d · min(e(S), 0.93)

    and otherwise leaves the room to later steps. The demand d falls from 0.99 with every step
    without a window, so that windows come however small the rooms stay, and rises again with larger
    ones. The rest of a batch is split evenly over the windows that it needs.

    Args:
        burst: how many times the TPOT SLO a gap between a request's tokens may last; 1 bounds every
            gap by the SLO, and more bounds the mean of a request's gaps. docs/engine.md shows what
            that gains and costs.

    Raises:
        FinetuneError: burst is below 1.
    """

    def __init__(self, burst: float = 1.0) -> None:
        if not burst >= 1:
            raise FinetuneError(f"burst={burst:g}; use at least 1, the TPOT SLO itself")
        self.burst = burst
        self._demand = _DEMAND
        self._last = 0
        self._room_s: float | None = None
        self._account = TimeAccount()

    def _share_of(self, step: Step) -> float | None:
        """Return the share of the time that finetuning has; None where it has what is left."""
        is_free = step.is_served and step.tpot_slo_s is None
        return step.limits.finetuning_share if is_free else None

    def begin(self, step: Step) -> None:
        self._account.begin(step, self._share_of(step))
        if step.latencies is None or step.gap_s == math.inf:
            return
        step.latencies.pass_step()
        room_s = step.left_s(self.burst) - step.ahead_s()
        if room_s > 0:
            before_s = room_s if self._room_s is None else self._room_s
            self._room_s = before_s + _SMOOTHING * (room_s - before_s)

    def forward(self, step: Step, unit: Forward) -> int:
        latencies = step.latencies
        if latencies is None:
            # The first step that serves tells how long steps take.
            return 0 if step.is_served else unit.remaining
        if self._share_of(step) is not None:
            return self._account.tokens(step, unit, latencies)
        there = self._window(step, unit, latencies, step.left_s(self.burst))
        if there < 1:
            # Even the least window takes longer than a step may; alone, it runs all the same.
            is_alone = not step.is_served and not step.load.windows
            return min(unit.remaining, step.limits.least_chunk) if is_alone else 0
        most = self._window(step, unit, latencies, step.most_seconds(self.burst))
        enough = min(_efficiency(unit, latencies, most), _ENOUGH)
        of_most = _efficiency(unit, latencies, there) / enough
        if of_most < self._demand:
            self._demand *= _DECAY_GROWING if there > self._last else _DECAY
            self._last = there
            return 0
        self._demand, self._last = min(_DEMAND, _RISE * of_most), 0
        return there

    def _window(self, step: Step, unit: Forward, latencies: Latencies, seconds: float) -> int:
        """Return the tokens of a window that fits into `seconds`, in an even split of the rest."""
        room = step.limits.tokens - step.load.tokens
        load = step.load + Load(windows=1)
        seconds = latencies.forward.most_s(seconds, step.decoded, kind_of(load, step.decoded))
        fitting = latencies.forward.tokens_within(seconds, unit.context, load, is_trained=True)
        # One layer of the window's backward must fit into any step, too.
        back_s = step.most_seconds() / 2
        room_s, tpot_slo_s = self._room_s, step.limits.tpot_slo_s
        if room_s is None and tpot_slo_s is not None:
            room_s = tpot_slo_s - latencies.forward.bound_s(Load(1, sampled=1))
        if room_s is not None:
            back_s = min(back_s, _UNIT * room_s)
        back = latencies.backward.tokens_within(back_s, unit.context, Load())
        most = min(room, fitting, max(back, 1))
        return -(-unit.remaining // -(-unit.remaining // most)) if most > 0 else 0

    def backward(self, step: Step, load: Load, ahead_s: float) -> bool:
        if step.latencies is None:
            return not step.is_served and not step.units
        if self._share_of(step) is not None:
            return self._account.affords(step.latencies.backward.seconds(load))
        left_s = step.left_s(self.burst) - ahead_s
        is_first = not step.is_served and left_s > 0
        return is_first or step.latencies.backward.bound_s(load) <= left_s

    def ran(self, step: Step, seconds: float) -> None:
        if self._share_of(step) is not None:
            self._account.spend(seconds)


def _efficiency(unit: Forward, latencies: Latencies, tokens: int) -> float:
    """Return the share of a window's time, forward and backward, that its tokens take."""
    forward, backward, layers = latencies.forward, latencies.backward, unit.layers
    window, of_tokens = Load(windows=1), Load.of_window(tokens, unit.context)
    constant_s = forward.seconds(window) - forward.seconds(Load())
    constant_s += layers * backward.seconds(Load())
    tokens_s = forward.seconds(of_tokens) - forward.seconds(window)
    tokens_s += layers * (backward.seconds(of_tokens) - backward.seconds(Load()))
    return tokens_s / (constant_s + tokens_s) if tokens_s > 0 else 1.0


_UNIT = 0.5
"""The most that a backward unit takes of the time that steps leave: two fit, also into smaller."""
_SMOOTHING = 0.05
"""The weight of the last step in the time that steps leave."""
_ENOUGH = 0.93
"""The efficiency above which no larger window is waited for: little is left to gain."""
_DEMAND = 0.99
"""The first demand, as a share of the efficiency of the largest window."""
_DECAY_GROWING, _DECAY = 0.995, 0.95
"""Decay of the demand after a step without a window, with more room than the last one or not."""
_RISE = 1.1
"""The next window must reach 1.1 times this one's efficiency."""


class TimeAccount:
    """Time that finetuning has earned beside requests, and not yet used.

    Steps whose requests take t seconds earn share / (1 - share) · t; a window or a unit runs once
    its seconds are earned. It holds no more than an idle step may last, or what waits for it takes.
    """

    def __init__(self) -> None:
        self._earned_s = 0.0
        self._step_s = 0.0
        self._wanted_s = 0.0

    def begin(self, step: Step, share: float | None) -> None:
        """Earn by what a step serves; where there is no share, time is neither owed nor earned."""
        if share is None or step.latencies is None:
            self._earned_s = 0.0
            return
        self._step_s = share / (1 - share) * step.latencies.forward.seconds(step.load)
        most_s = max(step.limits.idle_step_s, self._wanted_s)
        self._earned_s = min(self._earned_s + self._step_s, most_s)
        self._wanted_s = 0.0

    def tokens(self, step: Step, unit: Forward, latencies: Latencies) -> int:
        """Return the tokens of a window that can be paid, and pay them by their predicted time."""
        forward = latencies.forward
        before_s = forward.seconds(step.load)
        window = step.load + Load(windows=1)
        fitting = forward.tokens_within(
            before_s + self._earned_s, unit.context, window, is_trained=True
        )
        least = min(step.limits.least_chunk, unit.remaining)
        back = latencies.backward.tokens_within(self._step_s, unit.context, Load())
        room = step.limits.tokens - step.load.tokens
        tokens = min(room, fitting, max(back, least), unit.remaining)
        paid = step.load + Load.of_window(max(tokens, least), unit.context)
        price_s = forward.seconds(paid) - before_s
        if tokens < least or room < least:
            self._wanted_s = max(self._wanted_s, price_s)
            return 0
        self._earned_s -= price_s
        return tokens

    def affords(self, seconds: float) -> bool:
        """Return True if so much is earned."""
        self._wanted_s = max(self._wanted_s, seconds)
        return seconds <= self._earned_s

    def spend(self, seconds: float) -> None:
        self._earned_s -= seconds


class TemporalSharing(Sharing):
    """Alternates steps that serve with steps that run a whole mini-batch, forward and backward.

    `frequency` serving steps lie between two that train; FlexLLM v2 figure 11 has 64 to 512.
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

    def backward(self, step: Step, load: Load, ahead_s: float) -> bool:
        return not step.is_served


class SpatialSharing(CoServing):
    """Gives finetuning a fixed share of the time of steps that serve, whatever the SLOs."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise FinetuneError(f"share={share:g}; use a part above 0 and below 1")
        self.share = share

    def _share_of(self, step: Step) -> float | None:
        return self.share if step.is_served else None


class InferenceOnly(Sharing):
    """Runs no finetuning: jobs wait."""

    trains = False

    def forward(self, step: Step, unit: Forward) -> int:
        return 0

    def backward(self, step: Step, load: Load, ahead_s: float) -> bool:
        return False
