"""Windows are as long as gets a job furthest in the time that was left to it lately."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.sharing.step import Step
from pcg.runtime.engine.sharing.time_left import TimeLeft
from pcg.runtime.engine.sharing.window_choice import BestWindow, WindowChoice
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Forward
from pcg.simulate.simulated_training import SimulatedPass
from tests.support.certain import certain

DECODED = Load(4, 4000, 4)


def on_cpu() -> Latencies:
    """Every part has a constant that 27 tokens of it take."""
    forward = Latency(0.007, 3e-4, 1e-7, 4e-4, 1e-5, 1e-3)
    return certain(forward, Latency(1.5e-3, 5.5e-5, 1e-7))


def on_gpu() -> Latencies:
    """Beside what decodes 140 tokens take little more than the weights' reading."""
    forward = Latency(0.0113, 9e-6, 2e-9, 4e-7, 4e-7, 2e-4, 6.5e-5, 144)
    return certain(forward, Latency(3.7e-4, 6e-7, 2e-10, beyond_s=2e-6, knee=144))


def step_of(latencies: Latencies, room_s: float | None) -> Step:
    """A step that serves and leaves a room of which nothing is used; an idle one of 0.2 s."""
    limits = Limits(tpot_slo_s=0.05)
    if room_s is None:
        return Step(limits, latencies, spent_s=0.2, trained_s=0.2)
    spent_s = latencies.forward.seconds(DECODED)
    load = {"decoded": DECODED, "load": DECODED, "served": DECODED}
    gap_s = spent_s + room_s
    return Step(limits, latencies, gap_s, gap_s, is_served=True, spent_s=spent_s, **load)


def chosen(latencies: Latencies, rooms: list[float | None]) -> BestWindow:
    """What is chosen after steps with such rooms."""
    left = TimeLeft()
    choice = WindowChoice(left)
    for room_s in rooms:
        left.note(step_of(latencies, room_s), room_s or 0.0)
    step = next(step_of(latencies, room_s) for room_s in reversed(rooms) if room_s is not None)
    whole = SimulatedPass([4096], layers=32, adapter=-1, rank=16)
    return choice.best(step, Forward(whole), latencies)


def test_windows_fit_into_what_steps_leave_where_requests_always_run() -> None:
    for room_s in (0.004, 0.01, 0.03):
        best = chosen(on_cpu(), [room_s] * 300)
        load = Load.of(best.tokens, 0)
        assert on_cpu().backward.seconds(load) <= 0.75 * room_s
        assert best.tokens >= 16


def test_windows_wait_for_idle_time_where_there_is_much_of_it() -> None:
    """Rooms of 4 ms hold 30 tokens of a layer at most, and cost twice as much a token."""
    best = chosen(on_cpu(), [None, *[0.004] * 20] * 10)
    assert best.tokens > 100
    assert not best.in_layers
    # No idle time is expected once so many steps in a row had none.
    assert chosen(on_cpu(), [*[None, *[0.004] * 20] * 10, *[0.004] * 256]).tokens < 30


def test_windows_go_forward_beside_requests_where_that_is_cheap() -> None:
    best = chosen(on_gpu(), [0.0057] * 300)
    assert not best.in_layers
    assert 120 < best.tokens < 220


def test_a_choice_stays_for_some_steps() -> None:
    latencies, left = on_cpu(), TimeLeft()
    choice = WindowChoice(left)
    step, whole = step_of(latencies, 0.01), SimulatedPass([512], layers=8, adapter=-1, rank=16)
    for _ in range(256):
        left.note(step, 0.01)
    first = choice.best(step, Forward(whole), latencies)
    for _ in range(300):
        left.note(step_of(latencies, 0.03), 0.03)
    assert choice.best(step, Forward(whole), latencies) == first
    for _ in range(16):
        choice.pass_step()
    assert choice.best(step, Forward(whole), latencies).tokens > first.tokens
    full = replace(step, load=Load(step.limits.tokens - 5))
    assert choice.best(full, Forward(whole), latencies).tokens == 5


def test_unused_time_of_steps_comes_back_as_idle_time() -> None:
    """Of 10 s half are idle: of a second that steps are shorter, ln 2 becomes idle."""
    left = TimeLeft()
    step = step_of(on_cpu(), 0.01)
    for _ in range(2000):
        left.note(replace(step, spent_s=0.01, trained_s=0.004), 0.01)
        left.note(Step(Limits(), None, spent_s=0.01), 0.0)
    idle_s = left.idle_s(0.0) - left.idle_s(1.0)
    assert idle_s == pytest.approx(math.log(2), rel=0.02)
    used_s = 0.4 * left.steps_with(0.01) * 0.01
    assert left.idle_s(used_s) == pytest.approx(left.steps_with(0.01) * 0.01, rel=0.02)
    assert left.steps_with(0.011) == 0
    assert left.pieces(0.002, 0.002) == pytest.approx(3 * left.steps_with(0.01))
