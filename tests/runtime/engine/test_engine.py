"""The engine: greedy tokens are transformers' whatever runs beside, and nothing is lost."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.errors import OutOfMemoryError, PcgError
from pcg.kernels.torch import input_gradient, products
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.step import Load
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support.certain import certain
from tests.support.prompts import prompts
from tests.support.small_engine import (
    DATA,
    LENGTHS,
    LORA,
    OPTIONS,
    expected,
    make_engine,
    make_executor,
    requests,
    serve,
)
from tests.support.started_steps import nothing, when_read


@pytest.mark.parametrize("every", [1, 3, 30])
def test_tokens_are_transformers_however_requests_come(every: int) -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    done = serve(make_engine(executor, 64), asked, every)
    assert [list(c.token_ids) for c in done] == expected(asked)


def test_prompts_in_chunks() -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    done = serve(make_engine(executor, 64, Limits(tokens=8, least_chunk=3)), asked)
    assert [list(c.token_ids) for c in done] == expected(asked)


def test_preempted_requests_end_with_the_same_tokens() -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS, 40)
    engine = make_engine(executor, 12)
    done = serve(engine, asked)
    assert any(event.kind is Kind.PREEMPTED for event in engine.log)
    assert [list(c.token_ids) for c in done] == expected(asked)
    assert engine.pool.free + engine.scheduler.adapters.idle_pages == 12


def test_beside_finetuning() -> None:
    """Tokens are the same beside a job, and the job ends with the adapter that it makes alone."""
    executor = make_executor()
    alone = make_executor()
    alone.finetune(DATA, "trained", peft=LORA, progress=False, **OPTIONS)
    asked = requests(executor, LENGTHS)
    engine = make_engine(executor, 64, Limits(tokens=20))
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    done = serve(engine, asked, 3)
    assert [list(c.token_ids) for c in done] == expected(asked)
    assert job.error is None
    assert job.result.steps == 3
    ours, theirs = (e.adapters["trained"].tensors for e in (executor, alone))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert [e.kind for e in engine.log.of("trained")][-2:] == [Kind.PUBLISHED, Kind.COMPLETED]


class TakenSide:
    """Stands for a GPU's second stream: notes what runs between a forward's start and its end."""

    def __init__(self) -> None:
        self._open = False
        self._seconds: list[float] = []

    def begin(self) -> None:
        assert not self._open

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._open = True
        yield
        self._open = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        assert self._open
        yield
        self._seconds.append(0.02)

    def rejoin(self) -> None:
        assert not self._open

    def join(self) -> list[float]:
        assert not self._open
        seconds, self._seconds = self._seconds, []
        return seconds


def test_parts_beside_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: they begin before its tokens are read, and what is trained is the same."""
    executor, alone = make_executor(), make_executor()
    alone.finetune(DATA, "trained", peft=LORA, progress=False, **OPTIONS)
    asked = requests(executor, LENGTHS)
    latencies = Latencies(Latency(1e-4, 1e-7, 0.0), Latency(1e-4, 1e-7, 0.0))
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    engine = executor.engine(
        Limits(tokens=20, tpot_slo_s=60.0), kv_cache_bytes=64 * page_bytes, latencies=latencies
    )
    engine.device.side = TakenSide()
    order: list[str] = []
    start, run_parts = engine.device.start, engine.device.run_parts

    def started(*args: Any) -> Any:
        running = start(*args)
        order.append("start")
        return when_read(running, lambda: order.append("end"), nothing)

    def ran(parts: Any) -> None:
        order.append("part")
        run_parts(parts)

    monkeypatch.setattr(engine.device, "start", started)
    monkeypatch.setattr(engine.device, "run_parts", ran)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    done = serve(engine, asked, 3)
    assert [list(c.token_ids) for c in done] == expected(asked)
    assert job.error is None
    ours, theirs = (e.adapters["trained"].tensors for e in (executor, alone))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    beside = " ".join(order).replace("start end", "").split("end")
    assert any("start part" in one for one in beside)
    # What both streams took at once is what is foretold of the next.
    assert latencies.backward.seconds(Load()) > 2e-4


def test_products_of_the_base_run_once_for_all_parts_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = make_executor()
    # By these a window goes forward with a request, as that costs less than its layers alone.
    forward, backward = Latency(1e-2, 1e-4, 1e-7), Latency(1.5e-3, 1e-5, 1e-9)
    known = certain(forward, backward, Latency(0.0, 1e-3, 0.0), Latency(5e-3, 1e-5, 1e-9))
    limits = Limits(tokens=20, least_chunk=4)
    engine = executor.engine(limits, kv_cache_bytes=2**20, latencies=known)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    engine.submit(requests(executor, (9,), 100)[0])
    rows: list[int] = []
    run = products.linear_group

    def counted(x: torch.Tensor, weights: Any, biases: Any = ()) -> Any:
        rows.append(len(x))
        return run(x, weights, biases)

    monkeypatch.setattr(products, "linear_group", counted)
    while not job.tokens:
        rows.clear()
        engine.step()
    layers = executor.program.config["num_hidden_layers"]
    # The prompt and those that train: q k v, o, gate up, down.
    assert rows == [9 + job.tokens] * 4 * layers


