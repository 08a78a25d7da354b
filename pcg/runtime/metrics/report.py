"""Metrics of serving and finetuning, and the timelines of requests, from the event log.

Names and definitions are those of `vllm bench serve` where it has them:

    TTFT        first token − submission
    TPOT        (last token − first token) / (tokens − 1), a mean for each request
    ITL         gaps between neighbouring outputs, of all requests together
    E2EL        end − submission
    goodput     requests a second that finish within their SLOs

and of the papers:

    attainment    share of requests that finish within both SLOs, TTFT and TPOT    FlexLLM v2 §8
                  of gaps: share of all ITLs that are within the TPOT SLO
    satisfaction  mean of 1 − (TTFT / SLO)², 0 beyond the SLO                      S-LoRA appendix B

Latencies are of finished requests. Attainment and satisfaction count all requests except those that
their senders cancelled: a request that was refused, timed out, failed or has not finished attains
nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from pcg.errors import BenchmarkError
from pcg.runtime.metrics.events import Event, EventLog, Kind


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
        slo: its own SLOs, or the default SLOs.
        admitted_s: when it was first admitted; None if it never was.
        cached_tokens: tokens of its prompt that were in the cache; None before its first token.
        tokens: (time, number of tokens) of each output.
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

        Tokens that arrive together are one output, as in vLLM: they have one gap, and no gaps of 0.
        """
        return tuple(after - before for (before, _), (after, _) in pairwise(self.tokens))

    @property
    def gaps_attained(self) -> int:
        """Number of its inter-token latencies within its TPOT SLO; all without an SLO."""
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
        """True if it finished within its TPOT SLO; a single token attains, as in vLLM."""
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
        is_whole: False if earlier events are missing: requests of that time are left out.
    Raises:
        BenchmarkError: names an event of a request that was not submitted or has ended, or an event
            without its number.
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
    return tuple(replace(opened.line, tokens=tuple(opened.tokens)) for opened in every)


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


def _follow(opened: _Open, event: Event) -> None:
    line = opened.line
    if line.ended_s is not None:
        raise BenchmarkError(
            f"request {line.request!r} is {event.kind} at {event.time_s} s, and {line.outcome} "
            f"since {line.ended_s} s"
        )
    if event.kind is Kind.TOKEN:
        count = int(number(event, "count"))
        if count < 1:
            raise BenchmarkError(f"token of {line.request!r} at {event.time_s} s has count={count}")
        opened.tokens.append((event.time_s, count))
        if line.cached_tokens is None:
            cached = int(number(event, "cached_tokens")) if "cached_tokens" in event.details else 0
            opened.line = replace(line, cached_tokens=cached)
    elif event.kind is Kind.PREEMPTED:
        opened.line = replace(line, preemptions=line.preemptions + 1)
    elif event.kind is Kind.ADMITTED:
        if line.admitted_s is None:
            opened.line = replace(line, admitted_s=event.time_s)
    else:
        opened.line = replace(line, outcome=REQUEST_ENDS[event.kind], ended_s=event.time_s)


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


_RATES = (
    "prefix_cache_hit_rate",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
)
_SHARES = (
    "slo_attainment",
    "ttft_attainment",
    "tpot_attainment",
    "gap_attainment",
    "user_satisfaction",
)
NO_TENANT = "-"
"""The name of the requests without a tenant."""


@dataclass(frozen=True)
class Distribution:
    """A summary of samples, in seconds.

    Attributes:
        count: number of samples.
        std_s: standard deviation of the samples, divided by their number.
        median_s, p90_s, p99_s: percentiles, interpolated linearly, as in vLLM's benchmark.
    """

    count: int
    mean_s: float
    std_s: float
    median_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution | None:
        """Summarise samples in any order; None if there are none."""
        values = np.fromiter(samples, float)
        if not len(values):
            return None
        # Rounding may put a mean outside of its samples by a hair.
        mean = np.clip(values.mean(), values.min(), values.max())
        percentiles = np.percentile(values, (50, 90, 99)).tolist()
        return cls(len(values), float(mean), float(values.std()), *percentiles)


@dataclass(frozen=True)
class Fairness:
    """Service by tenant, in tokens of prompts that were read and of outputs."""

    service: Mapping[str, int]

    @property
    def max_min_ratio(self) -> float | None:
        """Most over least; None if one tenant got nothing and another something."""
        most, least = max(self.service.values()), min(self.service.values())
        if least == 0:
            return 1.0 if most == 0 else None
        return most / least

    @property
    def jain_index(self) -> float:
        """(Σx)² / (n Σx²): from 1/n if a single tenant is served, to 1 for equal shares."""
        squares = sum(tokens**2 for tokens in self.service.values())
        total = sum(self.service.values())
        return total**2 / (len(self.service) * squares) if squares else 1.0


