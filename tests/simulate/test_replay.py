"""Replaying a workload: everything comes when it should, and the report is of it all."""

import time
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import BenchmarkError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.metrics.report import Outcome, Slo, serving_report
from pcg.simulate.latency_plot import serving_svg
from pcg.simulate.replay import replay, train
from pcg.simulate.workload import TimedRequest, Workload
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine, make_executor

WORKLOAD = Workload(
    (
        TimedRequest(0.0, None, 9, 12),
        TimedRequest(0.05, "a", 4, 6, "t"),
        TimedRequest(0.05, "a", 30, 1),
        TimedRequest(0.9, None, 5, 8, "t"),
    )
)


def test_requests_come_when_their_time_has_come():
    executor = make_executor()
    engine = make_engine(executor, 64, Limits(ttft_slo_s=50.0))
    report = replay(engine, WORKLOAD, executor.adapters, 128)
    assert engine.is_idle
    assert report.count(Outcome.FINISHED) == 4
    assert [line.output_tokens for line in report.requests] == [12, 6, 1, 8]
    assert [line.prompt_tokens for line in report.requests] == [9, 4, 30, 5]
    assert [line.adapter for line in report.requests] == [None, "a", "a", None]
    times = [line.submitted_s - report.start_s for line in report.requests]
    assert times == pytest.approx([0.0, 0.05, 0.05, 0.9], abs=1e-9)
    for line in report.requests:
        assert line.ttft_s is not None
        assert line.ttft_s > 0
    assert report.output_tokens == 27
    assert report.slo_attainment == 1.0
    assert report.duration_s > 0.9


@pytest.mark.slow
def test_prompts_are_those_of_the_seed():
    def prompts(seed):
        executor = make_executor()
        engine = make_engine(executor, 64)
        found = []
        submit = engine.submit

        def seen(request, came_s=None):
            found.append(request.prompt_ids)
            return submit(request, came_s)

        engine.submit = seen
        replay(engine, WORKLOAD.part(0.0, 0.1), executor.adapters, 128, seed=seed)
        return found

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)
    assert all(0 <= token < 128 for prompt in prompts(1) for token in prompt)


def until_trained(run):
    """Run until a job has done a step meanwhile, as it does at once where nobody else computes."""
    return next(report for _ in range(60) if (report := run()).finetuning_steps)


def test_jobs_train_beside_and_alone():
    executor = make_executor()
    engine = make_engine(executor, 64, Limits(tpot_slo_s=0.5))
    options = {**OPTIONS, "max_steps": 10_000}
    engine.finetune(DATA, "trained", peft=LORA, **options)
    report = until_trained(lambda: replay(engine, WORKLOAD, executor.adapters, 128))
    assert report.finetuning_throughput > 0
    assert len(engine.jobs) == 1
    began = time.monotonic()
    alone = until_trained(lambda: train(engine, 0.5))
    assert 0.5 <= alone.duration_s <= time.monotonic() - began
    assert not alone.requests
    engine.cancel_job("trained")
    with pytest.raises(BenchmarkError, match="no finetuning job"):
        train(engine, 1.0)


def test_a_refusal_is_in_the_report():
    executor = make_executor()
    engine = make_engine(executor, 4)
    workload = Workload((TimedRequest(0.0, None, 100, 4), TimedRequest(0.0, None, 10, 4)))
    report = replay(engine, workload, {}, 128)
    assert [line.outcome for line in report.requests] == [Outcome.REFUSED, Outcome.FINISHED]


def test_what_cannot_be_replayed():
    executor = make_executor()
    engine = make_engine(executor, 64)
    with pytest.raises(BenchmarkError, match="asks for adapter 'a', the first of 1"):
        replay(engine, WORKLOAD, {}, 128)
    long = Workload((TimedRequest(0.0, None, 100, 29),))
    with pytest.raises(BenchmarkError, match="has 100 tokens and asks for 29, and the model"):
        replay(engine, long, {}, 128, most_positions=128)
    assert all(event.kind is not Kind.SUBMITTED for event in engine.log)


