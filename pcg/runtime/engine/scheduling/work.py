"""The work of a step, and the rule that decides how much finetuning goes into it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pcg.runtime.admission.latency import Latencies
from pcg.runtime.admission.limits import Limits
from pcg.runtime.requests.step import Load, Plan
from pcg.runtime.training.work_units import Forward, Part, Phase


class Refusal(NamedTuple):
    """The reason why a step ran nothing of a job.

    Attributes:
        tokens: tokens of the piece of work that did not fit.
        phase: phase of the piece; None for a window that goes forward whole.
        takes_s: predicted time of the piece.
        left_s: time that the step had left.
    """

    tokens: int
    phase: Phase | None
    takes_s: float
    left_s: float

    def described(self, limits: Limits) -> str:
        """Return the reason as text."""
        window = f"a window of {self.tokens} tokens"
        piece = window if self.phase is None else f"a layer of {window}"
        if self.phase is Phase.LOSS:
            piece = f"the loss of {self.tokens} tokens"
        bound = f"finetuning_floor={limits.finetuning_floor:g}"
        if limits.tpot_slo_s is not None:
            bound = f"tpot_slo_s={limits.tpot_slo_s:g}"
        left_s = max(self.left_s, 0.0)
        return f"no room within {bound}: {piece} takes {self.takes_s:.3g} s, {left_s:.3g} s is left"


_NOTHING = Load()


@dataclass
class Work:
    """The work of a step: requests, and the finetuning that the rule of sharing adds.

    Attributes:
        gap_s: time from the beginning of the step until the first gap between two tokens of a
            request exceeds its SLO, seconds; infinite without an SLO.
        decoded: the load of the requests that decode.
        served: the load of all requests that the step serves.
        load: the load of the forward so far: `served` and windows of jobs.
        refusal: the latest piece of a job that did not fit.
        began_s: when the step was planned, on the engine's clock.
        elapsed_s: time since the step began.
        lasted_s: time from the beginning of the step until its tokens were read.
        spent_s: time used by the forward and the parts.
        trained_s: the predicted part of `spent_s` that finetuning used.
        units: number of parts that ran.
        has_exception: True if a part exceeded the room of the step or had a new size, so that the
            time of the step predicts nothing.
        awaited: returns True once a request waits for the end of the step; None if the step serves
            requests itself.
        is_beside: True if parts of jobs run on a second stream during the forward.
        is_under_way: True while the step runs on the device during the planning of later steps.
    """

    limits: Limits
    latencies: Latencies | None
    gap_s: float = math.inf
    decoded: Load = _NOTHING
    served: Load = _NOTHING
    load: Load = _NOTHING
    is_served: bool = False
    units: int = 0
    has_exception: bool = False
    refusal: Refusal | None = None
    began_s: float = 0.0
    elapsed_s: float = 0.0
    lasted_s: float = 0.0
    spent_s: float = 0.0
    trained_s: float = 0.0
    awaited: Callable[[], bool] | None = None
    is_beside: bool = False
    is_under_way: bool = False

    @property
    def yields(self) -> bool:
        """True if the step serves nothing and ends between two parts when a request arrives."""
        return self.awaited is not None

    @property
    def is_over(self) -> bool:
        """True if the step has run a part and a request waits."""
        return self.awaited is not None and self.units > 0 and self.awaited()

    @property
    def is_promised(self) -> bool:
        """True if the step serves a request that has an SLO for its gaps."""
        return self.is_served and self.gap_s < math.inf

    @classmethod
    def of(cls, plan: Plan, limits: Limits, latencies: Latencies | None, now_s: float) -> Work:
        """Return the work of a step that serves a plan."""
        load = plan.load
        return cls(
            limits,
            latencies,
            gap_s=plan.gap_s,
            decoded=plan.decoded,
            served=load,
            load=load,
            is_served=bool(plan.chunks),
            began_s=now_s,
        )

    def ahead_s(self) -> float:
        """Return the predicted time of the forward."""
        return self._forward_s(self.load)

    def served_s(self) -> float:
        """Return the predicted time of the requests."""
        return self._forward_s(self.served)

    def _forward_s(self, load: Load) -> float:
        if self.latencies is None or not load.tokens:
            return 0.0
        return self.latencies.forward.seconds(load)

    def ran_forward(self, took_s: float, is_replayed: bool) -> None:
        """Learn from the time of the forward; `is_replayed` if graphs ran all of it."""
        self.spent_s += took_s
        if self.latencies is None:
            return
        if self.load.windows:
            self.trained_s += max(0.0, took_s - self.served_s())
            whole = self.load.trained // self.load.windows
            self.latencies.longest = max(self.latencies.longest, whole)
        self.latencies.forward.observe(self.load, took_s, is_replayed)

    def ran_parts(self, phase: Phase, load: Load, took_s: float) -> None:
        """Learn from the time of parts of jobs, including their updates."""
        self.spent_s += took_s
        self.trained_s += took_s
        if self.latencies is None:
            return
        latency = self.latencies.of(phase)
        if phase is not Phase.LOSS:
            self.latencies.longest = max(self.latencies.longest, load.tokens)
        if load.tokens in latency.known:
            latency.observe(load, took_s)
        else:
            latency.known.add(load.tokens)
            self.has_exception = True


class Sharing(ABC):
    """Decides how much finetuning goes into a step.

    `is_due` is True for a job that found no room for a long time; its smallest piece of work may
    then exceed the room.

    Attributes:
        trains: False if jobs wait forever.
    """

    trains = True

    def serves(self, has_work: bool) -> bool:
        """Return True if the next step may serve requests; `has_work`: a job could run."""
        return True

    def begin(self, work: Work) -> None:  # noqa: B027 (most rules do nothing)
        """Prepare for a step before any finetuning is in it."""

    @abstractmethod
    def forward(self, work: Work, unit: Forward) -> int:
        """Return the maximum number of a job's tokens to run forward through all layers."""

    def in_layers(self, work: Work, unit: Forward, ahead_s: float, *, is_due: bool) -> int:
        """Return the tokens of a new window that runs forward in parts of a layer."""
        return 0

    @abstractmethod
    def fits(
        self, work: Work, phase: Phase, load: Load, ahead_s: float, *, is_due: bool = False
    ) -> bool:
        """Return True if parts of this load run before work that takes `ahead_s` more."""

    def part(self, work: Work, part: Part, beside: Load, ahead_s: float, *, is_due: bool) -> int:
        """Return the number of tokens of a part that fit; only a loss can be cut."""
        load = part.load
        fits = self.fits(work, part.stage.phase, beside + load, ahead_s, is_due=is_due)
        return load.tokens if fits else 0

    def ran(self, work: Work, seconds: float) -> None:  # noqa: B027
        """Record the time of parts.

        For parts on the second stream: first the predicted time, later its error.
        """
