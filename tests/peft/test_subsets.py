"""Adapters on some layers, or of ranks that differ by layer: each kind of layer by itself.

Gradients are peft's; below the lowest layer that trains nothing is saved and no backward runs; and
the bytes are those predicted, and at most what eager transformers + peft saves.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import pcg.compiler as compiler
from pcg.explain import explain as explaining
from pcg.ir.program.program import Training
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import recipe_from
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.scheduling.jobs import Job
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import JobState
from pcg.runtime.model.weights import StateDictCheckpoint
from pcg.runtime.requests.step import Load
from pcg.runtime.training.bound_training import BoundTraining
from pcg.runtime.training.runner import TrainingPass, pass_through, training_runner
from pcg.runtime.training.work_units import Forward, Part, Phase
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.measured_memory import BATCH, SEQ, measured
from tests.support.parameters import mostly_slow
from tests.support.peft_cases import ALL, check_gradients, trained_gradients, wrap
from tests.support.prompts import TOLERANCE, prompts
from tests.support.saved_tensors import saved_bytes
from tests.support.threads import run_ranks, tp_mesh

FAMILY, LAYERS = BY_NAME["llama-biases"], 4
REGEX = r".*\.2\.self_attn\.[qv]_proj|.*\.3\.mlp\.up_proj"
RANKS = {r"layers\.[01]\..*": 2, r"layers\.3\..*v_proj": 7}
CASES: Mapping[str, Mapping[str, Any]] = {
    "the last layer": {"target_modules": ALL, "layers_to_transform": [3]},
    "a layer in the middle": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "two layers apart": {"target_modules": ["v_proj"], "layers_to_transform": [1, 3]},
    "a regex": {"target_modules": REGEX},
    "ranks by layer": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": RANKS},
    "biases of one layer": {
        "target_modules": ["o_proj"], "layers_to_transform": [2], "bias": "lora_only",
    },
    "dora of one layer": {
        "target_modules": ["k_proj"], "layers_to_transform": [2], "use_dora": True,
    },
}  # fmt: skip
LOWEST = {"the last layer": 3, "a layer in the middle": 1, "two layers apart": 1, "a regex": 2}


def peft_config(case: str) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=6, **copy.deepcopy(dict(CASES[case])))


def recipe_of(case: str) -> LoraConfig:
    recipe = recipe_from(peft_config(case))
    assert isinstance(recipe, LoraConfig)
    return recipe


@pytest.fixture(scope="module")
def base() -> Any:
    return oracle.random_model(FAMILY.config(LAYERS))


def executor_of(base: Any, case: str, directory: Path, **options: Any) -> tuple[Executor, Any]:
    """An executor with an adapter `a` of a case, and peft's model of the same adapter."""
    wrapped = wrap(base, peft_config(case))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(directory)
    return compiled.executor(base, {"a": str(directory)}, is_own=True, **options), wrapped


def backward_layers(training: Training) -> list[int]:
    return [
        layer
        for layer, index in enumerate(training.layers)
        if training.plans[index].backward is not None
    ]


# ------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("case", mostly_slow(CASES, "two layers apart", "biases of one layer"))
def test_gradients_are_pefts(base: Any, case: str, tmp_path: Path) -> None:
    executor, wrapped = executor_of(base, case, tmp_path)
    check_gradients(executor, "a", wrapped, (12, 7, 3))
    # The program that was compiled is the adapter's own, and is not compiled again.
    assert executor.training_runner("a").training is executor.program.training


@pytest.mark.parametrize(
    "case", mostly_slow(["a layer in the middle", "a regex", "ranks by layer"], "ranks by layer")
)
def test_gradients_on_two_ranks_are_pefts(base: Any, case: str, tmp_path: Path) -> None:
    _, wrapped = executor_of(base, case, tmp_path)
    sequences = prompts((12, 7, 3))
    oracle.loss_and_gradients(wrapped, sequences)
    expected = trained_gradients(wrapped)
    program = compiler.compile_program(
        base.config.to_dict(), {"a": str(tmp_path)}, tp=2, dtype="float32", batch=3, seq=12
    )

    def on_a_rank(ranks: Any) -> Mapping[str, torch.Tensor]:
        weights = StateDictCheckpoint(base.state_dict(), program.base_prefix)
        peft_of = {"a": str(tmp_path)}
        executor = compiler.make_executor(program, weights, peft_of, None, "cpu", tp_mesh(ranks))
        runner = executor.training_runner("a")
        examples = [Example(s, s) for s in sequences]
        runner.forward_backward(examples, runner.count_targets(examples))
        runner.sum_gradients()
        gradients = {n: t.grad for n, t in runner.parameters.items() if t.grad is not None}
        return {n: g.clone() for n, g in runner.shards.joined(gradients).items()}

    for found in run_ranks(2, on_a_rank):
        assert found.keys() == expected.keys()
        for path, gradient in found.items():
            theirs = expected[path].reshape(gradient.shape)
            assert (gradient - theirs).norm() / theirs.norm() < TOLERANCE, path


