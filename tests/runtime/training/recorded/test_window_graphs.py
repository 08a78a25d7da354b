"""Recorded windows train what eager ones do: see `tests/support/interpreter/tape.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.runtime.data.example import Example
from pcg.runtime.engine.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.model import step_graphs
from pcg.runtime.training import bound_training
from pcg.runtime.training.recorded import window_sizes
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.tape import Tape
from tests.support.prompts import prompts

bf16.install()
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def executor_of() -> Executor:
    return compiler.compile(oracle.random_model(BY_NAME["llama3"].config(2)), backend="triton")


def trained(data: list[Example], recipe: dict[str, Any] = LORA, **options: Any) -> list[Tensor]:
    """The adapter after a job."""
    executor = executor_of()
    engine = executor.engine(Limits(tokens=16, least_chunk=4), kv_cache_bytes=2**20)
    job = engine.finetune(data, "mine", peft=recipe, learning_rate=0.01, **options)
    while not engine.is_idle:
        engine.step()
    assert job.error is None
    return [tensor.clone() for tensor in executor.adapters["mine"].tensors]


def test_recorded_windows_train_what_eager_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are cut, and of which two share a window, and a rest that is filled up."""
    data = [Example(s, s) for s in prompts((21, 13))]
    expected = trained(data, batch_size=2, max_steps=3)
    tapes: list[Tape] = []

    def recorder_for(device: torch.device) -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    monkeypatch.setattr(bound_training, "recorder_for", recorder_for)
    monkeypatch.setattr(step_graphs, "recorder_for", lambda device: None)
    monkeypatch.setattr(window_sizes, "SIZES", (16,))
    found = trained(data, batch_size=2, max_steps=3)
    (tape,) = tapes
    assert tape.recorded == 12  # three windows' two layers, forward and back
    assert tape.replayed == 6 + 2 * 12  # each forward as it is recorded, and two passes
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
