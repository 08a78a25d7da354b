"""Guests' work has the time that steps leave: requests keep their SLO, and rows are cut there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.scheduling import guest_work
from pcg.runtime.engine.scheduling.guest_work import (
    LEAST_ROWS,
    LEAST_SHARE,
    GuestWork,
    RowTimes,
    RowWork,
)
from pcg.runtime.engine.scheduling.work import Work

ROW_S = 1e-3


class Engine:
    """An engine whose clock moves by the work that runs: a millisecond a row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.row_s = ROW_S
        self.calls: list[Callable[[], Any]] = []
        self.is_idle = True
        self.is_awaited = False
        self.slices: list[tuple[int, int]] = []
        monkeypatch.setattr(guest_work.time, "perf_counter", lambda: self.now_s)
        self.guests = GuestWork(self.call, lambda: self.is_idle, lambda: self.is_awaited)

    def call(self, act: Callable[[], Any]) -> Future[Any]:
        self.calls.append(act)
        return Future()

    def run_calls(self) -> None:
        calls, self.calls = self.calls, []
        for act in calls:
            act()

    def work(self, rows: int) -> RowWork:
        def act(begin: int, end: int) -> None:
            self.slices.append((begin, end))
            self.now_s += self.row_s * (end - begin)

        return RowWork("piece", rows, act)


def served(limits: Limits, gap_s: float | None) -> Work:
    """A step that serves, and promises a gap."""
    return Work(limits, None, gap_s or float("inf"), is_served=True)


def test_work_ends_within_the_time_that_an_slo_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limits = Engine(monkeypatch), Limits(tpot_slo_s=0.1)
    engine.is_idle = False
    work = engine.work(1000)
    done = engine.guests.submit(work)
    for _ in range(40):
        step, before_s = served(limits, 0.1), engine.now_s
        engine.guests.run(step, ahead_s=0.03)
        took_s = engine.now_s - before_s
        assert took_s == pytest.approx(step.elapsed_s)
        assert took_s <= 0.07
        step.ran_forward(0.03, is_replayed=False)
    assert done.done()
    # Each row ran once, in their order.
    assert [begin for begin, _ in engine.slices] == [0, *(end for _, end in engine.slices)][:-1]
    assert engine.slices[-1][1] == 1000


def test_work_for_which_a_step_leaves_no_time_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limits = Engine(monkeypatch), Limits(tpot_slo_s=0.1)
    engine.is_idle = False
    engine.guests.times.observe("piece", LEAST_ROWS, LEAST_ROWS * ROW_S)
    engine.guests.submit(engine.work(8))
    for _ in range(10):
        engine.guests.run(served(limits, 0.1), ahead_s=0.09)
        engine.run_calls()  # which run nothing while there are steps
    assert engine.slices == []
    engine.is_idle = True
    engine.run_calls()
    engine.guests.wake()
    engine.run_calls()
    assert engine.slices == [(0, 8)]


def test_work_has_its_share_where_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, limits = Engine(monkeypatch), Limits(finetuning_floor=0.25)
    engine.is_idle = False
    engine.guests.times.observe("piece", LEAST_ROWS, LEAST_ROWS * ROW_S)
    engine.guests.submit(engine.work(10_000))
    served_s, steps = 0.05, 200
    for _ in range(steps):
        step = served(limits, None)
        engine.guests.run(step, ahead_s=0.0)
        step.ran_forward(served_s, is_replayed=False)
    share = engine.now_s / (engine.now_s + steps * served_s)
    assert 0.15 < share <= 0.25


@pytest.mark.parametrize("slo_s", [None, 0.01, 0.1])
@pytest.mark.parametrize("served_s", [0.02, 0.1, 5.0])
@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.1])
def test_work_that_waits_has_a_least_share_whatever_was_promised(
    monkeypatch: pytest.MonkeyPatch, slo_s: float | None, served_s: float, row_s: float
) -> None:
    """Steps that miss their SLO, prompts that take longer than a step may, and slow rows."""
    engine, limits = Engine(monkeypatch), Limits(tpot_slo_s=slo_s, finetuning_floor=0.0)
    engine.is_idle, engine.row_s = False, row_s
    engine.guests.times.observe("piece", LEAST_ROWS, LEAST_ROWS * row_s)
    engine.guests.submit(engine.work(10**7))
    all_s, longest_s, steps = 0.0, 0.0, 200 + int(200 * LEAST_ROWS * row_s / served_s)
    for _ in range(steps):
        step, before_s = served(limits, slo_s), engine.now_s
        engine.guests.run(step, ahead_s=served_s)
        longest_s = max(longest_s, engine.now_s - before_s)
        step.ran_forward(served_s, is_replayed=False)
        all_s += engine.now_s - before_s + served_s
    slice_s = LEAST_ROWS * row_s  # rows are not cut further, so that one slice may be owed
    assert engine.now_s >= 0.9 * LEAST_SHARE * all_s - slice_s
    if slo_s is not None and served_s >= slo_s:  # and not more than that, nor at once
        assert engine.now_s <= 1.1 * LEAST_SHARE * all_s + longest_s
        assert longest_s <= LEAST_SHARE / (1 - LEAST_SHARE) * served_s + 2 * LEAST_ROWS * row_s


def test_idle_work_lets_others_in_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.is_awaited = True
    engine.guests.submit(engine.work(500))
    engine.run_calls()
    assert engine.slices == [(0, LEAST_ROWS)]  # of which nothing was known
    engine.run_calls()
    (_, (begin, end)) = engine.slices
    assert (begin, end) == (16, 32)  # 25 ms less a margin
    assert len(engine.calls) == 1
    engine.is_awaited = False
    engine.run_calls()
    assert engine.slices[-1][1] == 500


def test_work_that_fails_is_the_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)

    def fail(begin: int, end: int) -> None:
        raise ValueError("no such rows")

    failed = engine.guests.submit(RowWork("piece", 4, fail))
    done = engine.guests.submit(engine.work(4))
    engine.run_calls()
    assert isinstance(failed.exception(), ValueError)
    assert done.done()
    assert engine.slices == [(0, 4)]


def test_times_are_bounds_of_more_and_fewer_rows() -> None:
    times = RowTimes()
    assert times.bound_s("piece", 1) is None
    times.observe("piece", 64, 0.08)
    assert times.bound_s("piece", 64) == pytest.approx(0.1)
    assert times.bound_s("piece", 129) == pytest.approx(0.4)  # as 256
    assert times.bound_s("piece", 3) == pytest.approx(0.1)
    times.observe("piece", 64, 0.01)
    assert times.bound_s("piece", 64) == pytest.approx(1.25 * 0.073)
    assert times.within("piece", 1000, 0.2) == 128
    assert times.within("piece", 1000, 1e-3) == 0
    assert times.within("other", 1000, 1e-3) == LEAST_ROWS
    assert times.within("other", 1000, 0.0) == 0