class SmallWindows(Sharing):
    """Nothing is served, and windows have seven tokens at most."""

    def serves(self, has_work: bool) -> bool:
        return not has_work

    def forward(self, work: Work, unit: Forward) -> int:
        return min(unit.remaining, 7)

    def fits(self, work: Work, phase: Phase, load: Load, ahead_s: float, **_: bool) -> bool:
        return True


def test_a_job_in_windows_goes_back_to_the_lowest_trained_layer_alone(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, wrapped = executor_of(base, "a regex", tmp_path)
    went: list[int] = []
    plain = BoundTraining.layer_backward

    def layer_backward(self: BoundTraining, layer: int, *arguments: Any) -> Any:
        went.append(layer)
        return plain(self, layer, *arguments)

    monkeypatch.setattr(BoundTraining, "layer_backward", layer_backward)
    runner = training_runner(executor.state, executor.adapters["a"], windows=True)
    sequences = prompts((19, 8))
    examples = [Example(s, s) for s in sequences]
    job = Job("a", pass_through(runner, examples, runner.count_targets(examples)))
    engine = executor.engine(Limits(running=2), sharing=SmallWindows())
    engine.jobs.add(job)
    while engine.jobs or not engine.is_idle:
        for _ in engine.step():
            pass
    assert job.state is JobState.SUCCEEDED, job.error
    assert went == [3] * 4 + [2] * 4
    oracle.loss_and_gradients(wrapped, sequences)
    expected = trained_gradients(wrapped)
    for path, parameter in runner.parameters.items():
        theirs = expected[path].reshape(parameter.shape)
        assert parameter.grad is not None
        assert (parameter.grad - theirs).norm() / theirs.norm() < TOLERANCE, path


# ---------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize("case", mostly_slow(LOWEST, "a regex", "two layers apart"))
def test_below_the_lowest_trained_layer_nothing_is_saved_and_no_backward_runs(
    base: Any, case: str, tmp_path: Path
) -> None:
    executor, _ = executor_of(base, case, tmp_path)
    runner, lowest = executor.training_runner("a"), LOWEST[case]
    assert backward_layers(runner.training) == list(range(lowest, LAYERS))
    whole = TrainingPass(runner, [Example([3] * 9, [3] * 9)], normaliser=1.0)
    whole.forward(9)
    assert whole.layers == LAYERS - lowest
    saved = [len(tensors) for tensors in whole._windows[0].saved.values()]
    assert saved[:lowest] == [0] * lowest
    assert all(saved[lowest:])
    for _ in range(1 + LAYERS - lowest):  # the loss first
        assert not whole.is_done
        Part(whole).run()
    assert whole.is_done


def kinds(layers: int, **fields: Any) -> tuple[Training, int]:
    """The training program of a model of many layers, and how many blocks serve."""
    recipe = LoraConfig(r=4, **fields)
    program = compiler.compile_program(FAMILY.config(layers), {"a": recipe}, dtype="float32")
    assert program.training is not None
    return program.training, len(program.serving.model.blocks)


def test_kinds_not_layers_are_compiled() -> None:
    few, many = (
        kinds(layers, target_modules=("v_proj",), layers_to_transform=(1, layers - 1))[0]
        for layers in (4, 24)
    )
    names = [plan.forward.name for plan in few.plans]
    assert names == [plan.forward.name for plan in many.plans]
    functions = [
        [line for line in training.source.splitlines() if line.startswith("def ")]
        for training in (few, many)
    ]
    assert functions[0] == functions[1]
    assert many.model.layers == (0, 1, *[0] * 21, 1)
    # Below; the first that trains; those between without adapters; the last.
    assert many.layers == (0, 1, *[2] * 21, 3)


# ---------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [pytest.param(one, marks=pytest.mark.slow if one == "a regex" else ()) for one in CASES],
        "two layers apart",
        "biases of one layer",
    ),
)
def test_saved_bytes_are_those_predicted_and_at_most_eagers(
    base: Any, case: str, tmp_path: Path
) -> None:
    executor, _ = executor_of(base, case, tmp_path, batch=BATCH, seq=SEQ)
    config = FAMILY.config(LAYERS)
    report = explaining.explain(config, recipe_of(case), batch=BATCH, seq=SEQ, dtype="float32")
    ours = report.stage("compressed")
    assert ours is not None
    assert measured(executor) == ours.bytes
    # Without the loss, which leaves its gradients alone here.
    assert ours.bytes <= saved_bytes(config, torch.float32, peft_config(case), batch=BATCH, seq=SEQ)
