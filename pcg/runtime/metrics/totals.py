"""Totals: what an engine has done since its start, in memory that does not grow with it.

They are counted as events come, so they are whole where the log has dropped old events.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.timelines import REQUEST_ENDS, Outcome, number

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""The bounds of vLLM's histograms (vllm/v1/metrics/loggers.py), seconds."""


class Histogram:
    """Numbers of samples by bounds.

    Attributes:
        bounds_s: upper bounds, seconds.
        counts: the samples up to each bound and above the one before, and last those above all.
        sum_s: the sum of the samples, seconds.
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float | None:
        """The mean of the samples, seconds; None without any."""
        count = self.count
        return self.sum_s / count if count else None

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds


@dataclass
class _Open:
    submitted_s: float
    prompt_tokens: int
    first_token_s: float | None = None
    is_admitted: bool = False


class Totals:
    """The sums of a log's events since it was made; read them from any thread.

    Attributes:
        requests: requests that are over, by how they ended.
        turned_away: requests that were refused before they had an event, as too many came at once.
        preemptions: how often a request gave its pages up.
        prompt_tokens: tokens of prompts that were read; `cached_tokens` of them were in the cache.
        output_tokens: tokens that were generated.
        finetuning_tokens, finetuning_steps: of all jobs.
        queueing, ttft, tpot, e2el: times of requests, as of `ServingReport`; TPOT is a mean over a
            request's tokens.
    """

    def __init__(self, log: EventLog) -> None:
        self.requests: Counter[Outcome] = Counter()
        self.turned_away = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finetuning_tokens = 0
        self.finetuning_steps = 0
        self.queueing = Histogram(REQUEST_BOUNDS_S)
        self.ttft = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.tpot = Histogram(TOKEN_BOUNDS_S)
        self.e2el = Histogram(REQUEST_BOUNDS_S)
        self._open: dict[str, _Open] = {}
        log.listen(self._note, self._note_tokens)

    def _note_tokens(self, time_s: float, subjects: Sequence[str]) -> None:
        self.output_tokens += len(subjects)

    def _note(self, event: Event) -> None:
        kind = event.kind
        if kind is Kind.SUBMITTED:
            self._open[event.subject] = _Open(event.time_s, int(number(event, "prompt_tokens")))
        elif kind is Kind.STEPPED:
            self.finetuning_steps += 1
            self.finetuning_tokens += int(number(event, "tokens"))
        elif event.subject in self._open and "job" not in event.details:
            self._note_request(event, self._open[event.subject])

    def _note_request(self, event: Event, one: _Open) -> None:
        time_s, kind = event.time_s, event.kind
        if kind is Kind.ADMITTED and not one.is_admitted:
            one.is_admitted = True
            self.queueing.observe(time_s - one.submitted_s)
        elif kind is Kind.PREEMPTED:
            self.preemptions += 1
        elif kind is Kind.TOKEN:
            self.output_tokens += int(number(event, "count"))
            if one.first_token_s is None:
                one.first_token_s = time_s
                self.prompt_tokens += one.prompt_tokens
                self.cached_tokens += int(number(event, "cached_tokens"))
                self.ttft.observe(time_s - one.submitted_s)
        elif kind in REQUEST_ENDS:
            del self._open[event.subject]
            self.requests[REQUEST_ENDS[kind]] += 1
            if kind is Kind.FINISHED:
                self.e2el.observe(time_s - one.submitted_s)
                tokens = int(number(event, "tokens"))
                if one.first_token_s is not None and tokens > 1:
                    self.tpot.observe((time_s - one.first_token_s) / (tokens - 1))
