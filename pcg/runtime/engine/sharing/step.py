"""A step of the engine, as the rules of sharing see it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.limits import Limits
from pcg.runtime.model.load import Load
from pcg.runtime.requests.step_plan import StepPlan
from pcg.runtime.training.work_units import Phase


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
        spent_s: the time that what ran in it took.
        trained_s: the part of it that finetuning took, as far as predictions tell.
        served: the load of what is served.
        awaited: tells if somebody waits for its end; None where it serves something.
        is_under_way: True while it runs on the device and others are planned.
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
    spent_s: float = 0.0
    trained_s: float = 0.0
    served: Load = field(default_factory=Load)
    awaited: Callable[[], bool] | None = None
    is_under_way: bool = False

    @property
    def yields(self) -> bool:
        """True if it serves nothing, and ends between two parts when a request comes."""
        return self.awaited is not None

    @property
    def is_over(self) -> bool:
        """True if it has run a part, and somebody waits."""
        return self.awaited is not None and self.units > 0 and self.awaited()

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        limits: Limits,
        latencies: Latencies | None,
        awaited: Callable[[], bool] | None = None,
    ) -> Step:
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
            served=plan.load,
            awaited=None if plan.chunks else awaited,
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

    def ran_forward(self, took_s: float, is_replayed: bool) -> None:
        """Learn from the time of its forward, all of which graphs ran or not."""
        self.spent_s += took_s
        if self.load.windows and self.latencies is not None:
            served_s = self.latencies.forward.seconds(self.served) if self.is_served else 0.0
            self.trained_s += max(0.0, took_s - served_s)
        if self.latencies is not None:
            self._learn(self.latencies.forward, self.load, self.decoded, took_s)
            self.latencies.forward.observe(self.load, took_s, is_replayed)

    def ran_parts(self, phase: Phase, load: Load, took_s: float, with_update_s: float) -> None:
        """Learn from the time of parts of jobs, without and with what followed from them."""
        self.spent_s += with_update_s
        self.trained_s += with_update_s
        if self.latencies is not None:
            latency = self.latencies.of(phase)
            self._learn(latency, load, Load(), with_update_s)
            latency.observe(load, took_s)

    def _learn(self, latency: Latency, load: Load, decoded: Load, took_s: float) -> None:
        """Learn margins where something is promised: steps without a promise may be far longer."""
        if self.gap_s < math.inf and self.latencies is not None:
            lost_s = self.gap_s - self.latencies.forward.seconds(self.decoded)
            latency.learn_margin(load, decoded, took_s, lost_s)
