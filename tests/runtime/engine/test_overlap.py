"""Steps that begin before the tokens of the step before are read: the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

import pcg.compiler as compiler
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.interpreter.streams import ORDER
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

EXECUTOR = make_executor()


def ahead(engine: Engine) -> Engine:
    """The engine, on a device that says of itself that it runs beside the host."""
    engine.device.is_ahead = True
    return engine


def life(engine: Engine, seed: int) -> tuple[dict[int, list[Any]], dict[int, Chunk]]:
    """Tokens, texts and logprobs of requests that come and are cancelled at random, and ends.

    A cancelled request has the same first tokens, however many.
    """
    random = Random(seed)
    asked = load(random)
    came: dict[int, list[Any]] = {}
    ends: dict[int, Chunk] = {}
    names: list[str] = []
    for step in range(1000):
        while asked and random.random() < 0.5:
            names.append(engine.submit(asked.pop(0)))
        if step % 7 == 5 and names:
            engine.cancel(names[random.randrange(len(names))])
        for chunk in engine.step():
            if chunk.token_id is not None:
                key = 8 * chunk.index + chunk.choice
                came.setdefault(key, []).append((chunk.token_id, chunk.logprobs))
            if chunk.completion is not None:
                ends[8 * chunk.index + chunk.choice] = chunk
        engine.check_integrity()
        if not asked and engine.is_idle:
            return came, ends
    raise AssertionError("the engine goes on for ever")


def load(random: Random) -> list[Request]:
    """Requests of every kind that depends on the tokens before, or on no token at all."""
    common = prompts((40,))[0]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True, "logprobs": 2},
        {"temperature": 1.2, "top_k": 30},
        {"temperature": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "bad_words": ((5, 6), (9,)), "min_tokens": 4},
        {"temperature": 2.0, "stop_token_ids": tuple(range(0, 128, 5))},
        {"temperature": 1.0, "n": 3},
        {"temperature": 1.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "max_new_tokens": 1},
    ]
    found = []
    for number in range(24):
        own = prompts((random.randrange(1, 30),))[0]
        ids = common[: random.choice((0, 0, 20, 40))] + own
        fields = {"max_new_tokens": random.randrange(4, 12)} | kinds[number % len(kinds)]
        params = SamplingParams(seed=number, **fields)
        adapter = EXECUTOR.adapters["a"] if random.random() < 0.5 else None
        found.append(Request(tuple(ids), params, adapter, f"t{number % 3}"))
    return found


@pytest.mark.parametrize(("pages", "seed"), [(200, 0), (14, 1), (14, 2)])
def test_tokens_are_those_of_steps_one_by_one(pages: int, seed: int) -> None:
    """With preemption, prefixes, cancelled requests, stops, penalties, adapters and logprobs."""
    limits = Limits(running=8, tokens=32, least_chunk=4)
    mine, ends = life(ahead(make_engine(EXECUTOR, pages, limits)), seed)
    alone = EXECUTOR.engine(Limits(tokens=512), kv_cache_bytes=2**24)
    numbers = [alone.submit(request) for request in load(Random(seed))]
    theirs: dict[int, list[Any]] = {}
    while not alone.is_idle:
        for chunk in alone.step():
            if chunk.token_id is not None:
                key = 8 * chunk.index + chunk.choice
                theirs.setdefault(key, []).append((chunk.token_id, chunk.logprobs))
    assert len(numbers) == 24
    whole = 0
    for key, chunk in ends.items():
        assert chunk.error is None
        assert chunk.completion is not None
        is_whole = chunk.completion.finish_reason in ("stop", "length")
        whole += is_whole
        ours, others = mine.get(key, []), theirs[key]
        assert [one for one, _ in ours] == [one for one, _ in others[: len(ours)]], key
        assert len(ours) == len(others) or not is_whole
        for (_, found), (_, other) in zip(ours, others, strict=False):
            assert (found is None) == (other is None)
            if found is not None and other is not None:
                assert found.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert whole > 8


def test_tokens_are_those_of_transformers() -> None:
    """Beside a job, too, during which no step is ahead."""
    asked = requests(EXECUTOR, LENGTHS)
    engine = ahead(make_engine(EXECUTOR, 64, Limits(tokens=20)))
    done = serve(engine, asked, 2)
    assert [list(one.token_ids) for one in done] == expected(asked)
    job = engine.finetune(DATA, "trained", peft=LORA, **OPTIONS)
    for request in asked[:3]:
        engine.submit(request)
    done = serve(engine, asked[3:], 2)[-len(asked) :]
    assert [list(one.token_ids) for one in done] == expected(asked)
    assert job.error is None
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
    engine = ahead(make_engine(EXECUTOR, 64))
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


def test_a_sequence_that_ended_has_one_row_more() -> None:
    """It draws no token for it, and its pages are free."""
    (request,) = requests(EXECUTOR, (5,), new=8)
    third = expected([request])[0][2]
    params = SamplingParams(max_new_tokens=8, temperature=0.0, stop_token_ids=(third,))
    engine = ahead(make_engine(EXECUTOR, 64))
    seen = watched(engine)
    first = expected([request])[0].index(third)
    engine.submit(Request(request.prompt_ids, params, request.adapter))
    (done,) = serve(engine, [])
    assert list(done.token_ids) == expected([request])[0][: first + 1]
    assert seen.count(f"start {first + 1}") == 1
    assert engine.pool.free + engine.scheduler.adapters.idle_pages == engine.pool.size
    assert engine.totals.output_tokens == first + 1


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


def test_a_request_that_breaks_its_steps_is_dropped() -> None:
    engine = ahead(make_engine(EXECUTOR, 64, Limits(tokens=20)))
    start = engine.device.start

    def broken(chunks: Any, windows: Any) -> Any:
        if any(one.number == 2 and one.ahead + len(one.generated) == 3 for one, _ in chunks):
            raise RuntimeError("a kernel failed")
        return start(chunks, windows)

    engine.device.start = broken  # type: ignore[method-assign]
    asked = requests(EXECUTOR, LENGTHS, 8)
    for request in asked:
        engine.submit(request)
    done = serve(engine, [])
    wanted = expected(asked)
    wanted[2] = wanted[2][:3]
    assert [list(one.token_ids) for one in done] == wanted
    assert [one.finish_reason for one in done].count("failed") == 1


# ------------------------------------------------------------- on the stand-in for a GPU


def on_gpu(act: Callable[[Executor], None]) -> None:
    """Run with a GPU whose copies to the host are not there before an event was waited for."""
    with tensors_on_cuda():
        base = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
        act(compiler.compile(base, backend="torch", device="cuda"))


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


def test_tokens_of_a_gpu_are_those_of_the_cpu() -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 3, "logprobs": 2},
        {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.4, "stop_token_ids": (7, 8, 9)},
        {"temperature": 1.0, "seed": 2, "n": 2},
    ]
    found: dict[str, Any] = {}

    def act(executor: Executor) -> None:
        engine = executor.engine(Limits(tokens=16, least_chunk=4), kv_cache_bytes=2**20)
        for ids, fields in zip(prompts((9, 4, 20, 5)), params, strict=True):
            engine.submit(executor.request(ids, max_new_tokens=8, **fields))
        tokens: dict[tuple[int, int], list[int | None]] = {}
        while not engine.is_idle:
            for chunk in engine.step():
                tokens.setdefault((chunk.index, chunk.choice), []).append(chunk.token_id)
        found[executor.device.type] = tokens

    on_gpu(act)
    base = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
    act(compiler.compile(base, backend="torch"))
    assert found["cuda"] == found["cpu"]
