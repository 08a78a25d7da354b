"""What fails fails alone: bad requests, adapters, jobs and callbacks, beside others' tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcg.errors import (
    AdapterError,
    EngineError,
    FinetuneError,
    GenerationError,
    OutOfMemoryError,
)
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.metrics.status import JobState
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.work_units import Phase, Stage
from tests.support.prompts import prompts
from tests.support.small_engine import (
    DATA,
    LENGTHS,
    LORA,
    NEW,
    OPTIONS,
    expected,
    make_engine,
    make_executor,
    poisoned,
    requests,
)
from tests.support.started_steps import nothing, when_read


def run(engine: Engine, most: int = 2000) -> dict[int, Chunk]:
    """Run until nothing is left; returns the last chunk of each request."""
    ends: dict[int, Chunk] = {}
    for _ in range(most):
        ends |= {chunk.index: chunk for chunk in engine.step() if chunk.completion is not None}
        engine.check_integrity()
        if engine.is_idle:
            return ends
    raise AssertionError("the engine goes on for ever")


def tokens(ends: dict[int, Chunk], numbers: range) -> list[list[int]]:
    found = []
    for number in numbers:
        completion = ends[number].completion
        assert completion is not None
        assert ends[number].error is None
        found.append(list(completion.token_ids))
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("pages", [64, 14])
def test_numbers_of_one_request_reach_no_other(value: float, pages: int) -> None:
    """While it runs and afterwards, in pages that it had, with room to lie apart and without."""
    executor = make_executor()
    bad = poisoned(executor, value)
    asked = requests(executor, (*LENGTHS, 30, 2, 17))
    engine = make_engine(executor, pages)
    greedy, drawn = SamplingParams(ignore_eos=True), SamplingParams(temperature=1.0, seed=1)
    hostile = [
        Request(tuple(prompt), params, bad)
        for prompt in prompts((40, 3, 25))
        for params in (greedy, drawn)
    ]
    numbers = []
    ends: dict[int, Chunk] = {}
    for mine, theirs in zip(asked, [*hostile, None, None, None], strict=True):
        numbers.append(engine.submitted)
        engine.submit(mine)
        if theirs is not None:
            engine.submit(theirs)
        ends |= {chunk.index: chunk for chunk in engine.step() if chunk.completion is not None}
    ends |= run(engine)
    late = engine.submitted
    for request in asked:
        engine.submit(request)
    ends |= run(engine)
    found = [ends[number].completion for number in numbers]
    assert [list(c.token_ids) for c in found if c is not None] == expected(asked)
    assert tokens(ends, range(late, late + len(asked))) == expected(asked)
    bad_ends = [end for number, end in ends.items() if number not in numbers and number < late]
    assert bad_ends
    assert all(isinstance(end.error, GenerationError) for end in bad_ends)
    assert all("adapter 'bad'" in str(end.error) for end in bad_ends)


def test_an_adapter_that_cannot_be_copied_fails_its_requests_alone() -> None:
    """While it is copied ahead, and when it runs; it is refused from then on, until it changes."""
    executor = make_executor()
    bad = executor.add_adapter("bad", LORA | {"use_dora": True})
    for weights in bad.weights.values():
        object.__setattr__(weights, "scale", 1e300)
    executor.refresh_adapter("bad")
    asked = requests(executor, LENGTHS)
    engine = make_engine(executor, 64, Limits(running=3))
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    mine, theirs = [], []
    for request in asked:
        mine.append(engine.submitted)
        engine.submit(request)
        theirs.append(engine.submitted)
        engine.submit(Request(request.prompt_ids, params, bad))
    ends = run(engine)
    assert [list(ends[number].completion.token_ids) for number in mine] == expected(asked)
    assert all(isinstance(ends[number].error, GenerationError) for number in theirs)
    with pytest.raises(GenerationError, match="adapter 'bad' cannot be served, as it failed by"):
        engine.submit(Request((1, 2), params, bad))
    executor.remove_adapter("bad")
    good = executor.add_adapter("bad", LORA)
    engine.submit(Request((1, 2), params, good))
    assert all(end.error is None for end in run(engine).values())


def test_numbers_of_one_request_reach_no_other_by_kernels() -> None:
    """Triton's kernels follow block tables, and read no row of another sequence."""
    executor = make_executor("triton")
    bad = poisoned(executor, math.nan)
    asked = requests(executor, (9, 4, 20), 6)
    engine = make_engine(executor, 14)
    ends: dict[int, Chunk] = {}
    for mine, prompt in zip(asked, prompts((9, 12, 15)), strict=True):
        engine.submit(mine)
        engine.submit(Request(tuple(prompt), mine.params, bad))
        ends |= {chunk.index: chunk for chunk in engine.step() if chunk.completion is not None}
    ends |= run(engine)
    for request in asked:
        engine.submit(request)
    ends |= run(engine)
    assert tokens(ends, range(0, 6, 2)) == tokens(ends, range(6, 9)) == expected(asked)
    assert all(isinstance(ends[number].error, GenerationError) for number in (1, 3, 5))


