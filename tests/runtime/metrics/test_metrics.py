"""Metrics against logs counted by hand, and what must hold of any log."""

from __future__ import annotations

import itertools
import json
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram

from pcg.errors import BenchmarkError
from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.report import (
    Distribution,
    Fairness,
    Outcome,
    Slo,
    serving_report,
    timelines,
)
from pcg.runtime.metrics.totals import TOKEN_BOUNDS_S, AdapterTotals, Histogram
from tests.support.small_engine import LENGTHS, make_engine, make_executor, requests, serve


def event(time_s: float, kind: str, subject: str, **details: object) -> Event:
    return Event(time_s, Kind(kind), subject, details)


def submitted(time_s: float, request: str, prompt: int = 10, **details: object) -> Event:
    return event(time_s, "submitted", request, prompt_tokens=prompt, max_new_tokens=9, **details)


def token(time_s: float, request: str, count: int = 1, **details: object) -> Event:
    return event(time_s, "token", request, count=count, **details)


def by_hand() -> EventLog:
    """Five requests of two tenants and a job, from 100 s to 110 s."""
    log = EventLog()
    for one in (
        submitted(100.0, "a", 10, adapter="x", tenant="t", ttft_slo_s=2.0, tpot_slo_s=1.0),
        submitted(100.5, "b", 20, adapter=None, tenant="u"),
        event(100.5, "queued", "job"),
        event(101.0, "admitted", "a"),
        token(101.0, "a", cached_tokens=0),
        event(101.5, "admitted", "b"),
        event(102.0, "started", "job"),
        token(102.0, "a"),
        token(102.5, "b", cached_tokens=16),
        event(103.0, "stepped", "job", tokens=64, step=1, loss=2.0),
        event(103.0, "preempted", "b"),
        token(103.5, "a", count=2),
        event(103.5, "finished", "a", reason="length"),
        event(104.0, "admitted", "b"),
        submitted(104.0, "c", 5, tenant="u"),
        event(104.0, "refused", "c", reason="5 tokens are more than 4"),
        submitted(104.0, "d", 7, tenant="u"),
        token(105.5, "b"),
        event(105.5, "finished", "b", reason="stop"),
        event(106.0, "stepped", "job", tokens=36, step=2, loss=1.5),
        event(107.0, "cancelled", "d"),
        submitted(107.0, "e", 8, tenant="t"),
        event(108.0, "paged_in", "x"),
        event(110.0, "timed_out", "e"),
        event(110.0, "cancelled", "job", job=True),
    ):
        log.add(one)
    return log


