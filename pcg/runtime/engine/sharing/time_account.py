"""A time account: what finetuning has earned where nothing is promised."""

from __future__ import annotations

from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Forward


class TimeAccount:
    """Time that finetuning has earned beside requests, and not yet used.

    Steps whose requests take t seconds earn share / (1 - share) · t; a window or a unit runs once
    its seconds are earned. It holds no more than an idle step may last, or what waits for it takes.
    A step spends no more than it earns, but on one unit: what was saved is no reason for a long
    step.
    """

    def __init__(self) -> None:
        self._earned_s = 0.0
        self._step_s = 0.0
        self._spent_s = 0.0
        self._wanted_s = 0.0

    def begin(self, step: Step, share: float | None) -> None:
        """Earn by what a step serves; where there is no share, time is neither owed nor earned."""
        if share is None or step.latencies is None:
            self._earned_s = 0.0
            return
        self._step_s = share / (1 - share) * step.latencies.forward.seconds(step.load)
        most_s = max(step.limits.idle_step_s, self._wanted_s)
        self._earned_s = min(self._earned_s + self._step_s, most_s)
        self._wanted_s = self._spent_s = 0.0

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
        if not self._has_time(price_s):
            return 0
        self.spend(price_s)
        return tokens

    def affords(self, seconds: float) -> bool:
        """Return True if so much is earned."""
        self._wanted_s = max(self._wanted_s, seconds)
        return seconds <= self._earned_s and self._has_time(seconds)

    def _has_time(self, seconds: float) -> bool:
        return not self._spent_s or self._spent_s + seconds <= self._step_s

    def paid_tokens(self, latency: Latency) -> int:
        """Return the tokens of a part that are earned, at least one."""
        return max(1, latency.tokens_within(self._earned_s, 0, Load()))

    def spend(self, seconds: float) -> None:
        self._earned_s -= seconds
        self._spent_s += seconds
