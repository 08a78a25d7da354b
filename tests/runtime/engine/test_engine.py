"""The engine: greedy tokens are those of transformers for any load, and no page is lost."""

from __future__ import annotations

import functools
import gc
import math
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.errors import GenerationError, OutOfMemoryError, PcgError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.kernels.torch import input_gradient, products
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.requests.step import Load
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.interpreter.streams import ORDER
from tests.support.linear_costs import certain
from tests.support.prompts import prompts
from tests.support.small_engine import (
    DATA,
    LENGTHS,
    LORA,
    OPTIONS,
    check_trained,
    expected,
    make_engine,
    make_executor,
    poisoned,
    requests,
    run,
    serve,
    tokens,
)
from tests.support.step_gate import nothing, when_read


@pytest.mark.parametrize(
    ("every", "pages", "limits"),
    [
        pytest.param(1, 64, None, id="at-once"),
        pytest.param(3, 64, None, id="every-3", marks=pytest.mark.slow),
        pytest.param(30, 64, None, id="every-30", marks=pytest.mark.slow),
        pytest.param(1, 64, Limits(tokens=8, least_chunk=3), id="chunks"),
        pytest.param(1, 12, None, id="preempted"),
    ],
)
def test_tokens_are_those_of_transformers(every: int, pages: int, limits: Limits | None) -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS, 40 if pages == 12 else 20)
    engine = make_engine(executor, pages, limits)
    assert tokens(serve(engine, asked, every)) == expected(asked)
    assert any(event.kind is Kind.PREEMPTED for event in engine.log) == (pages == 12)
    assert engine.pool.free + engine.scheduler.adapters.idle_pages == pages


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
    """As on a GPU, parts begin before the forward's tokens are read; the adapter is the same."""
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    latencies = Latencies(Latency(1e-4, 1e-7, 0.0), Latency(1e-4, 1e-7, 0.0))
    engine = make_engine(executor, 64, Limits(tokens=20, tpot_slo_s=60.0), latencies=latencies)
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
    assert tokens(serve(engine, asked, 3)) == expected(asked)
    assert job.error is None
    check_trained(executor)
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
    engine = make_engine(executor, 64, Limits(tokens=20, least_chunk=4), latencies=known)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    engine.submit(requests(executor, (9,), 100)[0])
    rows: list[int] = []
    group = products.linear_group

    def counted(x: torch.Tensor, weights: Any, biases: Any = ()) -> Any:
        rows.append(len(x))
        return group(x, weights, biases)

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
    executor = make_executor()
    engine = make_engine(executor)
    jobs = [engine.finetune(DATA, name, peft=peft, **OPTIONS) for name, peft in recipes.items()]
    rows: list[int] = []
    backward = input_gradient.linear_backward

    def counted(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if dy.shape[-1] < executor.program.base.vocabulary:  # not in a loss
            rows.append(len(dy))
        return backward(dy, weight)

    monkeypatch.setattr(input_gradient, "linear_backward", counted)
    run(engine)
    # 7 products, and 4 in the first layer, where nobody asks below q, k and v, for three batches.
    assert rows == [2 * count for count in (51, 20, 51) for _ in range(7 + 4)]
    for job, (name, peft) in zip(jobs, recipes.items(), strict=True):
        assert job.error is None
        check_trained(executor, name, peft)


def test_requests_that_are_cancelled_time_out_or_never_fit() -> None:
    executor = make_executor()
    engine = make_engine(executor)
    first, second = (engine.submit(request) for request in requests(executor, (5, 6)))
    engine.step()
    engine.cancel(first)
    engine.cancel(first)
    chunks = engine.step()
    assert [c.completion.finish_reason for c in chunks if c.completion] == ["cancelled"]
    engine.submit(Request((1, 2, 3), SamplingParams(max_new_tokens=4), timeout_s=1e-9))
    reasons = [c.completion.finish_reason for c in engine.step() if c.completion]
    assert reasons == ["timed_out"]
    engine.cancel(second)
    run(engine)
    small = make_engine(executor, 4)
    with pytest.raises(OutOfMemoryError, match="request 0 needs 7 pages, and the engine has 4"):
        small.submit(Request(tuple(range(100)), SamplingParams(max_new_tokens=4)))
    assert [event.kind for event in small.log] == [Kind.SUBMITTED, Kind.REFUSED]


def test_a_request_that_needs_what_jobs_may_hold_does_not_wait_for_their_end() -> None:
    engine = make_engine(make_executor(), 8, Limits(tokens=32))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine.submit(Request(tuple(prompts((20,))[0]), params))
    engine.step()
    engine.submit(Request(tuple(prompts((100,))[0]), params))  # all pages; jobs may hold 4
    engine.finetune(DATA, "trained", peft=LORA, max_steps=10**5, batch_size=1)
    lengths: list[int] = []
    while len(lengths) < 2:
        done = [chunk.completion for chunk in engine.step() if chunk.completion is not None]
        lengths += [len(completion.token_ids) for completion in done]
        engine.check_integrity()
    assert lengths == [20, 20]
    assert len(engine.jobs) == 1


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
    run(engine)
    assert len(engine.jobs) == 1
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


SCRIPT = """
import os, sys
from pcg.errors import EngineError
from tests.support.small_engine import make_executor

executor = make_executor()
engine = executor.engine().start()
engine.submit([1, 2, 3], max_new_tokens=100, ignore_eos=True)
child = os.fork()
if not child:
    asked = (lambda: executor.generate([[1, 2]], max_new_tokens=2), lambda: engine.submit([1]))
    for ask in asked:
        try:
            ask()
        except EngineError as error:
            print(error, flush=True)
    engine.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_that_ends_or_forks_neither_aborts_nor_hangs() -> None:
    """A thread within a kernel would abort its process; in a fork, nobody answers."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr
    assert "terminate" not in done.stderr
    *refused, child = done.stdout.splitlines()
    assert child == "7"
    assert len(refused) == 2
    assert all("is a fork; make one here" in line for line in refused)


# ------------------------------------------------------------------------------- continuations

DRAWN: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": 12,
    "ignore_eos": True,
    "repetition_penalty": 1.1,
}