def test_jobs_go_back_through_the_base_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for the windows of all, whatever they train; each trains what it does alone."""
    recipes = {"lora": LORA, "few": {**LORA, "target_modules": ["q_proj", "down_proj"]}}
    executor, alone = make_executor(), make_executor()
    engine = make_engine(executor, 64)
    jobs = [engine.finetune(DATA, name, peft=peft, **OPTIONS) for name, peft in recipes.items()]
    rows: list[int] = []
    run = input_gradient.linear_backward

    def counted(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if dy.shape[-1] < executor.program.base.vocabulary:  # not in a loss
            rows.append(len(dy))
        return run(dy, weight)

    monkeypatch.setattr(input_gradient, "linear_backward", counted)
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    # 7 products, and 4 in the first layer, where nobody asks below q, k and v, for three batches.
    assert rows == [2 * tokens for tokens in (51, 20, 51) for _ in range(7 + 4)]
    for job, (name, peft) in zip(jobs, recipes.items(), strict=True):
        assert job.error is None
        alone.finetune(DATA, name, peft=peft, progress=False, **OPTIONS)
        ours, theirs = (e.adapters[name].tensors for e in (executor, alone))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_promises_bound_finetuning() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64, Limits(tpot_slo_s=0.5, idle_step_s=0.05))
    engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    asked = requests(executor, LENGTHS)
    assert [list(c.token_ids) for c in serve(engine, asked)] == expected(asked)
    assert engine.log.of("trained")[-1].kind is Kind.COMPLETED


def test_what_is_given_up() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64)
    first, second = (engine.submit(request) for request in requests(executor, (5, 6)))
    engine.step()
    engine.cancel(first)
    engine.cancel(first)
    chunks = engine.step()
    assert [c.completion.finish_reason for c in chunks if c.completion] == ["cancelled"]
    late = Request((1, 2, 3), SamplingParams(max_new_tokens=4), timeout_s=1e-9)
    engine.submit(late)
    reasons = [c.completion.finish_reason for c in engine.step() if c.completion]
    assert reasons == ["timed_out"]
    engine.cancel(second)
    engine.step()
    engine.check_integrity()
    assert engine.is_idle
    small = make_engine(executor, 4)
    with pytest.raises(OutOfMemoryError, match="request 0 needs 7 pages, and the engine has 4"):
        small.submit(Request(tuple(range(100)), SamplingParams(max_new_tokens=4)))
    assert [event.kind for event in small.log] == [Kind.SUBMITTED, Kind.REFUSED]


def test_a_request_that_needs_what_jobs_may_hold_does_not_wait_for_their_end() -> None:
    executor = make_executor()
    engine = make_engine(executor, 8, Limits(tokens=32))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine.submit(Request(tuple(prompts((20,))[0]), params))
    engine.step()
    engine.submit(Request(tuple(prompts((100,))[0]), params))  # all pages; jobs may hold 4
    engine.finetune(DATA, "trained", peft=LORA, max_steps=10**6, batch_size=1)
    lengths = []
    for _ in range(120):
        done = [chunk.completion for chunk in engine.step() if chunk.completion is not None]
        lengths += [len(completion.token_ids) for completion in done]
        engine.check_integrity()
    assert lengths == [20, 20]
    assert engine.jobs


def test_jobs_pause_resume_and_end() -> None:
    executor = make_executor()
    engine = make_engine(executor, 64, Limits(tokens=16))
    engine.finetune(DATA, "one", peft=LORA, **OPTIONS)
    engine.finetune(DATA, "two", peft=LORA, **OPTIONS)
    with pytest.raises(PcgError, match="there is a job 'one' already"):
        engine.finetune(DATA, "one", peft=LORA, **OPTIONS)
    for _ in range(4):
        engine.step()
    engine.pause_job("one")
    while len(engine.jobs) > 1:
        engine.step()
        engine.check_integrity()
    assert engine.is_idle
    engine.resume_job("one")
    engine.step()
    engine.cancel_job("one")
    engine.check_integrity()
    kinds = [event.kind for event in engine.log.of("one")]
    assert kinds[0] is Kind.QUEUED
    assert kinds[-3:] == [Kind.PAUSED, Kind.RESUMED, Kind.CANCELLED]
    assert engine.log.of("two")[-1].kind is Kind.COMPLETED
    assert sorted(executor.adapters) == ["a", "two"]


def test_memory_is_taken_as_it_is_used_and_free_when_the_engine_is_dropped() -> None:
    executor = make_executor()
    resident = resident_bytes()
    engine = executor.engine(kv_cache_bytes=2**30)
    engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    serve(engine, requests(executor, LENGTHS))
    assert resident_bytes() - resident < 2**28
    cache = weakref.ref(engine.device.cache)
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
