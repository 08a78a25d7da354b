"""Logprobs of requests are those of transformers and peft, in any batch."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.errors import GenerationError
from pcg.runtime.engine.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion
from pcg.runtime.sampling.logprobs import TokenLogprobs
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import TOLERANCE, prompts
from tests.support.small_engine import make_engine, make_executor, models

RANKS = (2, 3, 4, 8, 8, 12, 16, 16)
LENGTHS = (9, 4, 37, 5, 18, 1, 23, 16)


@functools.cache
def mixed() -> tuple[Executor, dict[str | None, Any]]:
    """An executor with an adapter of each rank, and what peft makes of each."""
    base = oracle.random_model(BY_NAME["llama3"].config(2, max_position_embeddings=128))
    executor, wrapped = compiler.compile(base), {None: base}
    for i, rank in enumerate(RANKS):
        name = f"a{i}"
        recipe = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
        adapter = executor.add_adapter(name, {**recipe, "target_modules": "all-linear"})
        wrapped[name] = oracle.with_adapter(base, "all-linear", rank=rank, seed=i)
        for path, parameter in oracle.lora_parameters(wrapped[name]).items():
            module, _, kind = path.rpartition(".")
            weights = adapter.weights[module]
            (weights.a if kind == "lora_A" else weights.b).copy_(parameter.data)
        executor.refresh_adapter(name)
    return executor, wrapped


def check(model: Any, prompt: list[int], done: Completion, count: int) -> None:
    """Compare the logprobs of a completion's tokens with the model's own."""
    assert done.logprobs is not None
    ids = [*prompt, *done.token_ids]
    expected = oracle.logits(model, ids).log_softmax(-1)[len(prompt) - 1 : -1]
    assert len(done.logprobs) == len(done.token_ids) == len(expected)
    for token, found, row in zip(done.token_ids, done.logprobs, expected, strict=True):
        check_token(found, token, row, count)


def check_token(found: TokenLogprobs, token: int, row: torch.Tensor, count: int) -> None:
    assert found.token_id == token
    assert abs(found.logprob - float(row[token])) < TOLERANCE
    assert len(found.top) == count
    values = torch.tensor([value for _, value in found.top])
    torch.testing.assert_close(values, row.topk(count).values, rtol=0, atol=TOLERANCE)
    own = row[[token for token, _ in found.top]]
    torch.testing.assert_close(values, own, rtol=0, atol=TOLERANCE)


def test_eight_mixed_adapters() -> None:
    executor, wrapped = mixed()
    names = [f"a{i}" for i in range(8)]
    asked = prompts(LENGTHS)
    counts = [5, 0, 20, 1, 3, 5, 5, 2]
    done = executor.generate(asked, names, max_new_tokens=6, ignore_eos=True, logprobs=counts)
    for name, prompt, one, count in zip(names, asked, done, counts, strict=True):
        check(wrapped[name], prompt, one, count)


def test_drawn_tokens_have_the_raw_distribution_s() -> None:
    """Whatever temperature and penalty they are drawn with."""
    executor, wrapped = mixed()
    (prompt,) = prompts((12,))
    done = executor.generate(
        [prompt],
        "a1",
        max_new_tokens=12,
        ignore_eos=True,
        logprobs=3,
        temperature=1.7,
        top_k=50,
        repetition_penalty=1.3,
        seed=4,
    )
    check(wrapped["a1"], prompt, done[0], 3)
    values = [one.logprob for one in done[0].logprobs or ()]
    assert done[0].cumulative_logprob == sum(values)


def test_beside_requests_that_ask_for_none_and_after_preemption() -> None:
    executor = make_executor()
    engine = make_engine(executor, 12)
    base, _ = models()
    asked = prompts((9, 4, 37, 5, 18, 1))
    for i, prompt in enumerate(asked):
        wants = {"logprobs": 2} if i % 2 else {}
        engine.submit(executor.request(prompt, max_new_tokens=40, ignore_eos=True, **wants))
    chunks = [chunk for _ in range(400) for chunk in engine.step()]
    done = {chunk.index: chunk.completion for chunk in chunks if chunk.completion is not None}
    assert any(event.kind == "preempted" for event in engine.log)
    for i, prompt in enumerate(asked):
        one, parts = done[i], [chunk.logprobs for chunk in chunks if chunk.index == i]
        assert one is not None
        if i % 2:
            check(base, prompt, one, 2)
            assert tuple(parts) == one.logprobs
        else:
            assert one.logprobs is one.cumulative_logprob is None
            assert parts == [None] * 40


def test_programs_for_triton() -> None:
    executor = make_executor("triton")
    _, wrapped = models()
    (prompt,) = prompts((7,))
    (done,) = executor.generate([prompt], "a", max_new_tokens=3, ignore_eos=True, logprobs=4)
    check(wrapped, prompt, done, 4)


@pytest.mark.parametrize("count", [-1, "5", 1.0, True, math.inf])
def test_no_count(count: Any) -> None:
    with pytest.raises(GenerationError, match=r"logprobs=.*use an int of at least 0"):
        make_executor().request([1, 2], logprobs=count)


def test_more_than_the_limit() -> None:
    executor = make_executor()
    with pytest.raises(GenerationError, match=r"logprobs=21.*at most 20.*Limits\(logprobs=…\)"):
        executor.generate([[1, 2]], logprobs=21)
    engine = make_engine(executor, 8, Limits(logprobs=10**6))
    engine.submit(executor.request([1, 2], logprobs=10**6, max_new_tokens=1))
    (chunk,) = engine.step()
    assert chunk.completion is not None
    (found,) = chunk.completion.logprobs or ()
    assert len(found.top) == executor.program.base.vocabulary
