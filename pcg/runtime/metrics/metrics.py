"""Metrics of serving and finetuning, from the event log.

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
their senders cancelled: one that was refused, timed out, failed or has not finished attains
nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pcg.errors import BenchmarkError
from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.timelines import Outcome, Slo, Timeline, number, timelines

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
        found = np.fromiter(samples, float)
        if not len(found):
            return None
        # Rounding may put a mean outside of its samples by a hair.
        mean = np.clip(found.mean(), found.min(), found.max())
        percentiles = np.percentile(found, (50, 90, 99)).tolist()
        return cls(len(found), float(mean), float(found.std()), *percentiles)


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
        """(Σx)² / (n Σx²): from 1/n if one tenant gets all, to 1 for equal shares."""
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
        return sum(one.outcome is outcome for one in self.requests)

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompts of finished requests."""
        return sum(one.prompt_tokens for one in self.requests if one.outcome is Outcome.FINISHED)

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were in the KV cache already."""
        return sum(one.cached_tokens or 0 for one in self.requests)

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Share of the prompts' tokens that were in the cache; None if no prompt was read."""
        read = sum(one.prompt_tokens for one in self.requests if one.cached_tokens is not None)
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
        return _share([one.attains for one in self._counted if one.slo])

    @property
    def ttft_attainment(self) -> float | None:
        """Share of requests that finish within their TTFT SLO; None if none has one."""
        return _share([one.attains_ttft for one in self._counted if one.slo.ttft_s is not None])

    @property
    def tpot_attainment(self) -> float | None:
        """Share of requests that finish within their TPOT SLO; None if none has one."""
        return _share([one.attains_tpot for one in self._counted if one.slo.tpot_s is not None])

    @property
    def gap_attainment(self) -> float | None:
        """Share of the gaps between tokens within their TPOT SLO, however their requests ended.

        A mean may hide long gaps, which FlexLLM bounds in each iteration; None without any gap of a
        request with such an SLO.
        """
        promised = [one for one in self.requests if one.slo.tpot_s is not None]
        gaps = sum(len(one.itls_s) for one in promised)
        return sum(one.gaps_attained for one in promised) / gaps if gaps else None

    @property
    def request_goodput(self) -> float | None:
        """Requests a second that finish within their SLOs; None if none has an SLO.

        Beside others that have one, a request without an SLO is good when it finishes.
        """
        if not any(one.slo for one in self.requests):
            return None
        return sum(one.attains for one in self.requests) / self.duration_s

    @property
    def user_satisfaction(self) -> float | None:
        """S-LoRA's: the mean reward of requests with a TTFT SLO; None without any.

        Only the first token counts, however a request ended.
        """
        rewards = [one.satisfaction for one in self._counted if one.slo.ttft_s is not None]
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def _counted(self) -> list[Timeline]:
        return [one for one in self.requests if one.outcome is not Outcome.CANCELLED]

    def to_json(self) -> dict[str, object]:
        """Return the report as one flat object, with vLLM's names where it reports the same.

        Numbers without samples are null. Latencies are in milliseconds.
        """
        found: dict[str, object] = {
            "duration": self.duration_s,
            "submitted": len(self.requests),
            "completed": self.count(Outcome.FINISHED),
        }
        for outcome in Outcome:
            if outcome is not Outcome.FINISHED:
                found[str(outcome)] = self.count(outcome)
        found |= {
            "preempted": sum(one.preemptions > 0 for one in self.requests),
            "preemptions": sum(one.preemptions for one in self.requests),
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "total_cached_tokens": self.cached_tokens,
        } | {name: getattr(self, name) for name in _RATES}
        for name, one in self.latencies.items():
            for summary in ("mean", "median", "std", "p90", "p99"):
                ms = None if one is None else getattr(one, f"{summary}_s") * 1e3
                found[f"{summary}_{name}_ms"] = ms
        fairness = self.fairness
        found |= {name: getattr(self, name) for name in _SHARES}
        return found | {
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
    """Measure a log, or a span of it, such as one without its warm-up.

    Args:
        events: an `EventLog`. Where it has dropped events, the span begins with the first one that
            it has, and requests that came before are left out, but for their output tokens.
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
    tokens = (one for one in log if one.kind is Kind.TOKEN and start <= one.time_s <= end)
    requests = tuple(one for one in everyone if start <= one.submitted_s <= end)
    finished = [one for one in requests if one.outcome is Outcome.FINISHED]
    steps = [one for one in log if one.kind is Kind.STEPPED and start <= one.time_s <= end]
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
        queueing=_of(one.queueing_s for one in finished),
        ttft=_of(one.ttft_s for one in finished),
        tpot=_of(one.tpot_s for one in finished),
        itl=_of(gap for one in finished for gap in one.itls_s),
        e2el=_of(one.e2el_s for one in finished),
    )


def _of(samples: Iterable[float | None]) -> Distribution | None:
    return Distribution.of(sample for sample in samples if sample is not None)


def _outputs(one: Timeline, start: float, end: float) -> int:
    return sum(count for time, count in one.tokens if start <= time <= end)


def _fairness(everyone: Iterable[Timeline], start: float, end: float) -> Fairness | None:
    """Return the service of tenants with a request that was there in the span."""
    service: Counter[str] = Counter()
    for one in everyone:
        if one.submitted_s <= end and (one.ended_s is None or one.ended_s >= start):
            read = bool(one.tokens) and start <= one.tokens[0][0] <= end
            tokens = one.prompt_tokens * read + _outputs(one, start, end)
            service[NO_TENANT if one.tenant is None else one.tenant] += tokens
    return Fairness(dict(service)) if service else None


def _share(attained: list[bool]) -> float | None:
    return sum(attained) / len(attained) if attained else None