@functools.cache
def shared() -> Executor:
    return make_executor()


def completions(chunks: list[Chunk], index: int) -> list[Completion]:
    """Return a request's completions; its last chunk is the only one that says so."""
    mine = [chunk for chunk in chunks if chunk.index == index]
    assert [chunk.is_last for chunk in mine] == [False] * (len(mine) - 1) + [True]
    found = {chunk.choice: chunk.completion for chunk in mine if chunk.completion is not None}
    for choice, completion in found.items():
        assert completion.index == choice
        streamed = [c.token_id for c in mine if c.choice == choice and c.token_id is not None]
        assert streamed in ([], list(completion.token_ids))
    return [found[choice] for choice in range(len(found))]


@pytest.mark.parametrize("length", [5, 2 * PAGE_TOKENS, 37])
def test_continuations_are_requests_with_the_next_seeds(length: int) -> None:
    (prompt,) = prompts((length,))
    apart = shared().generate([prompt] * 4, "a", seed=7, **DRAWN)
    together = shared().generate([prompt], "a", seed=7, n=4, **DRAWN)
    assert tokens(together) == tokens(apart)
    assert [one.index for one in together] == [0, 1, 2, 3]
    assert len({one.token_ids for one in together}) == 4


@pytest.mark.parametrize("caching", [True, False])
def test_continuations_share_the_pages_of_a_prompt_that_is_computed_once(caching: bool) -> None:
    engine = make_engine(shared(), 64, prefix_caching=caching)
    (prompt,) = prompts((40,))
    engine.submit(shared().request(prompt, "a", n=5, seed=1, **DRAWN))
    loads, start = [], engine.device.start

    def counting(chunks: Any, windows: Any) -> Any:
        loads.append(sum(count for _, count in chunks))
        return start(chunks, windows)

    engine.device.start = counting  # type: ignore[method-assign]
    chunks = engine.step()
    assert [chunk.choice for chunk in chunks] == [0, 1, 2, 3, 4]
    pages = [one.table.pages for one in engine.scheduler.running if one.table is not None]
    assert len({tuple(own[:2]) for own in pages}) == 1
    assert len({own[2] for own in pages}) == 5
    chunks += run(engine)
    assert loads == [40] + [5] * 11
    assert [len(one.token_ids) for one in completions(chunks, 0)] == [12] * 5


