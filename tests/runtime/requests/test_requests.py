"""Fields of requests from `generate` to their completions, against transformers' generate."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pcg.errors import GenerationError
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Chunk, Completion, Request
from pcg.runtime.requests.stream import Stream, Wakes
from pcg.runtime.sampling.sampling_params import SamplingParams
from tests.support import compiled, tiny_llama
from tests.support.prompts import prompts
from tests.support.small_engine import make_engine, make_executor
from tests.support.step_gate import StepGate
from tests.support.waiting import until

EOS = 2
NEW = 12
PROMPTS = prompts((5, 9, 3, 12, 7, 4, 8))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy outputs differ from token to token."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads that kernels know
    path = tmp_path_factory.mktemp("model")
    return tiny_llama.save(path, seed=3, initializer_range=0.3, **sizes)


@pytest.fixture(scope="module")
def executor(directory: Path) -> Executor:
    return compiled.executor(directory)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    given = {"eos_token_id": EOS, "pad_token_id": 0, "do_sample": False, "max_new_tokens": NEW}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about options of generation
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given | options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_batch_of_fields_generates_as_transformers_does(
    directory: Path, executor: Executor, model: Any, backend: str
) -> None:
    plain = [greedy(model, prompt) for prompt in PROMPTS]
    first, pair = plain[0][2], tuple(plain[1][3:5])
    end = plain[2][1]
    bias = {int(t): 2.5 for t in range(10, 40)} | {7: -3.0}
    allowed = list(range(100, 160))
    ours: list[dict[str, Any]] = [
        {"bad_words": ((first,),)},
        {"bad_words": (pair,)},
        {"stop_token_ids": (end,), "min_tokens": 6},
        {"logit_bias": bias},
        {"allowed_token_ids": tuple(allowed), "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5},
        {},
    ]
    theirs: list[dict[str, Any]] = [
        {"bad_words_ids": [[first]]},
        {"bad_words_ids": [list(pair)]},
        {"eos_token_id": [EOS, end], "min_new_tokens": 6},
        {"sequence_bias": [[[token], value] for token, value in bias.items()]},
        {"suppress_tokens": sorted(set(range(512)) - set(allowed)), "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5},
        {},
    ]
    expected = [
        greedy(model, prompt, **options) for prompt, options in zip(PROMPTS, theirs, strict=True)
    ]
    assert sum(found != each for found, each in zip(plain, expected, strict=True)) >= 5
    served = executor if backend == "torch" else compiled.executor(directory, backend=backend)
    engine = make_engine(served)
    for prompt, options in zip(PROMPTS, ours, strict=True):
        engine.submit(Request(tuple(prompt), SamplingParams(max_new_tokens=NEW, **options)))
    found: dict[int, Completion] = {}
    while not engine.is_idle:
        for chunk in engine.step():
            if chunk.completion is not None:
                found[chunk.index] = chunk.completion
    assert [list(found[i].token_ids) for i in range(len(ours))] == expected
    assert found[2].stop_reason == (end if expected[2][-1] == end else None)


def test_what_ended_an_output(executor: Executor) -> None:
    assert executor.tokenizer is not None
    (whole,) = executor.generate([PROMPTS[0]], max_new_tokens=NEW)
    tokens, text = list(whole.token_ids), whole.text
    stop = text[3:6]

    def ended(**options: Any) -> Completion:
        (completion,) = executor.generate([PROMPTS[0]], max_new_tokens=NEW, **options)
        return completion

    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    by_text = ended(stop=stop)
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert by_text.text == text[: text.index(stop)]
    assert ended(stop=stop, include_stop_str_in_output=True).text.endswith(stop)
    late = ended(stop=stop, min_tokens=NEW)
    assert (late.text, late.finish_reason, late.stop_reason) == (text, "length", None)
    by_token = ended(stop_token_ids=[tokens[4]])
    assert by_token.token_ids == tuple(tokens[: tokens.index(tokens[4]) + 1])
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", tokens[4])
    included = ended(stop_token_ids=[tokens[4]], include_stop_str_in_output=True)
    assert included.text == executor.tokenizer.decode(included.token_ids)
    assert by_token.text == executor.tokenizer.decode(by_token.token_ids[:-1])
    by_model = ended(logit_bias={EOS: 100.0}, min_tokens=3)
    assert (by_model.token_ids[-1], len(by_model.token_ids)) == (EOS, 4)
    assert (by_model.finish_reason, by_model.stop_reason) == ("stop", None)


def test_special_tokens_are_left_out_unless_they_are_asked_for(executor: Executor) -> None:
    options: dict[str, Any] = {"allowed_token_ids": [1, 70], "max_new_tokens": 6, "seed": 0}
    skipped, shown = executor.generate(
        [PROMPTS[0]] * 2,
        temperature=5.0,
        skip_special_tokens=[True, False],
        **options | {"seed": [0, 0]},
    )
    assert skipped.token_ids == shown.token_ids
    assert {1, 70} == set(shown.token_ids)
    assert executor.tokenizer is not None
    assert shown.text == executor.tokenizer.decode(shown.token_ids, skip_special_tokens=False)
    assert "<|im_start|>" in shown.text
    assert "<|im_start|>" not in skipped.text


def test_a_request_without_a_token_left_fails_alone(executor: Executor) -> None:
    engine = make_engine(executor)
    params = SamplingParams(max_new_tokens=5)
    hostile = SamplingParams(allowed_token_ids=(3,), bad_words=((3, 3),), max_new_tokens=5)
    for each in (params, hostile, params):
        engine.submit(Request(tuple(PROMPTS[1]), each))
    ends = {}
    while not engine.is_idle:
        ends |= {chunk.index: chunk for chunk in engine.step() if chunk.completion is not None}
    assert isinstance(ends[1].error, GenerationError)
    assert "no token is left to draw" in str(ends[1].error)
    (alone,) = executor.generate([PROMPTS[1]], max_new_tokens=5)
    assert ends[0].completion.token_ids == ends[2].completion.token_ids == alone.token_ids


# ------------------------------------------ streams that are left, and how their readers are woken

LONG: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}


@dataclass(frozen=True)
class Gated:
    """An engine that takes ten steps, and further ones once its gate is open."""

    running: AsyncEngine
    gate: StepGate

    def submit(self, **fields: Any) -> Stream:
        return self.running.submit([1, 2], **LONG, **fields)


@pytest.fixture
def engine() -> Iterator[Gated]:
    made = make_engine(make_executor())
    gate = StepGate(made)
    gate.let(10)
    with made.start() as running:
        yield Gated(running, gate)
    made.check_integrity()


def end(engine: Gated, stream: Stream) -> tuple[str, bool]:
    """How it ended, and if that was before its last token."""
    engine.gate.open()
    completion = stream.wait(60)
    return completion.finish_reason, len(completion.token_ids) < 100


def broken_off(engine: Gated) -> Stream:
    stream = engine.submit()

    async def read() -> None:
        async for _ in stream:
            break

    asyncio.run(read())
    return stream


def broken_off_in_a_thread(engine: Gated) -> Stream:
    stream = engine.submit()
    for _ in stream:
        break
    return stream


def raised_within(engine: Gated) -> Stream:
    stream = engine.submit()

    async def read() -> None:
        async for _ in stream:
            raise ConnectionError("the client is gone")

    with pytest.raises(ConnectionError):
        asyncio.run(read())
    return stream


def task_cancelled(engine: Gated) -> Stream:
    """While it waits for a chunk; what holds the task and its error does not matter."""
    stream = engine.submit()

    async def read() -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        task = asyncio.create_task(read())
        await anext(stream)
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        engine.gate.open()
        await asyncio.to_thread(stream.wait, 60)  # and not once the task is collected

    asyncio.run(main())
    return stream


def timed_out(engine: Gated) -> Stream:
    stream = engine.submit()

    async def read() -> None:
        async with asyncio.timeout(0.1):
            async for _ in stream:
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(read())
    return stream


def generator_closed(engine: Gated) -> Stream:
    """As a web framework closes the body of a response when its client leaves."""
    stream = engine.submit()

    async def body() -> AsyncIterator[str]:
        async for chunk in stream:
            yield chunk.text

    async def main() -> None:
        made = body()
        await anext(made)
        await made.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    return stream


def context_left(engine: Gated) -> Stream:
    async def main() -> Stream:
        async with engine.submit() as stream:
            await anext(stream)
        return stream

    return asyncio.run(main())


@pytest.mark.parametrize(
    "leave",
    [
        broken_off_in_a_thread,
        task_cancelled,
        context_left,
        pytest.param(broken_off, marks=pytest.mark.slow),
        pytest.param(raised_within, marks=pytest.mark.slow),
        pytest.param(timed_out, marks=pytest.mark.slow),
        pytest.param(generator_closed, marks=pytest.mark.slow),
    ],
)
def test_a_stream_that_is_left_ends_its_request(
    engine: Gated, leave: Callable[[Gated], Stream]
) -> None:
    assert end(engine, leave(engine)) == ("cancelled", True)


def test_generate_that_is_left_ends_all_its_requests() -> None:
    executor = make_executor()
    engine = make_engine(executor)
    gate = StepGate(engine)
    gate.let(10)
    with engine.start() as running:
        chunks = executor.generate([[1, 2]] * 3, stream=True, **LONG)
        next(chunks)
        assert running.numbers().running + running.numbers().waiting > 0
        chunks.close()  # type: ignore[attr-defined]
        gate.open()
        until(lambda: not running.numbers().running + running.numbers().waiting)
        assert running.engine.totals.requests["cancelled"] == 3


def test_what_does_not_leave_ends_nothing(engine: Gated) -> None:
    """Single chunks, a wait that is given up, and a stream that nobody reads."""
    stream = engine.submit()

    async def main() -> None:
        assert (await anext(stream)).token_id is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.completion(), 1e-3)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(main())
    next(stream)
    engine.running.submit([3], request_id="nobody reads", **LONG)
    gc.collect()
    assert end(engine, stream) == ("length", False)
    read = list(stream)
    assert read[-1].completion == stream.wait(0)
    assert list(stream) == []


def test_readers_of_a_closed_loop_harm_nobody() -> None:
    cancelled: list[Stream] = []
    stream, wakes = Stream(cancelled.append), Wakes()

    async def wait() -> None:
        reading = stream.next_chunk()
        reading.send(None)  # to where it waits
        reading.close()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait())
    loop.close()
    gc.collect()
    stream.put(Chunk(0, "a", 1), wakes)
    wakes.send()
    assert next(stream).text == "a"
    done = Completion("a", (1,), "stop", None, 1)
    stream.put(Chunk(0, "", None, completion=done), wakes)
    assert stream.wait(0) is done
    stream.fail(GenerationError("too late"))
    assert stream.wait(0) is done
