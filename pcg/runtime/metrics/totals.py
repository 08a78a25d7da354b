"""Totals: sums of an engine's work since its start, in memory that does not grow with it.

They are counted from events as they happen, so they are complete even if the log has dropped old
events. The engine reports gaps between tokens and the sizes of steps, which are no events.

Sums by adapter: a monitoring system keeps a series for every adapter that ever had one, so at most
`most` adapters have sums of their own, and all others have common sums. An adapter gets its own
sums while there is room; later, once in `turn_s`, an adapter with clearly more requests replaces
another. Sums begin at 0 with a new place, and common sums keep their counts, so that no sum ever
falls while it is shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.report import REQUEST_ENDS, Outcome, number, optional_number

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
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
LENGTH_BOUNDS = tuple(first * 10**zeros for zeros in range(6) for first in (1, 2, 5))
"""The bounds of vLLM's histograms (vllm/v1/metrics/loggers.py): seconds, tokens of a step,
continuations of a prompt, preemptions of a request, and tokens of a request; vLLM cuts the last
ones at the longest sequence of the model."""


class Histogram:
    """Numbers of samples by bounds; another thread may read it during `observe`.

    Attributes:
        bounds: upper bounds, in the samples' unit.
        counts: the samples up to each bound and above the bound before, and last those above all.
        sum: the sum of the samples.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The mean of the samples; None without any."""
        count = self.count
        return self.sum / count if count else None

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_equal(self, value: float, times: int) -> None:
        """Add `times` equal samples."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add(self, other: Histogram) -> None:
        """Add another's samples, which has the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def percentile(self, percent: float) -> float | None:
        """Estimate a percentile as Prometheus' `histogram_quantile` does; None without samples.

        Samples are assumed to lie evenly between two bounds; those above all bounds count as the
        last bound.
        """
        counts = list(self.counts)
        rank = sum(counts) * percent / 100
        if not rank:
            return None
        below, low = 0, 0.0
        for bound, count in zip(self.bounds, counts, strict=False):
            if below + count >= rank:
                return low + (bound - low) * (rank - below) / count
            below, low = below + count, bound
        return self.bounds[-1]


_LEAD = 10
"""An adapter takes the place of one that n requests named if more than 2 n + 10 named it."""
_MOST_COUNTED = 4096
"""The most adapters without sums of their own whose requests are counted."""


@dataclass
class AdapterSums:
    """The sums of an adapter's requests.

    Attributes:
        requests: submitted requests.
        prompt_tokens: tokens of computed prompts.
        output_tokens: generated tokens, counted when a request ends.
        ttft: times to the first token, seconds.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))

    @classmethod
    def of(cls, parts: Sequence[AdapterSums]) -> AdapterSums:
        """Return the sums of several adapters, such as the versions of one adapter."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for part in parts:
            whole.requests += part.requests
            whole.prompt_tokens += part.prompt_tokens
            whole.output_tokens += part.output_tokens
            whole.ttft.add(part.ttft)
        return whole


class AdapterTotals:
    """The requests and pages of adapters, by name; read them from any thread.

    Attributes:
        others: the sums of all adapters without their own.
        waiting, running: requests of each adapter that wait and run now.
        resident: versions of each adapter that have pages now.
        paged_in, evicted: how often an adapter was given pages, and gave them up.
    """

    def __init__(self, most: int = 32, turn_s: float = 60.0) -> None:
        self.others = AdapterSums()
        self.waiting: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.resident: Counter[str] = Counter()
        self.paged_in = 0
        self.evicted = 0
        self._most = most
        self._turn_s = turn_s
        self._turned_s: float | None = None
        self._own: dict[str, AdapterSums] = {}
        self._used: Counter[str] = Counter()

    @property
    def own(self) -> Mapping[str, AdapterSums]:
        """The adapters with sums of their own, and these."""
        return self._own.copy()

    def take(self, sums: Mapping[str, AdapterSums]) -> None:
        """Have these sums in place of those that adapters have, as another engine counted them."""
        self._own = dict(sums)

    def of(self, name: str) -> AdapterSums:
        """Return the sums that count an adapter now."""
        return self._own.get(name, self.others)

    def came(self, name: str, time_s: float) -> None:
        """Count a request of an adapter, which waits."""
        if self._turned_s is None:
            self._turned_s = time_s
        elif time_s - self._turned_s >= self._turn_s:
            self._turn(time_s)
        if name not in self._own and len(self._own) < self._most:
            self._own[name] = AdapterSums()
        self.of(name).requests += 1
        if name in self._used or len(self._used) < _MOST_COUNTED:
            self._used[name] += 1
        self.waiting[name] += 1

    def moves(self, name: str, *, is_running: bool) -> None:
        """Note that a request that waited runs, or waits again."""
        leave(self.waiting if is_running else self.running, name)
        (self.running if is_running else self.waiting)[name] += 1

    def paged(self, name: str, *, is_in: bool) -> None:
        """Note that a version of an adapter was given pages, or gave them up."""
        if is_in:
            self.paged_in += 1
            self.resident[name] += 1
        else:
            self.evicted += 1
            leave(self.resident, name)

    def _turn(self, time_s: float) -> None:
        """Give the places of adapters with few requests to others with more."""
        used, self._used, self._turned_s = self._used, Counter(), time_s
        newcomers = [pair for pair in used.most_common(2 * self._most) if pair[0] not in self._own]
        least_first = sorted(self._own, key=used.__getitem__)
        for (name, count), least in zip(newcomers, least_first, strict=False):
            if count <= 2 * used[least] + _LEAD:
                return
            del self._own[least]
            self._own[name] = AdapterSums()


def leave(counts: Counter[str], name: str) -> None:
    """Decrement the count of a name, and delete it at 0."""
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]


_KEPT_JOBS = 128
"""The number of jobs whose tokens are kept apart."""


@dataclass
class Promised:
    """Requests with an SLO that are over, except those that their senders cancelled.

    Attributes:
        requests: their number; `kept` of them finished within it.
    """

    requests: int = 0
    kept: int = 0

    @property
    def share(self) -> float | None:
        """The share of them that finished within it; None without any."""
        return self.kept / self.requests if self.requests else None


@dataclass
class _Prompt:
    """The continuations of a prompt: how many there are, are over, and the most tokens."""

    count: int
    over: int = 0
    longest: int = 0


@dataclass(slots=True)
class _Open:
    submitted_s: float
    prompt_tokens: int
    max_tokens: int
    adapter: str | None
    slos_s: tuple[float | None, float | None]
    prompt: _Prompt
    admitted_s: float | None = None
    first_token_s: float | None = None
    is_running: bool = False
    preemptions: int = 0


class Totals:
    """The sums of an engine's life; readable from any thread.

    Attributes:
        requests: requests that are over, by outcome.
        finish_reasons: finished requests, by `stop` and `length`.
        turned_away: requests that were refused before they had an event, as too many arrived.
        preemptions: how often a request gave its pages up.
        prompt_tokens: tokens of computed prompts; `cached_tokens` of them were in the cache.
        output_tokens: generated tokens.
        finetuning_tokens, finetuning_steps: of all jobs; `job_tokens` of the latest jobs, by name.
        queueing, ttft, tpot, itl, e2el: times of requests, as in `ServingReport`; TPOT is a mean
            over a request's tokens.
        prefill, decode, inference: times of finished requests from their admission to the first
            token, from there to the end, and both.
        prompt_lengths, output_lengths, max_tokens: tokens of finished requests, and their limits.
        choices, longest: continuations of a prompt, and tokens of the longest of them.
        preempted: preemptions of finished requests.
        steps, window_steps: tokens that a step serves, and tokens that it trains, if any.
        promised_ttft, promised_tpot: how the SLOs were kept.
        adapters: sums by adapter.
        latest_step_s: when the last step with tokens ended.
    """

    def __init__(self, log: EventLog) -> None:
        self.requests: Counter[Outcome] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.turned_away = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finetuning_tokens = 0
        self.finetuning_steps = 0
        self.job_tokens: dict[str, int] = {}
        self.queueing = Histogram(REQUEST_BOUNDS_S)
        self.ttft = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.tpot = Histogram(TOKEN_BOUNDS_S)
        self.itl = Histogram(TOKEN_BOUNDS_S)
        self.e2el = Histogram(REQUEST_BOUNDS_S)
        self.prefill = Histogram(REQUEST_BOUNDS_S)
        self.decode = Histogram(REQUEST_BOUNDS_S)
        self.inference = Histogram(REQUEST_BOUNDS_S)
        self.prompt_lengths = Histogram(LENGTH_BOUNDS)
        self.output_lengths = Histogram(LENGTH_BOUNDS)
        self.max_tokens = Histogram(LENGTH_BOUNDS)
        self.longest = Histogram(LENGTH_BOUNDS)
        self.choices = Histogram(CHOICE_BOUNDS)
        self.preempted = Histogram(PREEMPTION_BOUNDS)
        self.steps = Histogram(STEP_BOUNDS)
        self.window_steps = Histogram(STEP_BOUNDS)
        self.promised_ttft = Promised()
        self.promised_tpot = Promised()
        self.adapters = AdapterTotals()
        self.latest_step_s = 0.0
        self._open: dict[str, _Open] = {}
        log.listen(self._note, self._note_tokens)

    def ran(self, served: int, trained: int) -> None:
        """Count a step's tokens: those that it served, and those that it trained."""
        if served:
            self.steps.observe(served)
        if trained:
            self.window_steps.observe(trained)

    def count_gaps(self, time_s: float, count: int, longer_s: Sequence[float]) -> None:
        """Count a step's gaps: `count` since the last step, and longer gaps, seconds each."""
        if count:
            self.itl.observe_equal(time_s - self.latest_step_s, count)
        for gap_s in longer_s:
            self.itl.observe(gap_s)
        self.latest_step_s = time_s

    def _note_tokens(self, time_s: float, subjects: Sequence[str]) -> None:
        self.output_tokens += len(subjects)

    def _note(self, event: Event) -> None:
        kind = event.kind
        if kind is Kind.SUBMITTED:
            self._begin(event)
        elif kind is Kind.STEPPED:
            self._count_trained(event.subject, int(number(event, "tokens")))
        elif kind in (Kind.PAGED_IN, Kind.EVICTED):
            self.adapters.paged(event.subject, is_in=kind is Kind.PAGED_IN)
        elif event.subject in self._open and "job" not in event.details:
            self._note_request(event, self._open[event.subject])

    def _count_trained(self, job: str, tokens: int) -> None:
        self.finetuning_steps += 1
        self.finetuning_tokens += tokens
        if job not in self.job_tokens and len(self.job_tokens) >= _KEPT_JOBS:
            del self.job_tokens[next(iter(self.job_tokens))]
        self.job_tokens[job] = self.job_tokens.get(job, 0) + tokens

    def _begin(self, event: Event) -> None:
        details = event.details
        first = self._open.get(str(details.get("continues")))
        prompt = _Prompt(int(number(event, "choices"))) if first is None else first.prompt
        adapter = None if details.get("adapter") is None else str(details["adapter"])
        slos_s = optional_number(event, "ttft_slo_s"), optional_number(event, "tpot_slo_s")
        lengths = int(number(event, "prompt_tokens")), int(number(event, "max_new_tokens"))
        self._open[event.subject] = _Open(event.time_s, *lengths, adapter, slos_s, prompt)
        if adapter is not None:
            self.adapters.came(adapter, event.time_s)

    def _note_request(self, event: Event, line: _Open) -> None:
        time_s, kind = event.time_s, event.kind
        if kind is Kind.ADMITTED:
            self._move(line, is_running=True)
            if line.admitted_s is None:
                line.admitted_s = time_s
                self.queueing.observe(time_s - line.submitted_s)
        elif kind is Kind.PREEMPTED:
            self._move(line, is_running=False)
            self.preemptions += 1
            line.preemptions += 1
        elif kind is Kind.TOKEN:
            self.output_tokens += int(number(event, "count"))
            if line.first_token_s is None:
                self._note_first(event, line)
        elif kind in REQUEST_ENDS:
            del self._open[event.subject]
            self._end(event, line)

    def _move(self, line: _Open, *, is_running: bool) -> None:
        if line.adapter is not None and line.is_running is not is_running:
            self.adapters.moves(line.adapter, is_running=is_running)
        line.is_running = is_running

    def _note_first(self, event: Event, line: _Open) -> None:
        line.first_token_s = event.time_s
        ttft_s = event.time_s - line.submitted_s
        self.prompt_tokens += line.prompt_tokens
        self.cached_tokens += int(number(event, "cached_tokens"))
        self.ttft.observe(ttft_s)
        if line.adapter is not None:
            sums = self.adapters.of(line.adapter)
            sums.prompt_tokens += line.prompt_tokens
            sums.ttft.observe(ttft_s)

    def _end(self, event: Event, line: _Open) -> None:
        outcome = REQUEST_ENDS[event.kind]
        self.requests[outcome] += 1
        tokens = int(number(event, "tokens")) if outcome is not Outcome.REFUSED else 0
        if line.adapter is not None:
            self.adapters.of(line.adapter).output_tokens += tokens
            leave(
                self.adapters.running if line.is_running else self.adapters.waiting,
                line.adapter,
            )
        if outcome is Outcome.FINISHED:
            self.finish_reasons[str(event.details["reason"])] += 1
            self._finish(event.time_s, line, tokens)
        if outcome is not Outcome.CANCELLED:
            self._count_promises(
                event.time_s, line, tokens, is_finished=outcome is Outcome.FINISHED
            )

    def _finish(self, time_s: float, line: _Open, tokens: int) -> None:
        self.e2el.observe(time_s - line.submitted_s)
        self.prompt_lengths.observe(line.prompt_tokens)
        self.output_lengths.observe(tokens)
        self.max_tokens.observe(line.max_tokens)
        self.preempted.observe(line.preemptions)
        prompt = line.prompt
        prompt.over, prompt.longest = prompt.over + 1, max(prompt.longest, tokens)
        if prompt.over == prompt.count:
            self.choices.observe(prompt.count)
            self.longest.observe(prompt.longest)
        if line.admitted_s is not None:
            self.inference.observe(time_s - line.admitted_s)
            if line.first_token_s is not None:
                self.prefill.observe(line.first_token_s - line.admitted_s)
                self.decode.observe(time_s - line.first_token_s)
        if line.first_token_s is not None and tokens > 1:
            self.tpot.observe((time_s - line.first_token_s) / (tokens - 1))

    def _count_promises(
        self, time_s: float, line: _Open, tokens: int, *, is_finished: bool
    ) -> None:
        first_s = time_s if line.first_token_s is None else line.first_token_s
        took_s = (first_s - line.submitted_s, (time_s - first_s) / max(1, tokens - 1))
        promised = (self.promised_ttft, self.promised_tpot)
        for most_s, seconds, counts in zip(line.slos_s, took_s, promised, strict=True):
            if most_s is not None:
                counts.requests += 1
                counts.kept += is_finished and seconds <= most_s
