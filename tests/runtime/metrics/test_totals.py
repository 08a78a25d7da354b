"""Totals of an engine's life: gaps, steps, promises, continuations and sums by adapter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram

from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.metrics.totals import (
    LENGTH_BOUNDS,
    TOKEN_BOUNDS_S,
    AdapterTotals,
    Histogram,
    Totals,
)
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support.small_engine import LENGTHS, make_engine, make_executor, requests, serve


def test_histograms_are_those_of_prometheus() -> None:
    registry = CollectorRegistry()
    theirs = PrometheusHistogram("gap", "gaps", buckets=TOKEN_BOUNDS_S, registry=registry)
    mine = Histogram(TOKEN_BOUNDS_S)
    samples = [0.0, 0.01, 0.0100001, 0.3, 80.0, 1e9, *np.random.default_rng(0).gamma(1, 1, 500)]
    for sample in samples:
        theirs.observe(sample)
        mine.observe(sample)
    mine.observe_equal(0.2, 3)
    for _ in range(3):
        theirs.observe(0.2)
    upto = list(itertools.accumulate(mine.counts))
    bounds = [*map(str, TOKEN_BOUNDS_S), "+Inf"]
    found = [registry.get_sample_value("gap_bucket", {"le": bound}) for bound in bounds]
    assert found == upto
    assert registry.get_sample_value("gap_sum") == pytest.approx(mine.sum)
    assert registry.get_sample_value("gap_count") == mine.count


def test_percentiles_lie_between_the_bounds_of_theirs() -> None:
    """Prometheus' own documentation has the rule; numpy has the samples' own percentile."""
    samples = np.random.default_rng(1).gamma(2, 0.1, 4000)
    mine = Histogram(TOKEN_BOUNDS_S)
    assert mine.percentile(50) is None
    for sample in samples:
        mine.observe(float(sample))
    for percent in (10, 50, 90, 99):
        exact = float(np.percentile(samples, percent))
        place = np.searchsorted(TOKEN_BOUNDS_S, exact)
        low, high = (0.0, *TOKEN_BOUNDS_S)[place], TOKEN_BOUNDS_S[place]
        estimate = mine.percentile(percent)
        assert estimate is not None
        assert low <= estimate <= high
    mine = Histogram((1, 2))
    mine.observe(5)
    assert mine.percentile(50) == 2


def test_lengths_have_the_bounds_of_vllm() -> None:
    assert LENGTH_BOUNDS[:8] == (1, 2, 5, 10, 20, 50, 100, 200)
    assert LENGTH_BOUNDS[-1] == 500_000


@pytest.mark.parametrize("pages", [64, 9])
def test_gaps_are_those_of_the_log(pages: int) -> None:
    """Also of sequences that are preempted, and so skip steps."""
    executor = make_executor()
    engine = make_engine(executor, pages)
    serve(engine, requests(executor, LENGTHS), every=3)
    report, totals = serving_report(engine.log), engine.totals
    assert report.itl is not None
    assert (totals.preemptions > 0) is (pages == 9)
    assert totals.itl.count == report.itl.count
    assert totals.itl.sum == pytest.approx(report.itl.mean_s * report.itl.count)
    gaps = [gap for one in report.requests for gap in one.itls_s]
    counts, _ = np.histogram(gaps, [-1.0, *TOKEN_BOUNDS_S, np.inf])
    assert totals.itl.counts == counts.tolist()
    assert totals.preempted.sum == totals.preemptions
    assert totals.steps.sum >= totals.output_tokens


def test_times_and_lengths_of_requests() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    asked = requests(executor, LENGTHS, new=5)
    serve(engine, asked)
    totals, report = engine.totals, serving_report(engine.log)
    assert totals.prompt_lengths.sum == sum(len(one.prompt_ids) for one in asked)
    assert totals.output_lengths.sum == totals.max_tokens.sum == 5 * len(asked)
    assert totals.choices.sum == totals.choices.count == len(asked)
    assert totals.longest.counts == totals.output_lengths.counts
    assert dict(totals.finish_reasons) == {"length": len(asked)}
    parts = totals.prefill.sum + totals.decode.sum
    assert totals.inference.sum == pytest.approx(parts)
    assert totals.e2el.sum == pytest.approx(parts + totals.queueing.sum)
    assert report.queueing is not None
    assert totals.queueing.mean == pytest.approx(report.queueing.mean_s)


def test_continuations_are_of_one_prompt() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    params = SamplingParams(max_new_tokens=4, n=3, seed=1, ignore_eos=True)
    engine.submit(Request((1, 2, 3), params))
    engine.submit(Request((4, 5), SamplingParams(max_new_tokens=2, ignore_eos=True)))
    while not engine.is_idle:
        engine.step()
    totals = engine.totals
    assert (totals.choices.count, totals.choices.sum) == (2, 4)
    assert (totals.longest.count, totals.longest.sum) == (2, 6)
    assert totals.requests["finished"] == 4


def submitted(totals_log: EventLog, name: str, time_s: float, **details: object) -> None:
    common = {"prompt_tokens": 3, "max_new_tokens": 8, "choices": 1, "adapter": None, **details}
    totals_log.add(Event(time_s, Kind.SUBMITTED, name, common))


def test_promises_are_counted_as_in_a_report() -> None:
    log = EventLog()
    totals = Totals(log)
    slos = {"ttft_slo_s": 1.0, "tpot_slo_s": 0.5}
    first = {"count": 1, "cached_tokens": 0}
    for place, (ttft_s, gap_s, end) in enumerate(
        [
            (0.5, 0.4, Kind.FINISHED),
            (1.5, 0.4, Kind.FINISHED),
            (0.5, 0.6, Kind.FINISHED),
            (0.5, 0.4, Kind.TIMED_OUT),
            (0.5, 0.4, Kind.FAILED),
            (0.5, 0.4, Kind.CANCELLED),
        ]
    ):
        name, came_s = f"r{place}", 10.0 * place
        submitted(log, name, came_s, **slos)
        log.add(Event(came_s, Kind.ADMITTED, name), Event(came_s + ttft_s, Kind.TOKEN, name, first))
        ended_s = came_s + ttft_s + gap_s
        log.add_tokens(ended_s, [name])
        log.add(Event(ended_s, end, name, {"reason": "stop", "tokens": 2}))
    submitted(log, "refused", 99.0, **slos)
    log.add(Event(99.0, Kind.REFUSED, "refused", {"reason": "full"}))
    submitted(log, "without", 99.5)
    log.add(Event(99.6, Kind.FINISHED, "without", {"reason": "stop", "tokens": 0}))
    report = serving_report(log)
    assert totals.promised_ttft.share == report.ttft_attainment == 2 / 6
    assert totals.promised_tpot.share == report.tpot_attainment == 2 / 6


def test_requests_of_adapters_wait_run_and_end() -> None:
    executor = make_executor()
    engine = make_engine(executor, 24)
    asked = requests(executor, LENGTHS)
    adapters = engine.totals.adapters
    seen = set()
    for one in asked:
        engine.submit(one)
    while not engine.is_idle:
        scheduler = engine.scheduler
        for counts, there in (
            (adapters.waiting, scheduler.waiting),
            (adapters.running, scheduler.running),
        ):
            assert counts["a"] == sum(one.request.adapter is not None for one in there)
            seen.add(counts["a"])
        assert adapters.resident["a"] == len(scheduler.adapters)
        engine.step()
    assert len(seen) > 1
    assert not adapters.waiting
    assert not adapters.running
    assert dict(adapters.resident) == {"a": 1}
    sums = adapters.own["a"]
    theirs = [one for one in asked if one.adapter is not None]
    assert sums.requests == sums.ttft.count == len(theirs)
    assert sums.prompt_tokens == sum(len(one.prompt_ids) for one in theirs)
    assert sums.output_tokens == sum(one.params.max_new_tokens for one in theirs)
    engine.cancel(engine.submit(asked[0]))
    assert not adapters.waiting


def test_the_adapters_that_are_used_most_have_their_own_sums() -> None:
    totals = AdapterTotals(most=2, turn_s=10.0)
    for name in ("a", "b", "c"):
        totals.came(name, 0.0)
    assert set(totals.own) == {"a", "b"}
    assert totals.others.requests == 1
    assert totals.of("c") is totals.others
    for name in ("c", "d", "a") * 12:
        totals.came(name, 5.0)
    before = totals.of("a")
    totals.came("d", 10.0)  # c was asked for 13 times, b once; d 12 times, a 13 times
    assert set(totals.own) == {"a", "c"}
    assert totals.of("a") is before
    assert totals.own["c"].requests == 0
    assert totals.others.requests == 13 + 12 + 1
    for _ in range(12):
        totals.came("d", 15.0)
    totals.came("a", 20.0)  # nobody asked for a or c meanwhile
    assert len(totals.own) == 2
    assert "d" in totals.own


def test_many_adapters_that_are_used_alike_leave_the_series_alone() -> None:
    totals = AdapterTotals(most=8, turn_s=1.0)
    shown = set()
    for step in range(20_000):
        totals.came(f"adapter {step % 5000}", step / 100)
        shown |= totals.own.keys()
    assert len(shown) < 60
    assert len(totals.own) == 8
