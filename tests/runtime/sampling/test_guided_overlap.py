"""Guides where steps begin before the tokens of the step before are read.

A row's mask follows from its last token, which the host does not know when the forward begins.
"""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import pcg.compiler as compiler
from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Completion
from pcg.runtime.sampling.grammars import Grammars
from tests.support import tiny_llama
from tests.support.interpreter.stand_in import tensors_on_cuda
from tests.support.small_engine import LORA

CHOICES = ["left", "right", "ünï😀"]
PATTERN = r"[a-c]{2,4}-\d{3}(x|yz)"
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 999}, "maxItems": 4}
ASKED: list[dict[str, Any]] = [
    {"guided_regex": PATTERN, "temperature": 2.0},
    {"temperature": 0.0},
    {"guided_choice": CHOICES, "temperature": 1.0, "n": 2},
    {"guided_json": NUMBERS, "temperature": 1.5, "repetition_penalty": 1.1},
    {"guided_regex": PATTERN, "temperature": 0.0, "logprobs": 1},
    {"guided_regex": "a{40}b", "temperature": 1.0, "stop": ["aaa"]},
    {"temperature": 1.0},
]


def devices(name: str) -> AbstractContextManager[None]:
    return nullcontext() if name == "cpu" else tensors_on_cuda()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return tiny_llama.save(tmp_path_factory.mktemp("model"), seed=3, **sizes)


def served(executor: Executor, is_ahead: bool) -> tuple[dict[Any, Completion], dict[str, int]]:
    """Completions of requests that come one after the other, and how steps were read."""
    engine = executor.engine(Limits(running=6, tokens=48), kv_cache_bytes=2**20)
    engine.device.is_ahead = is_ahead
    asked = [
        executor.request(
            f"what is {number}?", "a" if number % 3 == 1 else None, max_new_tokens=16,
            seed=number, **fields,
        )
        for number, fields in enumerate(ASKED)
    ]  # fmt: skip
    found: dict[Any, Completion] = {}
    for step in range(500):
        if step % 2 == 0 and asked:
            engine.submit(asked.pop(0))
            engine.wait_prepared()
        for chunk in engine.step():
            assert chunk.error is None
            if chunk.completion is not None:
                found[chunk.index, chunk.choice] = chunk.completion
        engine.check_integrity()
        if not asked and engine.is_idle:
            return found, dict(engine.reads)
    raise AssertionError("the engine goes on for ever")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_guided_tokens_are_those_of_steps_one_by_one(
    directory: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All guided rows run ahead, and no step waits for one of them."""
    made: list[int] = []
    begin_masks = Grammars.begin_masks

    def counted(grammars: Grammars, rows: Any) -> None:
        made.append(len(rows))
        begin_masks(grammars, rows)

    monkeypatch.setattr(Grammars, "begin_masks", counted)
    with devices(device):
        executor = compiler.compile(directory, backend="torch", device=device)
        adapter = executor.add_adapter("a", LORA)
        for number, weights in enumerate(adapter.weights.values()):
            generator = torch.Generator().manual_seed(number)
            weights.b.copy_(0.2 * torch.randn(weights.b.shape, generator=generator))
        executor.refresh_adapter("a")
        alone, _ = served(executor, is_ahead=False)
        made.clear()
        ahead, reads = served(executor, is_ahead=True)
    assert {key: one.token_ids for key, one in ahead.items()} == {
        key: one.token_ids for key, one in alone.items()
    }
    assert {key: one.text for key, one in ahead.items()} == {
        key: one.text for key, one in alone.items()
    }
    # One prompt has two continuations, which begin once its step is read.
    assert reads.keys() == {"ahead", "a prompt's end", "nothing served"}
    assert reads["a prompt's end"] == 1
    assert reads["ahead"] > 20
    assert sum(made) > 40
    for (number, _), completion in ahead.items():
        if completion.finish_reason != "stop":
            continue
        if number in (0, 4):
            assert re.fullmatch(PATTERN, completion.text)
        if number == 2:
            assert completion.text in CHOICES
        if number == 3:
            assert isinstance(json.loads(completion.text), list)
