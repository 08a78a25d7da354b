"""Several continuations of one prompt: their tokens are those of several requests."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from pcg.errors import GenerationError, PcgError
from pcg.kernels.sizes import PAGE_TOKENS
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.requests.request import Chunk, Completion
from tests.support import oracle
from tests.support.prompts import TOLERANCE, prompts
from tests.support.small_engine import make_engine, make_executor, models, poisoned

DRAWN: dict[str, Any] = {
    "temperature": 1.0,
    "max_new_tokens": 12,
    "ignore_eos": True,
    "repetition_penalty": 1.1,
}


@functools.cache
def shared() -> Executor:
    return make_executor()


def run(engine: Engine) -> list[Chunk]:
    chunks: list[Chunk] = []
    for _ in range(500):
        chunks += engine.step()
        engine.check_integrity()
        if engine.is_idle:
            assert engine.pool.free + engine.scheduler.adapters.idle_pages == engine.pool.size
            return chunks
    raise AssertionError("the engine goes on for ever")


def completions(chunks: list[Chunk], index: int) -> list[Completion]:
    """Return a request's completions; its last chunk is the only one that says so."""
    mine = [chunk for chunk in chunks if chunk.index == index]
    assert [chunk.is_last for chunk in mine] == [False] * (len(mine) - 1) + [True]
    found = {chunk.choice: chunk.completion for chunk in mine if chunk.completion is not None}
    for choice, completion in found.items():
        assert completion.index == choice
        tokens = [c.token_id for c in mine if c.choice == choice and c.token_id is not None]
        assert tokens in ([], list(completion.token_ids))
    return [found[choice] for choice in range(len(found))]


@pytest.mark.parametrize("length", [5, 2 * PAGE_TOKENS, 37])
def test_as_many_requests_with_the_next_seeds(length: int) -> None:
    executor = shared()
    (prompt,) = prompts((length,))
    apart = executor.generate([prompt] * 4, "a", seed=7, **DRAWN)
    together = executor.generate([prompt], "a", seed=7, n=4, **DRAWN)
    assert [one.token_ids for one in together] == [one.token_ids for one in apart]
    assert [one.index for one in together] == [0, 1, 2, 3]
    assert len({one.token_ids for one in together}) == 4


def test_programs_for_triton() -> None:
    executor = make_executor("triton")
    (prompt,) = prompts((PAGE_TOKENS + 2,))
    new = {**DRAWN, "max_new_tokens": 2}
    apart = executor.generate([prompt] * 2, "a", seed=7, **new)
    together = executor.generate([prompt], "a", seed=7, n=2, **new)
    assert [one.token_ids for one in together] == [one.token_ids for one in apart]


def test_prompts_beside_each_other_have_seeds_of_their_own() -> None:
    executor = shared()
    one, other = prompts((9, 20))
    apart = executor.generate([one, one, other, other], [None, None, "a", "a"], seed=3, **DRAWN)
    together = executor.generate([one, other], [None, "a"], seed=3, n=2, **DRAWN)
    assert [c.token_ids for c in together] == [c.token_ids for c in apart]


@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_is_computed_once_and_its_pages_are_shared(caching: bool) -> None:
    executor = shared()
    page = bytes_of_page(kv_types(executor.serving.runner.model))
    engine = executor.engine(kv_cache_bytes=64 * page, prefix_caching=caching)
    (prompt,) = prompts((40,))
    engine.submit(executor.request(prompt, "a", n=5, seed=1, **DRAWN))
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
def test_where_pages_or_places_are_few(caching: bool) -> None:
    """Continuations wait, are preempted, and are computed each: with the same tokens."""
    executor = shared()
    page = bytes_of_page(kv_types(executor.serving.runner.model))
    (prompt,) = prompts((37,))
    wanted = [list(c.token_ids) for c in executor.generate([prompt] * 6, "a", seed=5, **DRAWN)]
    for pages, limits in ((12, Limits(tokens=16)), (64, Limits(running=2)), (8, None)):
        engine = executor.engine(limits, kv_cache_bytes=pages * page, prefix_caching=caching)
        engine.submit(executor.request(prompt, "a", n=6, seed=5, **DRAWN))
        engine.submit(executor.request(prompt[:9], max_new_tokens=30, ignore_eos=True))
        chunks = run(engine)
        assert [list(c.token_ids) for c in completions(chunks, 0)] == wanted
        report = serving_report(engine.log)
        assert report.count(report.requests[0].outcome) == len(report.requests) == 7


def test_logprobs_of_the_prompt_are_computed_once() -> None:
    executor = shared()
    base, _ = models()
    (prompt,) = prompts((21,))
    done = executor.generate([prompt], n=3, seed=2, prompt_logprobs=1, logprobs=1, **DRAWN)
    rows = oracle.logits(base, prompt).log_softmax(-1)
    for one in done:
        assert one.prompt_logprobs is not None
        assert one.prompt_logprobs[0] is None
        for token, found, row in zip(prompt[1:], one.prompt_logprobs[1:], rows, strict=False):
            assert found is not None
            assert abs(found.logprob - float(row[token])) < TOLERANCE
        assert len(one.logprobs or ()) == 12
    assert done[0].prompt_logprobs == done[1].prompt_logprobs == done[2].prompt_logprobs
    alone = executor.generate([prompt], n=3, max_new_tokens=0, prompt_logprobs=1)
    assert [one.prompt_logprobs for one in alone] == [done[0].prompt_logprobs] * 3