@pytest.mark.parametrize("caching", [True, False])
def test_continuations_where_pages_or_places_are_few(caching: bool) -> None:
    """Continuations wait, are preempted, and are computed each: with the same tokens."""
    executor = shared()
    (prompt,) = prompts((37,))
    wanted = tokens(executor.generate([prompt] * 6, "a", seed=5, **DRAWN))
    for pages, limits in ((12, Limits(tokens=16)), (64, Limits(running=2)), (8, None)):
        engine = make_engine(executor, pages, limits, prefix_caching=caching)
        engine.submit(executor.request(prompt, "a", n=6, seed=5, **DRAWN))
        engine.submit(executor.request(prompt[:9], max_new_tokens=30, ignore_eos=True))
        assert tokens(completions(run(engine), 0)) == wanted
        report = serving_report(engine.log)
        assert report.count(report.requests[0].outcome) == len(report.requests) == 7


def test_the_best_of_several() -> None:
    executor = shared()
    (prompt,) = prompts((14,))
    every = executor.generate([prompt], "a", n=8, seed=11, logprobs=0, **DRAWN)
    ranked = sorted(every, key=lambda one: -(one.cumulative_logprob or 0.0))
    chunks = list(executor.generate([prompt], "a", n=2, best_of=8, seed=11, stream=True, **DRAWN))
    best = completions(chunks, 0)
    assert len(chunks) == 2
    assert tokens(best) == tokens(ranked[:2])
    assert [one.logprobs for one in best] == [None, None]
    (one,) = executor.generate([prompt], "a", best_of=8, seed=11, logprobs=0, **DRAWN)
    assert one.token_ids == ranked[0].token_ids
    assert one.cumulative_logprob == ranked[0].cumulative_logprob


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_ends_all_continuations(steps: int) -> None:
    engine = make_engine(shared(), 64, Limits(running=3))
    (prompt,) = prompts((20,))
    name = engine.submit(shared().request(prompt, "a", n=4, seed=1, **DRAWN))
    chunks = [chunk for _ in range(steps) for chunk in engine.step()]
    engine.cancel(name)
    done = completions(chunks + run(engine), 0)
    assert [one.finish_reason for one in done] == ["cancelled"] * 4
    engine.cancel(name)


def test_a_continuation_that_fails_ends_the_request_with_one_error() -> None:
    executor = make_executor()
    poisoned(executor, math.nan)
    engine = make_engine(executor)
    (prompt,) = prompts((20,))
    engine.submit(executor.request(prompt, "bad", n=4, **DRAWN))
    engine.submit(executor.request(prompt, n=2, seed=0, **DRAWN))
    chunks = run(engine)
    (failed,) = (chunk for chunk in chunks if chunk.index == 0)
    assert failed.is_last
    assert isinstance(failed.error, GenerationError)
    good = executor.generate([prompt], n=2, seed=0, **DRAWN)
    assert tokens(completions(chunks, 1)) == tokens(good)
    kinds = [event.kind for event in engine.log if event.subject.startswith("request 0")]
    assert kinds.count(Kind.FAILED) == kinds.count(Kind.SUBMITTED) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, r"n=0; use an int of at least 1 and at most 128"),
        ({"n": 10**6}, r"n=1000000; use .* at most 128"),
        ({"n": "2"}, r"n='2'"),
        ({"n": [1, 2]}, r"n=\[1, 2\]"),
        ({"n": 3, "best_of": 2}, r"best_of=2; use an int of at least 3.*not below n=3"),
        ({"best_of": 1.5}, r"best_of=1.5"),
    ],
)
def test_bad_numbers_of_continuations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PcgError, match=message):
        shared().generate([[1, 2], [3]], **fields)


# -------------------------------------------------------------------------------------- steps ahead

EXECUTOR = make_executor()


def ahead(engine: Engine) -> Engine:
    """Have the engine's device say that it runs beside the host."""
    engine.device.is_ahead = True
    return engine


