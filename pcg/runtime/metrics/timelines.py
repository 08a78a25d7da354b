"""Timelines: the life of each request, from the event log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from pcg.errors import BenchmarkError
from pcg.runtime.metrics.events import Event, Kind


class Outcome(StrEnum):
    """The end of a request."""

    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Slo:
    """Service level objectives of a request: the longest times, in seconds; None for any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None


@dataclass(frozen=True)
class Timeline:
    """A request from its submission to its end; times are on the engine's clock, in seconds.

    Attributes:
        slo: its own SLOs, or those given for all.
        admitted_s: when it was first admitted; None if it never was.
        cached_tokens: tokens of its prompt that were in the cache; None before its first token.
        tokens: (time, number of tokens) of each output; 1 unless several came at once.
        ended_s: when it ended; None if it has not.
    """

    request: str
    adapter: str | None
    tenant: str | None
    prompt_tokens: int
    slo: Slo
    submitted_s: float
    admitted_s: float | None = None
    cached_tokens: int | None = None
    tokens: tuple[tuple[float, int], ...] = ()
    preemptions: int = 0
    outcome: Outcome = Outcome.UNFINISHED
    ended_s: float | None = None

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.tokens)

    @property
    def queueing_s(self) -> float | None:
        """Seconds from submission to the first admission."""
        return None if self.admitted_s is None else self.admitted_s - self.submitted_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: seconds from submission."""
        return self.tokens[0][0] - self.submitted_s if self.tokens else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: (last token − first token) / (tokens − 1), seconds.

        None with fewer than two tokens.
        """
        tokens = self.output_tokens
        return (self.tokens[-1][0] - self.tokens[0][0]) / (tokens - 1) if tokens > 1 else None

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Inter-token latencies: seconds between neighbouring outputs.

        Tokens that come at once are one output, as in vLLM: they have one gap, and no gaps of 0.
        """
        return tuple(after - before for (before, _), (after, _) in pairwise(self.tokens))

    @property
    def gaps_attained(self) -> int:
        """Number of its inter-token latencies within its TPOT SLO; all without one."""
        return sum(_within(gap, self.slo.tpot_s) for gap in self.itls_s)

    @property
    def e2el_s(self) -> float | None:
        """End-to-end latency: seconds from submission to the end, whatever it was."""
        return None if self.ended_s is None else self.ended_s - self.submitted_s

    @property
    def attains_ttft(self) -> bool:
        """True if it finished with a first token in time, or has no such SLO.

        A request without tokens, such as for an embedding, has to end in that time.
        """
        return self._finished and _within(
            self.ttft_s if self.tokens else self.e2el_s, self.slo.ttft_s
        )

    @property
    def attains_tpot(self) -> bool:
        """True if it finished within its TPOT SLO; one token alone attains, as in vLLM."""
        return self._finished and _within(self.tpot_s or 0.0, self.slo.tpot_s)

    @property
    def attains(self) -> bool:
        return self.attains_ttft and self.attains_tpot

    @property
    def satisfaction(self) -> float:
        """S-LoRA's reward: 1 − (TTFT / SLO)² below the SLO; else, or without a token, 0.

        Source: S-LoRA appendix B; its public code (slora/utils/metric.py) has this curve.
        """
        if self.ttft_s is None or self.slo.ttft_s is None or self.ttft_s >= self.slo.ttft_s:
            return 0.0
        return 1 - (self.ttft_s / self.slo.ttft_s) ** 2

    @property
    def _finished(self) -> bool:
        return self.outcome is Outcome.FINISHED


def _within(seconds: float | None, most_s: float | None) -> bool:
    return most_s is None or (seconds is not None and seconds <= most_s)


REQUEST_ENDS = {
    Kind.REFUSED: Outcome.REFUSED,
    Kind.FINISHED: Outcome.FINISHED,
    Kind.CANCELLED: Outcome.CANCELLED,
    Kind.TIMED_OUT: Outcome.TIMED_OUT,
    Kind.FAILED: Outcome.FAILED,
}
_OF_REQUESTS = {*REQUEST_ENDS, Kind.ADMITTED, Kind.TOKEN, Kind.PREEMPTED}


@dataclass
class _Open:
    line: Timeline
    tokens: list[tuple[float, int]] = field(default_factory=list)


def timelines(events: Iterable[Event], slo: Slo, *, is_whole: bool = True) -> tuple[Timeline, ...]:
    """Return the requests of a log, in order of submission.

    Args:
        events: the events of a log.
        slo: SLOs of requests without their own `ttft_slo_s` or `tpot_slo_s`.
        is_whole: False if earlier events are missing: requests that came then are left out.
    Raises:
        BenchmarkError: an event is of a request that was not submitted or has ended, or lacks a
            number; the message names it.
    """
    every: list[_Open] = []
    requests: dict[str, _Open] = {}
    for event in events:
        if event.kind is Kind.SUBMITTED:
            before = requests.get(event.subject)
            if before is not None and before.line.ended_s is None:
                raise BenchmarkError(f"request {event.subject!r} was submitted twice")
            requests[event.subject] = _Open(_submitted(event, slo))
            every.append(requests[event.subject])
        elif event.kind in _OF_REQUESTS and "job" not in event.details:
            if event.subject not in requests:
                if not is_whole:
                    continue
                raise BenchmarkError(
                    f"{event.subject!r} is {event.kind} at {event.time_s} s, and the log does not "
                    "have it submitted; keep all events, EventLog(kept=None)"
                )
            _follow(requests[event.subject], event)
    return tuple(replace(one.line, tokens=tuple(one.tokens)) for one in every)


def _submitted(event: Event, slo: Slo) -> Timeline:
    details = event.details
    adapter, tenant = details.get("adapter"), details.get("tenant")
    return Timeline(
        request=event.subject,
        adapter=None if adapter is None else str(adapter),
        tenant=None if tenant is None else str(tenant),
        prompt_tokens=int(number(event, "prompt_tokens")),
        slo=Slo(
            optional_number(event, "ttft_slo_s", slo.ttft_s),
            optional_number(event, "tpot_slo_s", slo.tpot_s),
        ),
        submitted_s=event.time_s,
    )


def optional_number(event: Event, name: str, default: float | None = None) -> float | None:
    """Return a number of an event's details, or a default where there is none."""
    return default if event.details.get(name) is None else number(event, name)