@dataclass(frozen=True)
class ServingReport:
    """Metrics of a span of an engine's time.

    Attributes:
        start_s, end_s: the span, on the engine's clock.
        requests: requests submitted in the span, whenever they end; latencies and counts are
            theirs.
        output_tokens: output tokens in the span, of any request.
        finetuning_tokens: tokens by job, of the optimizer steps in the span.
        queueing, ttft, tpot, itl, e2el: latencies of finished requests; None without samples.
    """

    start_s: float
    end_s: float
    requests: tuple[Timeline, ...]
    output_tokens: int
    fairness: Fairness | None
    finetuning_tokens: Mapping[str, int]
    finetuning_steps: int
    queueing: Distribution | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def count(self, outcome: Outcome) -> int:
        return sum(line.outcome is outcome for line in self.requests)

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompts of finished requests."""
        return sum(line.prompt_tokens for line in self.requests if line.outcome is Outcome.FINISHED)

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were in the KV cache already."""
        return sum(line.cached_tokens or 0 for line in self.requests)

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Share of the prompts' tokens that were in the cache; None if no prompt was read."""
        read = sum(line.prompt_tokens for line in self.requests if line.cached_tokens is not None)
        return self.cached_tokens / read if read else None

    @property
    def request_throughput(self) -> float:
        """Finished requests a second."""
        return self.count(Outcome.FINISHED) / self.duration_s

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        """Output tokens, and prompt tokens of finished requests, a second."""
        return (self.input_tokens + self.output_tokens) / self.duration_s

    @property
    def finetuning_throughput(self) -> float:
        """Trained tokens a second."""
        return sum(self.finetuning_tokens.values()) / self.duration_s

    @property
    def slo_attainment(self) -> float | None:
        """Share of requests that finish within both SLOs; None if none has an SLO."""
        return _share([line.attains for line in self._counted if line.slo])

    @property
    def ttft_attainment(self) -> float | None:
        """Share of requests that finish within their TTFT SLO; None without such an SLO."""
        return _share([line.attains_ttft for line in self._counted if line.slo.ttft_s is not None])

    @property
    def tpot_attainment(self) -> float | None:
        """Share of requests that finish within their TPOT SLO; None without such an SLO."""
        return _share([line.attains_tpot for line in self._counted if line.slo.tpot_s is not None])

    @property
    def gap_attainment(self) -> float | None:
        """Share of the gaps between tokens within their TPOT SLO, however their requests ended.

        A mean may hide long gaps, which FlexLLM bounds in each iteration; None without any gap of a
        request with such an SLO.
        """
        promised = [line for line in self.requests if line.slo.tpot_s is not None]
        gaps = sum(len(line.itls_s) for line in promised)
        return sum(line.gaps_attained for line in promised) / gaps if gaps else None

    @property
    def request_goodput(self) -> float | None:
        """Requests a second that finish within their SLOs; None without any SLO.

        If other requests have an SLO, a request without an SLO is good when it finishes.
        """
        if not any(line.slo for line in self.requests):
            return None
        return sum(line.attains for line in self.requests) / self.duration_s

    @property
    def user_satisfaction(self) -> float | None:
        """S-LoRA's: the mean reward of requests with a TTFT SLO; None without any.

        Only the first token counts, however a request ended.
        """
        rewards = [line.satisfaction for line in self._counted if line.slo.ttft_s is not None]
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def _counted(self) -> list[Timeline]:
        return [line for line in self.requests if line.outcome is not Outcome.CANCELLED]

    def to_json(self) -> dict[str, object]:
        """Return the report as one flat object, with vLLM's names for the numbers that it reports.

        Numbers without samples are null. Latencies are in milliseconds.
        """
        numbers: dict[str, object] = {
            "duration": self.duration_s,
            "submitted": len(self.requests),
            "completed": self.count(Outcome.FINISHED),
        }
        for outcome in Outcome:
            if outcome is not Outcome.FINISHED:
                numbers[str(outcome)] = self.count(outcome)
        numbers |= {
            "preempted": sum(item.preemptions > 0 for item in self.requests),
            "preemptions": sum(item.preemptions for item in self.requests),
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "total_cached_tokens": self.cached_tokens,
        } | {name: getattr(self, name) for name in _RATES}
        for name, item in self.latencies.items():
            for summary in ("mean", "median", "std", "p90", "p99"):
                ms = None if item is None else getattr(item, f"{summary}_s") * 1e3
                numbers[f"{summary}_{name}_ms"] = ms
        fairness = self.fairness
        numbers |= {name: getattr(self, name) for name in _SHARES}
        return numbers | {
            "finetuning_tokens": dict(self.finetuning_tokens),
            "finetuning_steps": self.finetuning_steps,
            "finetuning_throughput": self.finetuning_throughput,
            "tenant_tokens": {} if fairness is None else dict(fairness.service),
            "max_min_ratio": None if fairness is None else fairness.max_min_ratio,
            "jain_index": None if fairness is None else fairness.jain_index,
        }

    @property
    def latencies(self) -> dict[str, Distribution | None]:
        names = ("ttft", "tpot", "itl", "e2el", "queueing")
        return {name: getattr(self, name) for name in names}