def test_a_job_that_diverges_fails_alone() -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    engine = make_engine(executor, 64, Limits(tokens=20))
    options = OPTIONS | {"learning_rate": 1e30, "max_grad_norm": None, "max_steps": 20}
    diverging = engine.finetune(DATA, "diverging", peft=LORA, **options)
    other = engine.finetune(DATA, "other", peft=LORA, **OPTIONS)
    for request in asked:
        engine.submit(request)
    ends = run(engine)
    late = engine.submitted
    for request in asked:
        engine.submit(request)
    ends |= run(engine)
    assert isinstance(diverging.error, FinetuneError)
    assert other.result.steps == OPTIONS["max_steps"]
    assert tokens(ends, range(len(asked))) == expected(asked)
    assert tokens(ends, range(late, engine.submitted)) == expected(asked)


def failing_where(
    engine: Engine, is_hit: Callable[[list[Any], list[Any]], bool]
) -> Callable[..., Any]:
    """Let steps fail in which a sequence or a window is hit, after all of their work."""
    start = engine.device.start

    def started(chunks: list[Any], windows: list[Any]) -> Any:
        def ended() -> None:
            if is_hit(chunks, windows):
                raise RuntimeError("a kernel failed")

        return when_read(start(chunks, windows), nothing, ended)

    return started


def test_a_request_that_breaks_its_steps_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    engine = make_engine(executor, 64, Limits(tokens=20))
    alone = make_executor().finetune(DATA, "one", peft=LORA, progress=False, **OPTIONS)
    culprit = len(asked) // 2

    def is_hit(chunks: list[Any], windows: list[Any]) -> bool:
        return any(one.number == culprit and len(one.generated) == 3 for one, _ in chunks)

    monkeypatch.setattr(engine.device, "start", failing_where(engine, is_hit))
    job = engine.finetune(DATA, "one", peft=LORA, **OPTIONS)
    for request in asked:
        engine.submit(request)
    ends = run(engine)
    error = ends.pop(culprit).error
    assert isinstance(error, GenerationError)
    assert "request 3 failed by RuntimeError: a kernel failed" in str(error)
    assert [e.kind for e in engine.log.of("request 3")][-1] is Kind.FAILED
    others = [request for number, request in enumerate(asked) if number != culprit]
    assert [list(end.completion.token_ids) for _, end in sorted(ends.items())] == expected(others)
    assert job.error is None
    assert job.result.losses == pytest.approx(alone.losses, rel=1e-4)


def test_a_job_that_breaks_its_steps_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    engine = make_engine(executor, 64, Limits(tokens=20))
    bad = engine.finetune(DATA, "bad", peft=LORA, **OPTIONS)
    good = engine.finetune(DATA, "good", peft=LORA, **OPTIONS)

    def is_hit(chunks: list[Any], windows: list[Any]) -> bool:
        units = [unit for unit, _ in windows]
        return bad.unit in units

    run_parts = engine.device.run_parts

    def failing(parts: list[Any]) -> None:
        run_parts(parts)
        if bad.unit in parts:
            raise RuntimeError("a kernel failed")

    # Measured times decide whether a window goes forward whole or in layers.
    monkeypatch.setattr(engine.device, "start", failing_where(engine, is_hit))
    monkeypatch.setattr(engine.device, "run_parts", failing)
    for request in asked:
        engine.submit(request)
    ends = run(engine)
    assert isinstance(bad.error, FinetuneError)
    assert "job 'bad' failed by RuntimeError: a kernel failed" in str(bad.error)
    assert tokens(ends, range(len(asked))) == expected(asked)
    assert good.result.steps == OPTIONS["max_steps"]


