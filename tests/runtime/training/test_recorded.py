"""Recorded windows, losses and updates train what eager ones do.

See `tests/support/interpreter/tape.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.explain import explain as explaining
from pcg.ir.program.program import Training
from pcg.peft.adapter import Adapter, new_adapter
from pcg.peft.registry import recipe_from
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.executor import Executor
from pcg.runtime.model import step_graphs
from pcg.runtime.requests.step import Load
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
from pcg.runtime.training.runner import TrainingPass, TrainingRunner
from pcg.runtime.training.torch_optimizers import Optimizer
from pcg.runtime.training.warm_jobs import KeptRunners, record_jobs
from pcg.runtime.training.work_units import Forward, Phase
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


# --------------------------------------------------------------------- when windows are recorded


class FixedParts(Sharing):
    """Five parts a step, of windows of eight tokens in layers, whatever the time."""

    def forward(self, work: Work, unit: Forward) -> int:
        return 0

    def in_layers(self, work: Work, unit: Forward, ahead_s: float, **_: bool) -> int:
        return min(8, unit.remaining)

    def fits(self, work: Work, phase: Phase, load: Load, ahead_s: float, **_: bool) -> bool:
        return work.units < 5


@pytest.mark.parametrize("lasts_s", [pytest.param(0.0, marks=pytest.mark.slow), 1e3])
def test_windows_are_recorded_while_the_device_runs_what_is_served(lasts_s: float) -> None:
    """One layer in a step, and further ones for as long as it takes; all where nobody waits."""
    executor = executor_of()
    forward, back = Latency(lasts_s, 0.0, 0.0), Latency(1e-6, 0.0, 0.0)
    engine = executor.engine(
        Limits(tokens=32, tpot_slo_s=2e3),
        kv_cache_bytes=2**20,
        sharing=FixedParts(),
        latencies=Latencies(forward, back),
    )
    order: list[str] = []
    start, run_parts = engine.device.start, engine.device.run_parts
    started = lambda *of: order.append("start") or start(*of)  # noqa: E731
    ran = lambda parts: order.append("part") or run_parts(parts)  # noqa: E731
    engine.device.start, engine.device.run_parts = started, ran  # type: ignore[method-assign]
    data = [Example(s, s) for s in prompts((21, 13))]
    engine.finetune(data, "trained", peft=LORA, max_steps=20, batch_size=2, learning_rate=0.01)
    engine.submit(executor.request(prompts((5,))[0], max_new_tokens=6, ignore_eos=True))
    with (
        patch.object(Latency, "observe"),
        patch.object(TrainingPass, "has_unrecorded", True),
        patch.object(TrainingPass, "record_next", lambda whole: order.append("record")),
    ):
        for _ in range(6):
            engine.step()
        served, order[:] = " ".join(order), []
        for _ in range(2):
            engine.step()
    assert served.count("start") == 6
    assert served.count("record") > 3
    assert ("record record" in served) == (lasts_s > 0)
    assert "part record" not in served  # the step's forward is launched before
    assert order.count("record") > 4


# --------------------------------------------------------------------------------------- known jobs


PROGRAM, OTHER = cast(Training, object()), cast(Training, object())


@dataclass(eq=False)
class Runner:
    """A runner with recorded windows."""

    adapter: Adapter
    training: Training = PROGRAM
    is_recorded: bool = True


def adapter(name: str, seed: int = 0, rank: int = 2, **fields: Any) -> Adapter:
    recipe = recipe_from({"peft_type": "LORA", "r": rank, "target_modules": ["q"], **fields})
    return new_adapter(name, recipe, {"layers.0.q": (6, 4)}, seed=seed)


@pytest.mark.parametrize(
    ("new", "program", "is_alike"),
    [
        (adapter("second", seed=1), PROGRAM, True),
        (adapter("second", rank=3), PROGRAM, False),
        (adapter("second", lora_alpha=5), PROGRAM, False),
        (adapter("second"), OTHER, False),
    ],
    ids=["alike", "rank", "scale", "program"],
)
def test_a_job_has_its_weights_in_the_memory_of_another_of_its_shape(
    new: Adapter, program: Training, is_alike: bool
) -> None:
    """Else what a job left is dropped, and what a warm-up recorded is not."""
    kept: Any = KeptRunners()
    lasting, passing, last = (Runner(adapter(name)) for name in ("warm", "first", "last"))
    kept.give(passing)
    kept.give(last)  # one is kept of those that do not last
    kept.give(lasting, lasts=True)
    kept.give(Runner(adapter("eager"), is_recorded=False))
    places = [x.data_ptr() for x in last.adapter.tensors]
    found = kept.take(program, new)
    assert found is (last if is_alike else None)
    if is_alike:
        assert found.adapter.name == "second"
        assert [x.data_ptr() for x in found.adapter.tensors] == places
        assert all(map(torch.equal, found.adapter.tensors, new.tensors))
    assert kept.take(PROGRAM, adapter("third")) is lasting
    assert kept.take(PROGRAM, adapter("fourth")) is None


def test_memory_of_runners_goes_with_the_last_job() -> None:
    kept: Any = KeptRunners()
    lasting, passing = Runner(adapter("warm")), Runner(adapter("first"))
    is_there = weakref.ref(passing)
    ends = [kept.begin_job() for _ in range(2)]
    kept.give(lasting, lasts=True)
    kept.give(passing)
    del passing
    ends[0]()
    assert is_there() is not None  # the second job may have it
    ends[1]()
    assert is_there() is None
    assert kept.take(PROGRAM, adapter("next")) is lasting


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
