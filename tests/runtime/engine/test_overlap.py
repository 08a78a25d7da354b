"""Steps that begin before the tokens of the step before are read: the tokens are the same.

`test_hostile.py` runs random programs of requests and jobs in such steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Kind
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.interpreter.streams import ORDER
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
    requests,
    serve,
    tokens,
)
from tests.support.step_gate import nothing, when_read

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
