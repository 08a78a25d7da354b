"""What a step costs the engine grows with its requests and no faster, counted and not timed."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest

from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.latency import Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.admission.policies import AdapterClustering, EarlyAbort, Fcfs
from pcg.runtime.admission.policy import Policy
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.simulated_device import SimulatedAdapter
from pcg.simulate.simulated_engine import SimulatedEngine
from tests.support.linear_costs import LinearCosts

POLICIES = [Fcfs, AdapterClustering, EarlyAbort, FairShare]


def make_engine(
    running: int, pages: int, policy: Policy | None = None, new_tokens: int = 40
) -> SimulatedEngine:
    """An engine with two requests for each place, of lengths and adapters that repeat."""
    limits = Limits(running, 1 << 20, ttft_slo_s=1e6, tpot_slo_s=1e6)
    engine = SimulatedEngine(LinearCosts(), pages, 1000, limits=limits, policy=policy)
    engine.scheduler.forward = Latency(0.01, 1e-4, 1e-8)
    adapters = [SimulatedAdapter(f"adapter {i}", 2000) for i in range(running // 4)]
    for i in range(2 * running):
        params = SamplingParams(max_new_tokens=new_tokens + i % 8)
        adapter = adapters[i % len(adapters)]
        engine.submit(Request((1,) * (9 + i % 16), params, adapter, tenant=str(i % 3)))
    return engine


def operations(engine: SimulatedEngine) -> int:
    """Bytecodes that Python runs until everything is served."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # CPython 3.12.1 counts none if no frame wants them yet
    sys.settrace(trace)
    try:
        while not engine.is_idle:
            engine.step()
    finally:
        sys.settrace(before)
    engine.check_integrity()
    return count


@pytest.mark.parametrize("pages", [8, 2], ids=["roomy", "preempting"])
@pytest.mark.parametrize("policy", POLICIES)
def test_operations_grow_with_the_requests(policy: type[Policy], pages: int) -> None:
    """Four times as many requests over four times as many pages: admissions, steps and ends."""
    few, many = (operations(make_engine(n, pages * n, policy(), 24)) for n in (8, 32))
    assert 1.5 * few < many < 4 * few  # what a step costs whatever it runs is in both


def test_what_outlives_a_step_does_not_grow_with_its_requests() -> None:
    """Objects that stay from step to step have the garbage collector go through all there are."""
    running = 64
    engine = make_engine(running, 10 * running)
    for _ in range(3):
        engine.step()
    gc.disable()
    try:
        gc.collect()  # Tuples of what is not collected leave the collector here.
        before = len(gc.get_objects())
        for _ in range(8):
            engine.step()
        gc.collect()
        added = len(gc.get_objects()) - before
    finally:
        gc.enable()
    # An object for each token would be 8 times as many as there are requests.
    assert added < running