def test_the_best_of_several() -> None:
    executor = shared()
    (prompt,) = prompts((14,))
    every = executor.generate([prompt], "a", n=8, seed=11, logprobs=0, **DRAWN)
    ranked = sorted(every, key=lambda one: -(one.cumulative_logprob or 0.0))
    chunks = list(executor.generate([prompt], "a", n=2, best_of=8, seed=11, stream=True, **DRAWN))
    best = completions(chunks, 0)
    assert len(chunks) == 2
    assert [one.token_ids for one in best] == [one.token_ids for one in ranked[:2]]
    assert [one.logprobs for one in best] == [None, None]
    (one,) = executor.generate([prompt], "a", best_of=8, seed=11, logprobs=0, **DRAWN)
    assert one.token_ids == ranked[0].token_ids
    assert one.cumulative_logprob == ranked[0].cumulative_logprob


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_ends_all_of_them(steps: int) -> None:
    executor = shared()
    engine = make_engine(executor, 64, Limits(running=3))
    (prompt,) = prompts((20,))
    name = engine.submit(executor.request(prompt, "a", n=4, seed=1, **DRAWN))
    chunks = [chunk for _ in range(steps) for chunk in engine.step()]
    engine.cancel(name)
    chunks += run(engine)
    done = completions(chunks, 0)
    assert [one.finish_reason for one in done] == ["cancelled"] * 4
    engine.cancel(name)


def test_cancelling_after_the_first_has_ended() -> None:
    executor = shared()
    (prompt,) = prompts((20,))
    fields = {**DRAWN, "max_new_tokens": 60}
    firsts = executor.generate([prompt], n=3, seed=9, **fields)
    stop = next(t for t in firsts[0].token_ids if all(t not in o.token_ids for o in firsts[1:]))
    engine = make_engine(executor, 64)
    name = engine.submit(executor.request(prompt, n=3, seed=9, stop_token_ids=[stop], **fields))
    chunks: list[Chunk] = []
    while not any(chunk.completion is not None for chunk in chunks):
        chunks += engine.step()
    engine.cancel(name)
    reasons = [one.finish_reason for one in completions(chunks + run(engine), 0)]
    assert reasons == ["stop", "cancelled", "cancelled"]


def test_one_that_fails_ends_the_request_with_one_error() -> None:
    executor = make_executor()
    poisoned(executor, math.nan)
    engine = make_engine(executor, 64)
    (prompt,) = prompts((20,))
    engine.submit(executor.request(prompt, "bad", n=4, **DRAWN))
    engine.submit(executor.request(prompt, n=2, seed=0, **DRAWN))
    chunks = run(engine)
    (failed,) = (chunk for chunk in chunks if chunk.index == 0)
    assert failed.is_last
    assert isinstance(failed.error, GenerationError)
    good = executor.generate([prompt], n=2, seed=0, **DRAWN)
    assert [c.token_ids for c in completions(chunks, 1)] == [c.token_ids for c in good]
    kinds = [event.kind for event in engine.log if event.subject.startswith("request 0")]
    assert kinds.count(Kind.FAILED) == kinds.count(Kind.SUBMITTED) == 4


@pytest.mark.parametrize("failing", [0, 1, 4])
def test_a_step_that_fails_is_computed_again(failing: int) -> None:
    executor = shared()
    (prompt,) = prompts((20,))
    wanted = [c.token_ids for c in executor.generate([prompt], n=3, seed=4, **DRAWN)]
    engine = make_engine(executor, 64)
    engine.submit(executor.request(prompt, n=3, seed=4, **DRAWN))
    engine.submit(executor.request(prompt, "a", n=2, seed=4, **DRAWN))
    start, count = engine.device.start, iter(range(10**6))

    def broken(chunks: Any, windows: Any) -> Any:
        end = start(chunks, windows)
        if next(count) == failing:
            raise RuntimeError("once")
        return end

    engine.device.start = broken  # type: ignore[method-assign]
    assert [c.token_ids for c in completions(run(engine), 0)] == wanted


def test_streams_of_a_running_engine() -> None:
    executor = make_executor()
    (prompt,) = prompts((20,))
    wanted = [c.token_ids for c in executor.generate([prompt], n=3, seed=4, **DRAWN)]
    with executor.engine().start() as running:
        stream = running.submit(prompt, n=3, seed=4, **DRAWN)
        assert [one.token_ids for one in stream.wait_all(60)] == wanted
        assert stream.wait(60).token_ids == wanted[0]
        assert {chunk.choice for chunk in stream} == {0, 1, 2}
        assert [
            one.token_ids for one in executor.generate([prompt], n=3, seed=4, **DRAWN)
        ] == wanted


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
def test_bad_numbers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PcgError, match=message):
        shared().generate([[1, 2], [3]], **fields)