def test_requests_that_can_never_run_end_the_replay(monkeypatch):
    """A paused job holds pages that a request needs."""
    executor = make_executor()
    engine = make_engine(executor, 8)
    engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    while not engine.jobs[0].tables:
        engine.step()
    engine.pause_job("trained")
    free = engine.pool.free
    table = engine.pool.open("a test", 0)
    engine.pool.extend(table, free)
    monkeypatch.setattr("pcg.simulate.replay._MOST_STUCK", 20)
    with pytest.raises(BenchmarkError, match="1 requests wait, and none can run: 0 of 8 pages"):
        replay(engine, Workload((TimedRequest(0.0, None, 9, 2),)), {}, 128)


def request(name, submitted, *tokens, **slos):
    return [
        Event(submitted, Kind.SUBMITTED, name, {"prompt_tokens": 5, **slos}),
        *(Event(time, Kind.TOKEN, name, {"count": 1}) for time in tokens),
        Event(tokens[-1], Kind.FINISHED, name),
    ]


def report_of(events, slo=None):
    return serving_report(sorted(events, key=lambda one: one.time_s), slo)


class Drawn:
    """The lines of a plot, and its texts."""

    def __init__(self, events, slo=None):
        root = ElementTree.fromstring(serving_svg(report_of(events, slo), "serving"))
        parts = list(root.iter())
        self.texts = [part.text for part in parts if part.tag.endswith("text")]
        self.lines = []
        self.paths = []
        self.box = tuple(map(float, root.attrib["viewBox"].split()))
        for part in parts:
            if "data-label" in part.attrib:
                pairs = (pair.split(":") for pair in part.attrib["data-values"].split())
                points = [(float(x), float(y)) for x, y in pairs]
                self.lines.append((part.attrib["data-label"], points))
                places = (pair.split() for pair in part.attrib["d"][1:].split("L"))
                self.paths.append([(float(x), float(y)) for x, y in places])

    def line(self, label, place=0):
        return [points for name, points in self.lines if name == label][place]


def test_samples_are_where_they_belong():
    # From 0 s to 60 s: each of the sixty parts is a second. TTFT is 1 s, then 3 s.
    log = [*request("a", 0.5, 1.5, 1.75), *request("b", 30.5, 33.5, 34.0)]
    log += [Event(0.0, Kind.STARTED, "job"), Event(60.0, Kind.COMPLETED, "job")]
    plot = Drawn(log, Slo(ttft_s=2.0))
    assert plot.line("median") == [(0.5, 1.0), (30.5, 3.0)]
    assert plot.line("99th percentile") == plot.line("median")  # of one sample each
    assert [height for _, height in plot.line("SLO")] == [2.0, 2.0]
    points = plot.line("share")
    assert points[0] == (1.0, 0.0)
    assert points[-1] == (3.0, 1.0)
    assert points == sorted(points)
    assert [latency for latency, _ in plot.line("SLO", 1)] == [2.0, 2.0]
    kinds = ("time to first token, s", "time per output token, ms", "inter-token latency, ms")
    assert [text for text in plot.texts if text in kinds] == list(kinds)


def test_rows_without_samples_are_left_out():
    assert [label for label, _ in Drawn(request("a", 0.0, 1.0)).lines] == [
        "99th percentile",
        "median",
        "share",
    ]
    nobody = [Event(0.0, Kind.STARTED, "j"), Event(1.0, Kind.COMPLETED, "j")]
    assert Drawn(nobody).lines == []
    assert "No request finished." in Drawn(nobody).texts


@given(
    requests=st.lists(
        st.tuples(st.floats(0, 1e4), st.lists(st.floats(0, 1e3), min_size=1, max_size=5)),
        min_size=1,
        max_size=8,
    )
)
def test_all_that_is_drawn_lies_in_its_panel(requests):
    events = [Event(0.0, Kind.STARTED, "job")]
    for index, (start, gaps) in enumerate(requests):
        times = [start + sum(gaps[: i + 1]) for i in range(len(gaps))]
        events += request(f"r{index}", start, *times)
    events.append(Event(2e4, Kind.COMPLETED, "job"))
    plot = Drawn(events)
    left, top, width, height = plot.box
    for points in plot.paths:
        for x, y in points:
            assert left <= x <= left + width
            assert top <= y <= top + height
