"""A time account: what finetuning has earned where nothing is promised."""

from __future__ import annotations

from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Forward


class TimeAccount:
    """Time that finetuning has earned beside requests, and not yet used.

    Steps whose requests take t seconds earn share / (1 - share) · t; a part runs once its seconds
    are earned. It holds no more than an idle step may last, or what waits for it takes. A step
    spends no more than it earns, whatever was saved, but on one part of `least_chunk` tokens:
    every gap is so bounded by the share, and not their mean alone. Windows are so short that a
    layer of them takes a part of what a step earns in which requests only decode; they go forward
    in layers, or whole where a step has time for that.

    Attributes:
        has_share: True in a step in which finetuning has a share.
    """

    def __init__(self) -> None:
        self.has_share = False
        self._earned_s = 0.0
        self._step_s = 0.0
        self._decode_s: float | None = None
        self._spent_s = 0.0
        self._wanted_s = 0.0

    def begin(self, step: Step, share: float | None) -> None:
        """Earn by what a step serves; where there is no share, time is neither owed nor earned."""
        self.has_share = share is not None
        if share is None or step.latencies is None:
            self._earned_s = 0.0
            return
        earns = share / (1 - share)
        self._step_s = earns * step.latencies.forward.seconds(step.load)
        if step.decoded.tokens:
            self._decode_s = earns * step.latencies.forward.seconds(step.decoded)
        most_s = max(step.limits.idle_step_s, self._wanted_s)
        self._earned_s = min(self._earned_s + self._step_s, most_s)
        self._wanted_s = self._spent_s = 0.0

    def window(self, step: Step, unit: Forward, latencies: Latencies) -> int:
        """Return the tokens of a window, which goes forward and back in layers."""
        part_s = _SURE * (self._step_s if self._decode_s is None else self._decode_s)
        fitting = min(
            latency.tokens_within(part_s, unit.context, Load())
            for latency in (latencies.layer, latencies.backward)
        )
        return min(unit.remaining, step.limits.tokens, max(fitting, step.limits.least_chunk))

    def whole(self, step: Step, unit: Forward, latencies: Latencies) -> int:
        """Return the tokens of a window that goes forward whole, by the products of what is served.

        It is 0 where the step has time for less than half of one that goes in layers.
        """
        forward, window = latencies.forward, self.window(step, unit, latencies)
        seconds = forward.seconds(step.load) + self._step_s - self._spent_s
        beside = step.load + Load(windows=1)
        fitting = forward.tokens_within(seconds, unit.context, beside, is_trained=True)
        tokens = min(window, fitting, step.limits.tokens - step.load.tokens)
        least = min(step.limits.least_chunk, unit.remaining)
        return tokens if tokens >= max(least, window / 2) else 0

    def paid_whole(self, step: Step, unit: Forward, latencies: Latencies) -> int:
        """Return the tokens of such a window if they are earned, and pay them as predicted."""
        tokens, forward = self.whole(step, unit, latencies), latencies.forward
        load = step.load + Load.of_window(tokens, unit.context)
        price_s = forward.seconds(load) - forward.seconds(step.load)
        self._wanted_s = max(self._wanted_s, price_s)
        if not tokens or price_s > self._earned_s:
            return 0
        self.spend(price_s)
        return tokens

    def affords(self, seconds: float, least_s: float) -> bool:
        """Return True if so much is earned, and the step has time for it.

        Args:
            least_s: the time of a part of `least_chunk` tokens.
        """
        self._wanted_s = max(self._wanted_s, seconds)
        most_s = max(_OVER * self._step_s - self._spent_s, 0.0 if self._spent_s else least_s)
        return seconds <= min(self._earned_s, most_s)

    def paid(self, latency: Latency) -> int:
        """Return the tokens of a part that are earned and that the step has time for."""
        left_s = min(self._earned_s, self._step_s - self._spent_s)
        return latency.tokens_within(left_s, 0, Load())

    def spend(self, seconds: float) -> None:
        self._earned_s -= seconds
        self._spent_s += seconds

    def correct(self, seconds: float) -> None:
        """Note that a step before spent so much more than it said."""
        self._earned_s -= seconds


_SURE, _OVER = 0.4, 1.25
"""What a layer of a window takes at most by its first prediction, and in the step in which it runs,
relative to what the step earns: predictions change meanwhile, and so do batches."""