def test_by_hand() -> None:
    report = serving_report(by_hand(), Slo(ttft_s=1.5, tpot_s=3.0))
    a, b, c, d, e = report.requests
    assert (a.ttft_s, a.tpot_s, a.itls_s, a.queueing_s, a.e2el_s) == (
        1.0,
        pytest.approx(2.5 / 3),  # four tokens, two of them at once
        (1.0, 1.5),
        1.0,
        3.5,
    )
    assert (b.ttft_s, b.tpot_s, b.queueing_s, b.e2el_s, b.preemptions) == (2.0, 3.0, 1.0, 5.0, 1)
    assert (a.adapter, b.adapter, a.tenant) == ("x", None, "t")
    assert [one.outcome for one in report.requests] == [
        "finished",
        "finished",
        "refused",
        "cancelled",
        "timed_out",
    ]
    assert (a.slo, b.slo) == (Slo(2.0, 1.0), Slo(1.5, 3.0))
    assert (a.attains, b.attains_ttft, b.attains_tpot, b.attains) == (True, False, True, False)
    assert not any(one.attains for one in (c, d, e))

    assert [one.cached_tokens for one in report.requests] == [0, 16, None, None, None]
    assert report.cached_tokens == 16
    assert report.prefix_cache_hit_rate == 16 / 30

    assert report.duration_s == 10.0
    assert report.request_throughput == 0.2
    assert report.output_throughput == 0.6
    assert report.total_token_throughput == 3.6
    assert report.finetuning_throughput == 10.0
    assert (report.finetuning_tokens, report.finetuning_steps) == ({"job": 100}, 2)
    assert report.request_goodput == 0.1
    # Of a, b, c and e; d was cancelled.
    assert report.slo_attainment == 1 / 4
    assert report.ttft_attainment == 1 / 4
    assert report.tpot_attainment == 2 / 4
    # a has gaps of 1 and 1.5 s and its own SLO of 1 s; b has one of 3 s, and so has its SLO.
    assert report.gap_attainment == 2 / 3
    # a: 1 − (1/2)²; b is late, c and e have no token.
    assert report.user_satisfaction == pytest.approx(0.75 / 4)
    assert report.fairness is not None
    assert report.fairness.service == {"t": 14, "u": 22}
    assert report.fairness.max_min_ratio == pytest.approx(22 / 14)
    assert report.fairness.jain_index == pytest.approx(36**2 / (2 * (14**2 + 22**2)))
    assert report.ttft == Distribution(2, 1.5, 0.5, 1.5, pytest.approx(1.9), pytest.approx(1.99))
    assert report.itl is not None
    assert (report.itl.count, report.itl.mean_s) == (3, pytest.approx((1.0 + 1.5 + 3.0) / 3))
    assert report.e2el is not None
    assert report.e2el.median_s == 4.25


def test_json_has_vllm_s_names() -> None:
    found = serving_report(by_hand(), Slo(ttft_s=1.5, tpot_s=3.0)).to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["duration"] == 10.0
    assert found["completed"] == 2
    assert (found["refused"], found["cancelled"], found["timed_out"]) == (1, 1, 1)
    assert (found["failed"], found["unfinished"], found["submitted"]) == (0, 0, 5)
    assert (found["preempted"], found["preemptions"]) == (1, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 6)
    assert found["mean_ttft_ms"] == 1500.0
    assert found["std_ttft_ms"] == 500.0
    assert found["p99_ttft_ms"] == pytest.approx(1990.0)
    assert found["median_tpot_ms"] == pytest.approx((2500 / 3 + 3000) / 2)
    assert found["finetuning_tokens"] == {"job": 100}
    assert found["tenant_tokens"] == {"t": 14, "u": 22}


def test_a_span_leaves_the_rest_out() -> None:
    report = serving_report(by_hand(), start_s=102.0, end_s=107.0)
    assert [one.request for one in report.requests] == ["c", "d", "e"]
    assert report.duration_s == 5.0
    assert report.output_tokens == 5  # a at 102.0 and 103.5, b at 102.5 and 105.5
    assert report.finetuning_throughput == 20.0
    assert report.ttft is None
    assert report.fairness is not None
    assert report.fairness.service == {"t": 3, "u": 22}


def test_without_slos_there_is_nothing_to_attain() -> None:
    log = [submitted(0.0, "a"), token(1.0, "a"), event(1.0, "finished", "a")]
    report = serving_report(log)
    assert report.slo_attainment is report.ttft_attainment is report.tpot_attainment is None
    assert report.gap_attainment is None
    assert report.request_goodput is report.user_satisfaction is None
    assert report.to_json()["slo_attainment"] is None
    assert report.to_json()["mean_tpot_ms"] is None  # one token has no time after it
    # One token attains any TPOT, as in vLLM.
    assert serving_report(log, Slo(tpot_s=0.001)).slo_attainment == 1.0
    assert serving_report(log, Slo(ttft_s=1.0)).request_goodput == 1.0
    assert serving_report(log, Slo(ttft_s=0.999)).request_goodput == 0.0
    assert serving_report(log, Slo(ttft_s=1.0)).user_satisfaction == 0.0  # S-LoRA's is below


