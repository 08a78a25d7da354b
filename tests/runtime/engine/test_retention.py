"""What is over leaves nothing behind: adapters that were removed, events of requests that ended."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from pcg.errors import BenchmarkError
from pcg.runtime.metrics.events import KEPT_EVENTS, Event, EventLog, Kind
from pcg.runtime.metrics.report import Outcome, serving_report
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_device import SimulatedAdapter
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts
from tests.support.small_engine import LORA, make_engine, make_executor

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}


def finish(engine: Any) -> None:
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()


def test_an_adapter_removed_in_use_leaves_with_its_last_request() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    for _ in range(5):
        adapter = executor.add_adapter("again", LORA)
        for _ in range(2):
            engine.submit(executor.request([1, 2, 3], "again", **GREEDY))
        engine.step()
        executor.remove_adapter("again")
        assert len(engine.scheduler.adapters) == 1  # two requests run with it
        finish(engine)
        assert len(engine.scheduler.adapters) == 0
    assert [event.kind for event in engine.log].count(Kind.EVICTED) == 5
    gone = weakref.ref(adapter)
    assert [one.name for one in executor.adapters.values()] == ["a"]
    del adapter
    gc.collect()
    assert gone() is None  # nor do its weights stay in a slot


def test_requests_that_waited_for_a_removed_adapter_leave_nothing_either() -> None:
    adapter, other = SimulatedAdapter("removed", 3000), SimulatedAdapter("other", 3000)
    engine = SimulatedEngine(LinearCosts(), 24, 1000)
    request = Request((1,) * 10, SamplingParams(max_new_tokens=20), adapter)
    engine.submit(Request((1,) * 100, SamplingParams(max_new_tokens=200)))
    engine.step()
    waits = [engine.submit(request) for _ in range(3)]
    engine.forget(adapter)
    engine.step()
    engine.cancel(waits[0])
    engine.cancel(waits[1])
    engine.submit(Request((1,), SamplingParams(max_new_tokens=2), other))
    finish(engine)
    assert [len(engine.scheduler.adapters), engine.scheduler.adapters.has(other)] == [1, True]


def test_an_adapter_that_changed_in_use_is_read_again() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    engine.submit(executor.request([1, 2, 3], "a", **GREEDY))
    engine.step()
    executor.refresh_adapter("a")
    finish(engine)
    assert len(engine.scheduler.adapters) == 0
    for _ in range(2):
        engine.submit(executor.request([1, 2, 3], "a", **GREEDY))
        finish(engine)
    kinds = [event.kind for event in engine.log if event.subject == "a"]
    assert kinds == [Kind.PAGED_IN, Kind.EVICTED, Kind.PAGED_IN]  # and it stays


def test_times_of_requests_that_are_over_are_forgotten() -> None:
    """And they are not those of a later request with the same id."""
    engine = SimulatedEngine(LinearCosts(), 64, 1000)
    params = SamplingParams(max_new_tokens=2)
    for _ in range(2000):
        engine.submit(Request((1,), params, request_id="same", timeout_s=1e6))
        finish(engine)
    assert len(engine.requests.deadlines) < 200
    engine.submit(Request((1,), params, request_id="again", timeout_s=0.5))
    finish(engine)
    long = SamplingParams(max_new_tokens=200)
    engine.submit(Request((1,), long, request_id="again"))
    finish(engine)
    assert engine.clock.now_s() > 0.5
    assert engine.log.of("again")[-1].kind is Kind.FINISHED


def test_a_request_may_have_the_name_of_a_job() -> None:
    engine = SimulatedEngine(LinearCosts(), 64, 1000)
    engine.finetune("mine", [(10,)] * 1000)
    engine.submit(Request((1,), SamplingParams(max_new_tokens=20), request_id="mine"))
    engine.step()
    engine.cancel_job("mine")
    finish(engine)
    (one,) = serving_report(engine.log).requests
    assert one.outcome is Outcome.FINISHED
    assert engine.totals.requests == {Outcome.FINISHED: 1}


def served(engine: SimulatedEngine, count: int) -> None:
    for _ in range(count):
        engine.submit(Request((1,) * 10, SamplingParams(max_new_tokens=5)))
    while not engine.is_idle:
        engine.step()


def test_an_engine_keeps_so_many_events() -> None:
    engine = make_engine(make_executor(), 64)
    event = Event(0.0, Kind.PAGED_IN, "a")
    for _ in range(KEPT_EVENTS // 1024 + 1):
        engine.log.add(*[event] * 1024)
    assert len(engine.log) == KEPT_EVENTS
    assert KEPT_EVENTS <= 100_000


def test_reports_of_a_log_that_drops_events() -> None:
    """They are of the requests that came since; recordings are whole, and totals always are."""
    engine = SimulatedEngine(LinearCosts(), 64, 1000, log=EventLog(200))
    served(engine, 20)
    start_s = engine.clock.now_s()
    recorded, end = engine.log.recording()
    served(engine, 50)
    end()
    served(engine, 10)
    report = serving_report(engine.log)
    assert report.count(Outcome.FINISHED) == 10  # all that came in the time that it has
    assert engine.totals.requests["finished"] == 80
    assert engine.totals.output_tokens == 400
    tokens = sum(1 for event in engine.log if event.kind is Kind.TOKEN)
    assert report.output_tokens == tokens
    with pytest.raises(BenchmarkError, match=r"lacks events up to .* or record the span"):
        serving_report(engine.log, start_s=start_s)
    whole = serving_report(recorded, start_s=start_s)
    assert whole.count(Outcome.FINISHED) == len(whole.requests) == 50
    assert whole.output_tokens == 250
    with pytest.raises(BenchmarkError, match="lacks events"):
        serving_report(recorded, start_s=0.0)
