"""Recorded windows, losses and updates train what eager ones do.

See `tests/support/interpreter/tape.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.explain import explain as explaining
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.model import step_graphs
from pcg.runtime.training import bound_training
from pcg.runtime.training.optimizer import (
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
    set_rate,
)
from pcg.runtime.training.publishers import VersionPublisher
from pcg.runtime.training.recorded import window_sizes
from pcg.runtime.training.recorded.loss_graphs import LossGraphs, UpdateGraphs
from pcg.runtime.training.recorded.recorded_program import OwnGradients
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.runtime.training.recorded.window_sizes import SIZES, WindowSizes
from pcg.runtime.training.runner import TrainingRunner
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.runtime.training.warm_jobs import KeptRunners, record_jobs
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.interpreter import bf16
from tests.support.interpreter.tape import Tape
from tests.support.live_tensors import live_bytes, memory_of, reached
from tests.support.prompts import prompts
from tests.support.recorded_jobs import Job

bf16.install()
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def executor_of() -> Executor:
    return compiled.executor(oracle.random_model(BY_NAME["llama3"].config(2)), backend="triton")


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


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------------ updates

KINDS = [
    Optimizer.of("adamw", {"weight_decay": 0.1}),
    Optimizer.of("sgd", {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}),
    Optimizer.of("sgd", {}),
]
RATES = (0.1, 0.0, 0.02, 0.3)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 4, generator=generator), torch.randn(4, generator=generator)]


def parameters() -> dict[str, Tensor]:
    return {"a": torch.full((3, 4), 0.5), "b.bias": torch.ones(4)}


def run(
    kind: Optimizer, recorder: Tape | None, saved: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Parameters, states and norms after some steps, from a saved state if one is given."""
    own, weights = OwnGradients(), parameters()
    optimizer = make_optimizer(weights, kind, 0.1)
    # All else is recorded from the second step on: the first makes states that are no zeros.
    is_late = not optimizer.defaults.get("fused") and saved is None
    if saved is not None:
        load_optimizer(optimizer, kind, weights, {name: x.clone() for name, x in saved.items()})

    def clip() -> Tensor:
        norm = torch.nn.utils.get_total_norm(
            [x.grad for x in weights.values() if x.grad is not None]
        )
        torch.nn.utils.clip_grads_with_norm_(weights.values(), 0.5, norm)
        return norm

    graphs = UpdateGraphs(optimizer, clip, own, recorder or Tape())
    found = {}
    for step, rate in enumerate(RATES):
        if recorder is not None:
            own.hold(weights.values())
        for weight, gradient in zip(weights.values(), gradients(step), strict=True):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.add_(gradient)
        assert graphs.serves == (recorder is not None and not (is_late and step == 0))
        found[f"norm {step}"] = (graphs.clip() if graphs.serves else clip()).clone()
        if graphs.serves:
            graphs.step(rate)
        else:
            set_rate(optimizer, rate)
            optimizer.step()
        for weight in weights.values():
            weight.grad = None
    return found | weights | optimizer_tensors(optimizer, weights)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=["adamw", "momentum", "sgd"])
def test_recorded_updates_have_the_bits_of_eager_ones(kind: Optimizer, resumes: bool) -> None:
    recorded_and_eager(kind, resumes, 0)


def recorded_and_eager(kind: Optimizer, resumes: bool, eager_steps: int) -> None:
    """Recorded steps give the bits of eager ones; so many of these come first."""
    saved = None
    if resumes:
        state = run(kind, None)
        saved = {name: state[name] for name in state if "/" in name}
    expected, recorder = run(kind, None, saved), Tape()
    found = run(kind, recorder, saved)
    assert (recorder.recorded, recorder.replayed) == (2, 2 * (len(RATES) - eager_steps))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# ----------------------------------------------------------------------------- replays in any order

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=3)
JOBS = st.builds(
    Job,
    widths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    steps=st.lists(st.lists(LENGTHS, min_size=1, max_size=5), min_size=1, max_size=3),
    evaluations=st.one_of(st.just([]), LENGTHS),
    warm=st.sampled_from([0, 0, 16, 32, 64]),
    windows=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    seed=st.integers(0, 2**32),
)


def check(job: Job) -> None:
    tape = Tape()
    found, expected = job.adapters(tape), job.adapters(None)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


# Of two layers and two windows, which one pool for all would train wrong, warm or not.
TWO = Job((8, 8), [[[32]] * 4], (), 0, (16,), "sgd", 0)
WARM = Job((8, 8), [[[32]] * 2, [[20, 40]]], (17,), 16, (16, 40), "adamw", 0)


@settings(max_examples=8)
@example(TWO)
@example(WARM)
@given(JOBS)
def test_jobs_are_replayed_in_any_order(job: Job) -> None:
    check(job)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=500)
@given(JOBS)
def test_many_recorded_jobs_train_what_eager_ones_do(job: Job) -> None:
    check(job)


# --------------------------------------------------------------------------------- sizes of windows


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), min_size=1))
def test_windows_make_headway_and_are_never_longer_than_they_may(
    asked: list[tuple[int, int]],
) -> None:
    sizes = WindowSizes()
    for tokens, remaining in asked:
        found = sizes.fitting(tokens, remaining)
        assert 0 < found <= min(tokens, remaining, SIZES[-1])
        sizes.begin_pass()
        assert sizes.size in SIZES


# --------------------------------------------------------------------------------------- known jobs


def test_a_job_that_no_cache_holds_is_refused() -> None:
    options = SimpleNamespace(names_step=False)
    state: Any = SimpleNamespace(program=SimpleNamespace(options=options))
    cache: Any = SimpleNamespace(pool=SimpleNamespace(size=100))
    with pytest.raises(FinetuneError, match=r"batch=4 and seq=1024 takes \d+ pages.* has 100;"):
        record_jobs(state, cache, 512, KeptRunners(), [WarmJob("lora", 4, 1024)])


@pytest.mark.parametrize("field", [{"batch": 0}, {"seq": 1.5}, {"batch": True}])
def test_numbers_of_a_job_are_checked(field: dict[str, Any]) -> None:
    with pytest.raises(FinetuneError, match="of a warm job; use an int of at least 1"):
        WarmJob("lora", **field)
