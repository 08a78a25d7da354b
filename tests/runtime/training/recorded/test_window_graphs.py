"""Recorded windows, losses and updates train what eager ones do.

See `tests/support/interpreter/tape.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model import step_graphs
from pcg.runtime.training import bound_training
from pcg.runtime.training.publishers import VersionPublisher
from pcg.runtime.training.recorded import window_sizes
from pcg.runtime.training.recorded.loss_graphs import LossGraphs, UpdateGraphs
from pcg.runtime.training.runner import TrainingPass, TrainingRunner
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.tape import Tape
from tests.support.live_tensors import live_bytes, memory_of, reached
from tests.support.prompts import prompts

bf16.install()
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def executor_of() -> Executor:
    return compiler.compile(oracle.random_model(BY_NAME["llama3"].config(2)), backend="triton")


def trained(data: list[Example], recipe: dict[str, Any] = LORA, **options: Any) -> list[Tensor]:
    """The adapter after a job."""
    return trained_and_evaluated(data, recipe, **options)[0]


def trained_and_evaluated(
    data: list[Example], recipe: dict[str, Any] = LORA, **options: Any
) -> tuple[list[Tensor], list[float]]:
    """The adapter after a job, and the losses of its evaluations."""
    executor = executor_of()
    engine = executor.engine(Limits(tokens=16, least_chunk=4), kv_cache_bytes=2**20)
    job = engine.finetune(data, "mine", peft=recipe, learning_rate=0.01, **options)
    while not engine.is_idle:
        engine.step()
    assert job.error is None
    tensors = [tensor.clone() for tensor in executor.adapters["mine"].tensors]
    return tensors, [loss for _, loss in job.result.eval_losses]


def held_bytes(runner: TrainingRunner, tape: Tape) -> int:
    """The bytes of a runner's adapter, its gradients, and the memory of its windows and losses."""
    graphs = runner.window_graphs(runner._graphs_of)
    assert graphs is not None
    own = reached([graphs], [*tape.pools, graphs._cache, runner])
    cache = {memory_of(x) for x in (*graphs._cache.keys, *graphs._cache.values)}
    own = [x for x in own if memory_of(x) not in cache]
    beside = [x for x in own if all(pool.segment_at(x.data_ptr()) is None for pool in tape.pools)]
    pools = sum(pool.most_bytes for pool in tape.pools)
    return live_bytes([*runner.adapter.tensors, *beside]) + pools


@contextmanager
def recording() -> Iterator[list[Tape]]:
    """Have jobs record tapes, of windows of 16 tokens."""
    tapes: list[Tape] = []

    def recorder_for(device: torch.device) -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    with (
        patch.object(bound_training, "recorder_for", recorder_for),
        patch.object(step_graphs, "recorder_for", lambda device: None),
        patch.object(window_sizes, "SIZES", (16,)),
    ):
        yield tapes


def test_recorded_jobs_train_what_eager_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are cut, and of which two share a window, and a rest that is filled up.

    Dropout drops the same of windows that are recorded and of those that are not.
    """
    data = [Example(s, s) for s in prompts((21, 13))]
    options: dict[str, Any] = {"batch_size": 2, "max_steps": 3, "max_grad_norm": 0.1}
    sites = [*LORA["target_modules"], "lm_head"]
    recipe = LORA | {"lora_dropout": 0.25, "target_modules": sites}
    expected = trained(data, recipe, **options)
    losses, updates, runners = [], [], []
    run, step = LossGraphs.run, UpdateGraphs.step
    monkeypatch.setattr(LossGraphs, "run", lambda *of: losses.append(run(*of)) or losses[-1])
    monkeypatch.setattr(UpdateGraphs, "step", lambda *of: updates.append(step(*of)))
    start = VersionPublisher.start
    keep = lambda *of: runners.append(start(*of)) or runners[-1]  # noqa: E731
    monkeypatch.setattr(VersionPublisher, "start", keep)
    with recording() as tapes:
        found = trained(data, recipe, **options)
    (tape,) = tapes
    # What the job would leave to the next one is what `explain` says of its windows of 48 tokens.
    config = BY_NAME["llama3"].config(2)
    explained = explaining.explain(
        config, recipe, batch=3, seq=16, serve_tokens=48, dtype="float32"
    )
    held = held_bytes(runners.pop(), tape)
    assert 0.8 * explained.kept_bytes < held < 1.2 * explained.kept_bytes
    replayed = [one for one in losses if one is not None]
    # Three windows' prologue and two layers, forward and back; a size of losses; and an update.
    assert tape.recorded == 3 * 5 + 1 + 2
    assert len(losses) == 3 * 3
    assert len(replayed) == len(losses) - 1  # the first of its size is eager
    assert len(updates) == 3
    # Each forward as it is recorded, two passes, the losses and the updates.
    assert tape.replayed == 3 * 3 + 2 * 3 * 5 + len(replayed) + 2 * 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_recorded_evaluation_has_the_losses_of_an_eager_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its windows go through one slot, one after the other, whatever training has recorded."""
    data = [Example(s, s) for s in prompts((11,))]
    options: dict[str, Any] = {
        "batch_size": 2,
        "max_steps": 1,
        "eval_data": [Example(s, s) for s in prompts((16, 9))],
        "eval_every": 1,
        "eval_at_start": True,
    }
    tensors, expected = trained_and_evaluated(data, **options)
    windows: list[bool] = []
    end = TrainingPass.end

    def ended(self: TrainingPass, window: Any) -> None:
        if not self.trains:
            windows.append(window.slot is not None)
        end(self, window)

    monkeypatch.setattr(TrainingPass, "end", ended)
    with recording() as tapes:
        found, losses = trained_and_evaluated(data, **options)
    assert windows == [False, *[True] * 3]  # of 25 tokens each time; the first is recorded
    (tape,) = tapes
    # The prologue and two layers, which training's pass takes over and goes back through; the loss
    # of evaluation, and the update.
    assert tape.recorded == 3 + 2 + 1 + 2
    assert losses == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(found, tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


class Refusing(Tape):
    """A device that records nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_job_whose_layers_cannot_be_recorded_trains_eagerly() -> None:
    data = [Example(s, s) for s in prompts((21, 13))]
    options: dict[str, Any] = {"batch_size": 2, "max_steps": 2}
    expected = trained(data, **options)
    with (
        recording() as tapes,
        patch.object(bound_training, "recorder_for", lambda device: Refusing()),
        pytest.warns(UserWarning, match="could not be recorded as a CUDA graph.*not permitted"),
    ):
        found = trained(data, **options)
    assert not tapes
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