def serving_report(
    events: Iterable[Event],
    slo: Slo | None = None,
    *,
    start_s: float | None = None,
    end_s: float | None = None,
) -> ServingReport:
    """Measure a log, or a span of it, such as the span after the warm-up.

    Args:
        events: an `EventLog`. If it has dropped events, the span begins with its first event, and
            earlier requests are left out, except for their output tokens.
        slo: SLOs of requests without their own; None for no SLO.
        start_s, end_s: the span, on the engine's clock; None for the first and the last event.
    Raises:
        BenchmarkError: the log is empty or damaged, lacks the beginning of the span, or the span
            has no length.
    """
    log = tuple(events)
    if not log:
        raise BenchmarkError("an event log without events; run the engine first")
    start = log[0].time_s if start_s is None else start_s
    end = log[-1].time_s if end_s is None else end_s
    if not start < end:
        raise BenchmarkError(
            f"the span from {start} s to {end} s has no length; the log has {len(log)} events from "
            f"{log[0].time_s} s to {log[-1].time_s} s"
        )
    lacks_until = events.lacks_until_s if isinstance(events, EventLog) else -math.inf
    if start < lacks_until:
        raise BenchmarkError(
            f"the span begins at {start} s, and the log lacks events up to {lacks_until} s; give "
            "the engine log=EventLog(kept=None), or record the span (EventLog.recording)"
        )
    everyone = timelines(log, slo or Slo(), is_whole=lacks_until == -math.inf)
    tokens = (item for item in log if item.kind is Kind.TOKEN and start <= item.time_s <= end)
    requests = tuple(item for item in everyone if start <= item.submitted_s <= end)
    finished = [item for item in requests if item.outcome is Outcome.FINISHED]
    steps = [item for item in log if item.kind is Kind.STEPPED and start <= item.time_s <= end]
    jobs: Counter[str] = Counter()
    for step in steps:
        jobs[step.subject] += int(number(step, "tokens"))
    return ServingReport(
        start_s=start,
        end_s=end,
        requests=requests,
        output_tokens=sum(int(number(token, "count")) for token in tokens),
        fairness=_fairness(everyone, start, end),
        finetuning_tokens=dict(jobs),
        finetuning_steps=len(steps),
        queueing=_of(item.queueing_s for item in finished),
        ttft=_of(item.ttft_s for item in finished),
        tpot=_of(item.tpot_s for item in finished),
        itl=_of(gap for item in finished for gap in item.itls_s),
        e2el=_of(item.e2el_s for item in finished),
    )


def _of(samples: Iterable[float | None]) -> Distribution | None:
    return Distribution.of(sample for sample in samples if sample is not None)


def _outputs(line: Timeline, start: float, end: float) -> int:
    return sum(count for time, count in line.tokens if start <= time <= end)


def _fairness(everyone: Iterable[Timeline], start: float, end: float) -> Fairness | None:
    service: Counter[str] = Counter()
    for line in everyone:
        if line.submitted_s <= end and (line.ended_s is None or line.ended_s >= start):
            read = bool(line.tokens) and start <= line.tokens[0][0] <= end
            tokens = line.prompt_tokens * read + _outputs(line, start, end)
            service[NO_TENANT if line.tenant is None else line.tenant] += tokens
    return Fairness(dict(service)) if service else None


def _share(attained: list[bool]) -> float | None:
    return sum(attained) / len(attained) if attained else None
