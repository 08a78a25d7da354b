"""A failure stays with its owner: bad requests, adapters, jobs and callbacks, beside others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pcg.errors import AdapterError, EngineError, FinetuneError, GenerationError, OutOfMemoryError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.device.step_runner import LaunchedStep, StepRunner
from pcg.runtime.metrics.events import Event
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
    ends,
    expected,
    make_engine,
    make_executor,
    poisoned,
    requests,
    run,
)


def check_tokens(last: dict[int, Chunk], numbers: list[int], asked: list[Request]) -> None:
    """Compare the tokens of some requests, by their last chunks, with those of transformers."""
    assert [last[number].error for number in numbers] == [None] * len(asked)
    done = [last[number].completion for number in numbers]
    assert [list(one.token_ids) for one in done if one is not None] == expected(asked)


@pytest.mark.parametrize(
    ("backend", "value", "pages"),
    [
        ("torch", math.nan, 64),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("torch", math.nan, 14),
                ("torch", math.inf, 64),
                ("torch", 3e38, 14),
                ("triton", math.nan, 14),
            )
        ),
    ],
)
def test_numbers_of_one_request_reach_no_other(backend: str, value: float, pages: int) -> None:
    """While it runs and afterwards, in pages that it had, with room to lie apart and without."""
    executor = make_executor(backend)
    bad = poisoned(executor, value)
    lengths, new = ((*LENGTHS, 30, 2, 17), NEW) if backend == "torch" else ((9, 4, 20), 6)
    asked = requests(executor, lengths, new)
    engine = make_engine(executor, pages)
    params = [SamplingParams(ignore_eos=True), SamplingParams(temperature=1.0, seed=1)]
    last: dict[int, Chunk] = {}
    mine, theirs = [], []
    for place, request in enumerate(asked):
        mine.append(engine.submitted)
        engine.submit(request)
        if place < 6:
            theirs.append(engine.submitted)
            prompt = prompts((40, 3, 25))[place // 2]
            engine.submit(Request(tuple(prompt), params[place % 2], bad))
        last |= ends(engine.step())
    last |= ends(run(engine))
    late = [*range(engine.submitted, engine.submitted + len(asked))]
    for request in asked:
        engine.submit(request)
    last |= ends(run(engine))
    check_tokens(last, mine, asked)
    check_tokens(last, late, asked)
    assert all(isinstance(last[number].error, GenerationError) for number in theirs)
    assert all("adapter 'bad'" in str(last[number].error) for number in theirs)


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
    for request in asked:
        engine.submit(request)
        engine.submit(Request(request.prompt_ids, params, bad))
    last = ends(run(engine))
    numbers = [*range(2 * len(asked))]
    check_tokens(last, numbers[::2], asked)
    assert all(isinstance(last[number].error, GenerationError) for number in numbers[1::2])
    with pytest.raises(GenerationError, match="adapter 'bad' cannot be served, as it failed by"):
        engine.submit(Request((1, 2), params, bad))
    executor.remove_adapter("bad")
    engine.submit(Request((1, 2), params, executor.add_adapter("bad", LORA)))
    assert all(end.error is None for end in ends(run(engine)).values())


def test_a_job_that_diverges_or_whose_callback_raises_fails_alone() -> None:
    """A listener that raises gets no more events."""
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
    options = OPTIONS | {"learning_rate": 1e30, "max_grad_norm": None, "max_steps": 20}
    diverging = engine.finetune(DATA, "diverging", peft=LORA, **options)
    raising = engine.finetune(DATA, "raising", peft=LORA, on_step=on_step, **OPTIONS)
    good = engine.finetune(DATA, "good", peft=LORA, **OPTIONS)
    last: dict[int, Chunk] = {}
    for _ in range(2):
        for request in asked:
            engine.submit(request)
        last |= ends(run(engine))
    assert isinstance(diverging.error, FinetuneError)
    assert "job 'raising' failed by ValueError: no" in str(raising.error)
    assert good.result.steps == OPTIONS["max_steps"]
    check_tokens(last, [*range(2 * len(asked))], asked * 2)
    assert len(seen) == 1


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
    assert "job 'bad' failed by RuntimeError: a kernel failed" in str(bad.error)
    assert good.error is None
    ours, theirs = (e.adapters["good"].tensors for e in (executor, alone))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


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
    engine = make_engine(executor)
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


def test_a_batch_that_never_fits_fails_its_job() -> None:
    engine = make_engine(make_executor(), 4)
    job = engine.finetune(DATA, "one", peft=LORA, **OPTIONS)
    run(engine)
    assert job.state is JobState.FAILED
    assert isinstance(job.error, OutOfMemoryError)
    assert "lower batch_size" in str(job.error)


def test_an_error_of_some_steps_alone_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence whose prompt ends a token after a chunk does not run beside others untried."""
    start = StepRunner.start

    def fails(self: StepRunner, chunks: Any, windows: Any) -> LaunchedStep:
        if all(count == 1 for _, count in chunks):
            raise RuntimeError("only single tokens")
        return start(self, chunks, windows)

    monkeypatch.setattr(StepRunner, "start", fails)
    executor = make_executor()
    engine = make_engine(executor, 64, Limits(tokens=20))
    for request in requests(executor, (20, 40, 20)):
        engine.submit(request)
    last: dict[int, Chunk] = {}
    for _ in range(200):
        last |= ends(engine.step())
    assert engine.is_idle
    assert [last[number].error is None for number in range(3)] == [True, False, True]