def test_tokens_are_those_of_transformers_and_a_job_trains_what_it_does_alone() -> None:
    asked = requests(EXECUTOR, LENGTHS)
    engine = ahead(make_engine(EXECUTOR, 64, Limits(tokens=20)))
    assert tokens(serve(engine, asked, 2)) == expected(asked)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    for request in asked[:3]:
        engine.submit(request)
    assert tokens(serve(engine, asked[3:], 2)[-len(asked) :]) == expected(asked)
    assert job.error is None
    check_trained(EXECUTOR)
    EXECUTOR.remove_adapter("trained")
    kinds = [event.kind for event in engine.log]
    assert kinds.count(Kind.SUBMITTED) == kinds.count(Kind.FINISHED) == 2 * len(asked)
    assert engine.totals.output_tokens == 2 * sum(map(len, expected(asked)))


def watched(engine: Engine) -> list[str]:
    """What the engine asks of its device, in order: starts and reads, by their numbers."""
    seen: list[str] = []
    start, number = engine.device.start, iter(range(10**6))

    def started(chunks: Any, windows: Any) -> Any:
        name = f"{next(number)}"
        seen.append(f"start {name}")
        running = start(chunks, windows)
        draw = running.draw

        def drawn() -> None:
            seen.append(f"draw {name}")
            draw()

        running.draw = drawn  # type: ignore[method-assign]
        return when_read(running, lambda: seen.append(f"read {name}"), nothing)

    engine.device.start = started  # type: ignore[method-assign]
    return seen


def test_a_step_is_started_before_the_one_before_is_read() -> None:
    """And drawn after it was; the last token, whose length is known, starts no further step."""
    engine = ahead(make_engine(EXECUTOR))
    seen = watched(engine)
    (request,) = requests(EXECUTOR, (5,), new=3)
    engine.submit(request)
    counts = []
    while not engine.is_idle:
        counts.append(len(engine.step()))
    assert seen == [
        *("start 0", "draw 0"),
        *("start 1", "read 0", "draw 1"),
        *("start 2", "read 1", "draw 2", "read 2"),
    ]
    assert counts == [0, 1, 1, 1]


@pytest.mark.parametrize("where", ["start", "draw", "read"])
@pytest.mark.parametrize("failing", [0, 3])
def test_a_step_that_fails_once_is_computed_again(where: str, failing: int) -> None:
    engine = ahead(make_engine(EXECUTOR, 64, Limits(tokens=20)))
    start, number = engine.device.start, iter(range(10**6))

    def fail(name: str) -> None:
        if name == where:
            raise RuntimeError("once")

    def broken(chunks: Any, windows: Any) -> Any:
        if next(number) != failing:
            return start(chunks, windows)
        running = start(chunks, windows)
        fail("start")
        draw = running.draw

        def drawn() -> None:
            fail("draw")
            draw()

        running.draw = drawn  # type: ignore[method-assign]
        return when_read(running, lambda: fail("read"), nothing)

    engine.device.start = broken  # type: ignore[method-assign]
    asked = requests(EXECUTOR, LENGTHS, 8)
    for request in asked[:3]:
        engine.submit(request)
    done = serve(engine, asked[3:], 2)
    assert [list(one.token_ids) for one in done] == expected(asked)


def on_gpu(act: Callable[[Executor], None]) -> None:
    """Run with a GPU whose copies to the host are not there before an event was waited for."""
    with tensors_on_cuda():
        base = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
        act(compiled.executor(base, backend="torch", device="cuda"))


def test_the_host_waits_once_a_step_while_the_next_one_runs() -> None:
    """By an event that is over before the next step is: what is read is no later one's."""

    def act(executor: Executor) -> None:
        engine = executor.engine(kv_cache_bytes=2**20)
        assert engine.device.is_ahead
        for ids in prompts((5, 9)):
            engine.submit(executor.request(ids, max_new_tokens=8, ignore_eos=True))
        for _ in range(3):
            engine.step()
        ran: list[int] = []
        wait = ORDER.wait

        def waits(why: str, clock: Any) -> None:
            ran.append(len(ORDER.current.ran) - clock[ORDER.current.number])
            assert why == "Event.synchronize"
            wait(why, clock)

        ORDER.wait = waits  # type: ignore[method-assign]
        try:
            chunks = [*engine.step(), *engine.step()]
        finally:
            ORDER.wait = wait  # type: ignore[method-assign]
        assert len(chunks) == 4
        assert len(ran) == 2
        assert min(ran) > 20  # the next step's operators, which the host did not wait for

    on_gpu(act)