def test_a_backward_that_fails_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both jobs begin their step again, alone; the one that fails there is dropped."""
    executor, alone = make_executor(), make_executor()
    alone.finetune(DATA, "good", peft=LORA, progress=False, **OPTIONS)
    engine = make_engine(executor, 64)
    bad = engine.finetune(DATA, "bad", peft=LORA, **OPTIONS)
    good = engine.finetune(DATA, "good", peft=LORA, **OPTIONS)
    run_parts = engine.device.run_parts

    def failing(parts: list[Any]) -> None:
        is_last = bad.unit in parts and bad.unit.stage == Stage(Phase.BACKWARD, 1)
        run_parts(parts)
        if is_last:
            raise RuntimeError("a kernel failed")

    monkeypatch.setattr(engine.device, "run_parts", failing)
    run(engine)
    assert isinstance(bad.error, FinetuneError)
    assert good.error is None
    ours, theirs = (e.adapters["good"].tensors for e in (executor, alone))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_callbacks_that_raise() -> None:
    """A listener gets no more events, a job whose callback raises fails, and the rest goes on."""
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    engine = make_engine(executor, 64, Limits(tokens=20))
    seen: list[Event] = []

    def listener(event: Event) -> None:
        seen.append(event)
        raise ValueError("no")

    def on_step(record: object) -> None:
        raise ValueError("no")

    engine.log.listen(listener)
    bad = engine.finetune(DATA, "bad", peft=LORA, on_step=on_step, **OPTIONS)
    good = engine.finetune(DATA, "good", peft=LORA, **OPTIONS)
    for request in asked:
        engine.submit(request)
    ends = run(engine)
    assert len(seen) == 1
    assert "job 'bad' failed by ValueError: no" in str(bad.error)
    assert good.error is None
    assert tokens(ends, range(len(asked))) == expected(asked)


def test_a_text_that_cannot_be_made_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    engine = make_engine(executor, 64)
    for request in asked:
        engine.submit(request)
    sequence = engine.requests.by_id["request 2"]

    class Broken:
        def push(self, token: int) -> str:
            raise UnicodeError("no text")

    sequence.text.decoder = Broken()  # type: ignore[assignment]
    ends = run(engine)
    assert "request 2 failed by UnicodeError: no text" in str(ends.pop(2).error)
    assert len(ends) == len(asked) - 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": (1, 10**6)}, "prompt 0 has token 1000000; the model's are 0 to"),
        ({"prompt_ids": (-1, 2)}, "prompt 0 has token -1"),
        ({"prompt_ids": (1, 2.5)}, "token ids has other than ints"),
        ({"prompt_ids": (1, None)}, "token ids has other than ints"),
        ({"tenant": []}, r"tenant=\[\]; use a text"),
        ({"timeout_s": "soon"}, "timeout_s='soon'; use seconds above 0"),
        ({"tpot_slo_s": math.nan}, "tpot_slo_s=nan; use seconds above 0"),
    ],
)
def test_bad_fields_are_refused_when_a_request_comes(fields: dict[str, Any], message: str) -> None:
    engine = make_engine(make_executor(), 8)
    with pytest.raises(GenerationError, match=message):
        engine.submit(Request(**{"prompt_ids": (1, 2), "params": SamplingParams()} | fields))
    assert engine.is_idle


def test_other_uses_of_the_executor_beside_its_engine() -> None:
    """They go through the engine's thread, or are refused by name; the thread goes on."""
    executor = make_executor()
    asked = requests(executor, LENGTHS)
    sequences, names = [list(r.prompt_ids) for r in asked], ["a", None] * 3
    alone = executor.logits(sequences, names)
    engine = make_engine(executor, 64)
    fields: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    with engine.start() as running:
        stream = running.submit([1, 2, 3], max_new_tokens=100, ignore_eos=True)
        found = executor.generate(sequences, names, **fields)
        assert [list(one.token_ids) for one in found] == expected(asked)
        chunks = list(executor.generate(sequences, names, stream=True, **fields))
        assert {chunk.index for chunk in chunks} == set(range(len(asked)))
        for ours, theirs in zip(executor.logits(sequences, names), alone, strict=True):
            torch.testing.assert_close(ours, theirs)
        executor.add_adapter("fresh", LORA)
        executor.remove_adapter("fresh")
        for refused in (
            lambda: executor.engine(),
            lambda: executor.finetune(DATA, "one", peft=LORA, **OPTIONS),
            lambda: executor.training_runner("a"),
            engine.start,
        ):
            with pytest.raises(EngineError, match="an engine runs on this executor's thread"):
                refused()
        with pytest.raises(EngineError, match="waits for the engine"):
            running.run(lambda: executor.generate([[1, 2]]))
        assert running.run(lambda: executor.logits([1, 2])).shape[0] == 2
        assert len(stream.wait(60).token_ids) == 100
    assert executor.generate(sequences, names, **fields) == found


@pytest.mark.parametrize(
    "name", [None, 5, [], "", "../../x", "a/../b", "/etc", "a\\b", "a\n", "x" * 256]
)
def test_names_that_are_none(name: Any) -> None:
    executor = make_executor()
    engine = make_engine(executor, 8)
    for use in (
        lambda: executor.add_adapter(name, LORA),
        lambda: executor.remove_adapter(name),
        lambda: engine.finetune(DATA, name, peft=LORA, **OPTIONS),
    ):
        with pytest.raises(AdapterError, match="does not name an adapter"):
            use()
    assert executor.adapters.keys() == {"a"}


def test_the_name_of_a_job_is_its_own() -> None:
    """While it is trained, nobody removes the adapter or puts another there."""
    executor = make_executor()
    engine = make_engine(executor, 64)
    job = engine.finetune(DATA, "one", peft=LORA, publish_every=1, **OPTIONS)
    for _ in range(200):
        engine.step()
        if "one" in executor.adapters:
            break
    assert not job.is_over
    for use in (
        lambda: executor.remove_adapter("one"),
        lambda: executor.add_adapter("one", LORA),
    ):
        with pytest.raises(AdapterError, match="a job trains adapter 'one'"):
            use()
    engine.cancel_job("one")
    executor.remove_adapter("one")
    executor.add_adapter("one", LORA)


def test_a_batch_that_never_fits_fails_its_job() -> None:
    engine = make_engine(make_executor(), 4)
    job = engine.finetune(DATA, "one", peft=LORA, **OPTIONS)
    run(engine)
    assert job.state is JobState.FAILED
    assert isinstance(job.error, OutOfMemoryError)
    assert "lower batch_size" in str(job.error)