def _follow(one: _Open, event: Event) -> None:
    line = one.line
    if line.ended_s is not None:
        raise BenchmarkError(
            f"request {line.request!r} is {event.kind} at {event.time_s} s, and {line.outcome} "
            f"since {line.ended_s} s"
        )
    if event.kind is Kind.TOKEN:
        count = int(number(event, "count"))
        if count < 1:
            raise BenchmarkError(f"token of {line.request!r} at {event.time_s} s has count={count}")
        one.tokens.append((event.time_s, count))
        if line.cached_tokens is None:
            cached = int(number(event, "cached_tokens")) if "cached_tokens" in event.details else 0
            one.line = replace(line, cached_tokens=cached)
    elif event.kind is Kind.PREEMPTED:
        one.line = replace(line, preemptions=line.preemptions + 1)
    elif event.kind is Kind.ADMITTED:
        if line.admitted_s is None:
            one.line = replace(line, admitted_s=event.time_s)
    else:
        one.line = replace(line, outcome=REQUEST_ENDS[event.kind], ended_s=event.time_s)


def number(event: Event, name: str) -> float:
    """Return a number of an event's details; BenchmarkError if it is missing or not a number."""
    value = event.details.get(name)
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BenchmarkError(
            f"{event.kind} of {event.subject!r} at {event.time_s} s has {name}={value!r}; "
            f"it has {', '.join(event.details) or 'no details'}, and needs the number"
        )
    return value