def test_jobs_that_fail_are_no_requests() -> None:
    log = [event(0.0, "queued", "j"), event(1.0, "failed", "j", job=True, reason="loss is nan")]
    assert timelines(log, Slo()) == ()


def test_fairness() -> None:
    assert Fairness({"a": 5, "b": 5}).jain_index == 1.0
    assert Fairness({"a": 5, "b": 0}).jain_index == 0.5
    assert Fairness({"a": 5, "b": 0}).max_min_ratio is None
    assert Fairness({"a": 0}).max_min_ratio == Fairness({"a": 0}).jain_index == 1.0


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([], "without events"),
        ([submitted(1.0, "a")], r"from 1\.0 s to 1\.0 s has no length; the log has 1 events"),
        (
            [token(0.0, "a"), token(1.0, "a")],
            r"'a' is token at 0\.0 s, and the log does not have it submitted; keep all events",
        ),
        ([event(0.0, "failed", "a"), token(1.0, "a")], "'a' is failed"),
        ([submitted(0.0, "a"), submitted(1.0, "a")], "'a' was submitted twice"),
        (
            [submitted(0.0, "a"), event(1.0, "finished", "a"), token(2.0, "a")],
            r"'a' is token at 2\.0 s, and finished since 1\.0 s",
        ),
        (
            [event(0.0, "submitted", "a", tenant="t"), token(1.0, "a")],
            r"submitted of 'a' at 0\.0 s has prompt_tokens=None; it has tenant, and needs",
        ),
        ([submitted(0.0, "a"), event(1.0, "token", "a")], "has count=None; it has no details"),
        ([submitted(0.0, "a"), token(1.0, "a", count=0)], "count=0"),
        ([submitted(0.0, "a", ttft_slo_s="2"), token(1.0, "a")], "ttft_slo_s='2'"),
        ([event(0.0, "started", "j"), event(1.0, "stepped", "j")], "stepped of 'j' .* tokens=None"),
    ],
)
def test_damaged_logs(log: list[Event], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        serving_report(log)


# ------------------------------------------------------------------------------- properties

SECONDS = st.floats(0.0, 50.0)


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    """A log of requests that end in every way, and of steps of a job, in order of time."""
    events: list[Event] = [event(0.0, "started", "job")]
    for index in range(draw(st.integers(0, 12))):
        name, time = f"r{index}", draw(SECONDS)
        tenant = draw(st.sampled_from([None, "t", "u"]))
        slos = {"ttft_slo_s": draw(SECONDS)} if draw(st.booleans()) else {}
        events.append(submitted(time, name, draw(st.integers(1, 100)), tenant=tenant, **slos))
        if draw(st.booleans()):
            time += draw(SECONDS)
            events.append(event(time, "admitted", name))
            for gap in draw(st.lists(SECONDS, max_size=8)):
                time += gap
                events.append(token(time, name, draw(st.integers(1, 3))))
        end = draw(st.sampled_from([None, "finished", "cancelled", "timed_out", "failed"]))
        if end is not None:
            events.append(event(time + draw(SECONDS), end, name))
    steps = draw(st.lists(st.tuples(SECONDS, st.integers(1, 1000)), max_size=5))
    events += [event(time, "stepped", "job", tokens=many, step=1, loss=1.0) for time, many in steps]
    # Sorting is stable: what happens to a request at one time stays in its order.
    events = sorted(events, key=lambda one: one.time_s)
    return [*events, event(events[-1].time_s + 1.0, "completed", "job")]


SLOS = st.builds(Slo, st.none() | SECONDS, st.none() | SECONDS)


@given(log=logs(), slo=SLOS, shift=st.floats(0.0, 1e4))
def test_what_holds_of_any_log(log: list[Event], slo: Slo, shift: float) -> None:
    """Laxer SLOs are attained more often, and the clock's zero does not matter."""
    report = serving_report(log, slo)
    lax = serving_report(log, Slo(*(one and 2 * one for one in (slo.ttft_s, slo.tpot_s))))
    assert (report.request_goodput or 0.0) <= (lax.request_goodput or 0.0)
    if report.slo_attainment is not None:
        assert lax.slo_attainment is not None
        assert report.slo_attainment <= lax.slo_attainment
    later = serving_report([Event(e.time_s + shift, e.kind, e.subject, e.details) for e in log])
    assert later.duration_s == pytest.approx(report.duration_s)
    assert later.output_tokens == report.output_tokens
    for one, other in zip(report.latencies.values(), later.latencies.values(), strict=True):
        assert (one and one.p99_s) == (other and pytest.approx(other.p99_s, abs=1e-6))
    assert sum(report.count(one) for one in Outcome) == len(report.requests)
    for share in (report.slo_attainment, report.user_satisfaction):
        assert share is None or 0.0 <= share <= 1.0
    if report.slo_attainment is not None and report.request_goodput is not None:
        assert report.request_goodput <= report.request_throughput
    assert report.output_throughput <= report.total_token_throughput
    for one in report.latencies.values():
        if one is not None:
            assert 0.0 <= one.median_s <= one.p90_s <= one.p99_s
            assert one.std_s >= 0.0
    if report.fairness is not None:
        many = len(report.fairness.service)
        assert 1 / many - 1e-9 <= report.fairness.jain_index <= 1 + 1e-9
        ratio = report.fairness.max_min_ratio
        assert ratio is None or ratio >= 1.0
    json.dumps(report.to_json(), allow_nan=False)


@given(log=logs(), start=SECONDS)
def test_spans_part_tokens_and_requests(log: list[Event], start: float) -> None:
    """Two spans that touch hold what the whole holds, where nothing lies on the border."""
    whole = serving_report(log)
    times = [one.time_s for one in log]
    border = min(max(start, 0.25), whole.end_s - 0.25)
    assume(all(abs(border - time) > 1e-6 for time in times))
    parts = [serving_report(log, end_s=border), serving_report(log, start_s=border)]
    assert sum(one.output_tokens for one in parts) == whole.output_tokens
    assert sum(len(one.requests) for one in parts) == len(whole.requests)
    assert sum(one.finetuning_steps for one in parts) == whole.finetuning_steps


@given(samples=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50))
def test_a_distribution_is_that_of_its_samples(samples: list[float]) -> None:
    found = Distribution.of(iter(samples))
    assert found is not None
    assert found.mean_s == pytest.approx(statistics.fmean(samples), rel=1e-9)
    assert found.std_s == pytest.approx(statistics.pstdev(samples), rel=1e-6, abs=1e-6)
    assert found.median_s == pytest.approx(statistics.median(samples), rel=1e-9)
    assert min(samples) <= found.mean_s <= max(samples)
    assert min(samples) <= found.median_s <= found.p90_s <= found.p99_s <= max(samples)


# ----------------------------------------------------------------------------------- the event log


@given(
    st.none() | st.integers(0, 12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20),
)
def test_tokens_held_together_are_events_of_their_own(
    kept: int | None, additions: list[tuple[bool, int]]
) -> None:
    log, heard, expected = EventLog(kept), list[Event](), list[Event]()
    log.listen(heard.append)
    for step, (are_tokens, count) in enumerate(additions):
        names = [f"request {i}" for i in range(count)]
        if are_tokens:
            log.add_tokens(float(step), names)
            added = [Event(float(step), Kind.TOKEN, name, {"count": 1}) for name in names]
        else:
            added = [Event(float(step), Kind.ADMITTED, name) for name in names]
            log.add(*added)
        expected += added
        latest = expected if kept is None else expected[max(len(expected) - kept, 0) :]
        assert list(log) == latest
        assert len(log) == len(latest)
        assert log.of("request 1") == tuple(e for e in latest if e.subject == "request 1")
        assert heard == expected


# ---------------------------------------------------------------------- totals of an engine's life


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
    engine = make_engine(executor)
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
