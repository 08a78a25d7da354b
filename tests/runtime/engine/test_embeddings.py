"""Embeddings are the last hidden states of transformers and peft, in any batch."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.errors import GenerationError, ProgramError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from tests.support import oracle, tiny_llama
from tests.support.families import BY_NAME
from tests.support.peft_cases import CONFIGS, wrap
from tests.support.prompts import TOLERANCE, prompts
from tests.support.small_engine import (
    expected,
    make_engine,
    make_executor,
    models,
    poisoned,
    requests,
)

LENGTHS = (9, 4, 37, 5, 18, 1)


@functools.cache
def shared() -> Executor:
    return make_executor()


@torch.no_grad()
def states(model: Any, prompt: list[int]) -> Tensor:
    """Return the last hidden states of the prompt's own tokens."""
    out = model(torch.tensor([prompt]), output_hidden_states=True)
    return out.hidden_states[-1][0, -len(prompt) :]


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_mixed_with_adapters(pooling: Any) -> None:
    executor = shared()
    base, wrapped = models()
    asked = prompts(LENGTHS)
    names = ["a", None] * 3
    found = executor.embed(asked, names, pooling=pooling)
    assert found.shape == (6, 64)
    for row, prompt, name in zip(found, asked, names, strict=True):
        wanted = states(base if name is None else wrapped, prompt)
        close(row, wanted[-1] if pooling == "last" else wanted.mean(0))
    unit = executor.embed(asked, names, pooling=pooling, normalize=True)
    close(unit, torch.nn.functional.normalize(found))


@pytest.mark.parametrize("family", ["opt-projected", "gemma2"])
def test_families(family: str) -> None:
    base = oracle.random_model(BY_NAME[family].config(2))
    (prompt,) = prompts((12,))
    (found,) = compiler.compile(base).embed([prompt])
    with torch.no_grad():
        wanted = base.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
    close(found, wanted)


@pytest.mark.parametrize(
    ("method", "pooling"),
    [("prompt", "mean"), ("prefix", "last"), ("biases", "mean"), ("ia3-head", "last")],
)
def test_methods(method: str, pooling: Any, tmp_path: Path) -> None:
    """Virtual tokens do not count, and what changes the head's product changes no state."""
    base = oracle.random_model(BY_NAME["llama-biases"].config(2))
    wrapped = wrap(base, CONFIGS["llama-biases"][method])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(tmp_path / "a", save_embedding_layers=False)
    executor = compiler.compile(base)
    executor.add_adapter("a", tmp_path / "a")
    asked = prompts((21, 3))
    found = executor.embed(asked, "a", pooling=pooling)
    for row, prompt in zip(found, asked, strict=True):
        wanted = states(wrapped, prompt)
        close(row, wanted[-1] if pooling == "last" else wanted.mean(0))


@pytest.mark.parametrize("pages", [64, 9])
def test_beside_generation_in_chunks_behind_prefixes_and_preempted(pages: int) -> None:
    executor = shared()
    base, _ = models()
    engine = make_engine(executor, pages, Limits(tokens=24, least_chunk=3))
    (prompt,) = prompts((70,))
    asked = requests(executor, (37, 18, 20))
    engine.submit(executor.request(prompt[:40], max_new_tokens=20, ignore_eos=True))
    engine.step()
    for one, pooling in zip(asked, ("mean", "last", "mean"), strict=True):
        engine.submit(one)
        engine.submit(executor.request(prompt, pooling=pooling, normalize=False))
    done = {}
    for _ in range(600):
        for chunk in engine.step():
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
                assert chunk.error is None
        engine.check_integrity()
    assert [list(done[i].token_ids) for i in (1, 3, 5)] == expected(asked)
    wanted = states(base, prompt)
    for i, state in ((2, wanted.mean(0)), (4, wanted[-1]), (6, wanted.mean(0))):
        embedding = done[i].embedding
        assert embedding is not None
        close(embedding, state)
        assert (done[i].token_ids, done[i].finish_reason) == ((), "length")
    assert done[4].cached_tokens >= 32
    assert done[2].cached_tokens == 0


def test_programs_for_triton() -> None:
    executor = make_executor("triton")
    _, wrapped = models()
    (prompt,) = prompts((6,))
    (found,) = executor.embed([prompt], "a", pooling="mean")
    close(found, states(wrapped, prompt).mean(0))


def test_texts_and_running_engines(tmp_path: Path) -> None:
    executor = compiler.compile(tiny_llama.save(tmp_path / "tiny"))
    one = executor.embed("def add(a, b):")
    two = executor.embed(["def add(a, b):", "class"])
    assert one.shape == two.shape[1:]
    close(one, two[0])
    with executor.engine().start() as running:
        close(executor.embed("def add(a, b):"), one)
        done = running.submit("def add(a, b):", pooling="last", normalize=True).wait(60)
        assert done.embedding is not None
        close(done.embedding, one / one.norm())


def test_states_that_are_not_finite_fail_that_request_alone() -> None:
    executor = make_executor()
    poisoned(executor, math.nan)
    engine = make_engine(executor, 64)
    base, _ = models()
    (prompt,) = prompts((20,))
    for name in (None, "bad"):
        engine.submit(executor.request(prompt, name, pooling="mean"))
    good, bad = sorted(engine.step(), key=lambda chunk: chunk.index)
    assert good.completion is not None
    assert good.completion.embedding is not None
    close(good.completion.embedding, states(base, prompt).mean(0))
    assert isinstance(bad.error, GenerationError)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "cls"}, r"pooling='cls'; use 'last', 'mean' or None"),
        ({"pooling": "last", "normalize": 1}, "normalize=1; use True or False"),
        ({"normalize": True}, "normalize=True is for embeddings"),
        ({"pooling": "last", "prompt_logprobs": 1}, "prompt_logprobs=1 with pooling='last'"),
        ({"pooling": "mean", "max_new_tokens": 5}, "max_new_tokens=5 with pooling='mean'"),
        ({"pooling": "mean", "n": 2}, "n=2 with pooling='mean'"),
        ({"pooling": "mean", "echo": True}, "echo=True with pooling='mean'"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        shared().request([1, 2], **fields)


def test_no_prompts() -> None:
    with pytest.raises(GenerationError, match="no prompts to embed"):
        shared().embed([])
    with pytest.raises(GenerationError, match="pooling=None; use 'last' or 'mean'"):
        shared().embed([[1, 2]], pooling=None)  # type: ignore[arg-type]


def test_programs_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor()
    monkeypatch.delitem(executor.serving.runner._functions, "last_hidden")  # type: ignore[arg-type]
    with pytest.raises((ProgramError, GenerationError), match="compile it again for embeddings"):
        executor.embed([[1, 2]])
