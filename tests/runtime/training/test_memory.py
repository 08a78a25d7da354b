"""Memory of training: budgets in bytes, states in host memory, and activations in 8 bits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import pcg
from pcg.errors import MemoryBudgetError
from pcg.peft.lora import LoraConfig
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.optimizer import (
    HostStates,
    load_optimizer,
    make_optimizer,
    optimizer_tensors,
)
from pcg.runtime.training.torch_optimizers import OPTIMIZERS, SHARED_KEYS, Optimizer
from tests.support import compiled as programs
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.measured_memory import measured
from tests.support.small_job import LORA, make_model

RECIPE = LoraConfig(r=4, target_modules="all-linear")
CONFIG = BY_NAME["llama3"].config(4)
SEQ = 32


def saved_bytes(budget: float, batch: int) -> int:
    report = pcg.explain(CONFIG, RECIPE, memory_budget=budget, batch=batch, seq=SEQ)
    return report.memory_bytes["activations"]


BUDGET = saved_bytes(1, 1)
"""All that one sequence may save: three take less than all, and twenty more than there is."""


@pytest.fixture(scope="module")
def base() -> Any:
    return oracle.random_model(CONFIG)


def compiled(base: Any, budget: float | str | None, **options: int) -> Executor:
    return programs.executor(base, {"a": RECIPE}, is_own=True, memory_budget=budget, **options)


def gradients(executor: Executor, batch: int) -> dict[str, torch.Tensor]:
    runner = executor.training_runner("a")
    for parameter in runner.parameters.values():
        parameter.grad = None
    runner.forward_backward([Example([5] * SEQ, [5] * SEQ)] * batch, batch * (SEQ - 1))
    return {name: parameter.grad.clone() for name, parameter in runner.parameters.items()}


def test_a_larger_step_saves_no_more_than_the_budget(base: Any) -> None:
    executor = compiled(base, f"{BUDGET}B", batch=1, seq=SEQ)
    assert measured(executor, 1, SEQ) <= BUDGET
    assert saved_bytes(1, 3) > BUDGET >= saved_bytes(0, 3)
    assert measured(executor, 3, SEQ) <= BUDGET
    assert measured(executor, 3, SEQ - 1) <= BUDGET


def test_a_step_that_is_planned_again_has_the_same_gradients(base: Any) -> None:
    expected = gradients(compiled(base, None), 3)
    found = gradients(compiled(base, f"{BUDGET}B", batch=1, seq=SEQ), 3)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_step_that_no_plan_holds_is_refused(base: Any) -> None:
    executor = compiled(base, f"{BUDGET}B", batch=1, seq=SEQ)
    with pytest.raises(MemoryBudgetError, match=f"batch 20 of {SEQ} tokens needs"):
        gradients(executor, 20)
    gradients(executor, 1)


def test_a_job_that_may_exceed_the_budget_is_refused_before_its_first_step(base: Any) -> None:
    executor = compiled(base, f"{BUDGET}B", batch=1, seq=SEQ)
    data = [Example([5] * size, [5] * size) for size in (4, 4, *[SEQ] * 20)]
    steps: list[Any] = []
    with pytest.raises(MemoryBudgetError, match="batch 20"):
        executor.finetune(data, "b", batch_size=20, max_steps=2, on_step=steps.append)
    assert not steps
    assert "b" not in executor.adapters
    result = executor.finetune(data, "b", batch_size=3, max_steps=2, on_step=steps.append)
    assert len(steps) == result.steps == 2


@pytest.mark.slow
def test_the_plans_batch_is_the_default_one(base: Any) -> None:
    data = [Example([5] * 8, [5] * 8)] * 12
    for options, steps in (({}, 2), ({"batch": 3}, 4), ({"seq": SEQ}, 12)):
        assert compiled(base, None, **options).finetune(data, "b").steps == steps
    executor = compiled(base, "64MB", batch=4)
    assert executor.finetune(data, "b").steps == 3
    assert executor.finetune(data, "b", batch_size=6).steps == 2


# -------------------------------------------------------------------------------- lossy activations

LOSSY_CONFIG: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
LOSSY_RECIPE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
STEPS = 30
DATA = [Example(row, row) for row in ([5 + (i * j) % 50 for j in range(24)] for i in range(1, 9))]


def executor(lossy: str | None) -> Executor:
    config = transformers.LlamaConfig(**LOSSY_CONFIG).to_dict()
    model = oracle.random_model({**config, "model_type": "llama"})
    return programs.executor(model, {"a": LOSSY_RECIPE}, is_own=True, lossy_activations=lossy)


def by_itself(lossy: str | None) -> list[float]:
    losses: list[float] = []
    executor(lossy).finetune(
        DATA,
        "a",
        on_step=lambda step: losses.append(step.loss),
        max_steps=STEPS,
        batch_size=4,
        learning_rate=1e-2,
    )
    return losses


def by_an_engine(lossy: str | None) -> list[float]:
    """In windows of at most 16 tokens, through the cache."""
    engine = executor(lossy).engine(Limits(tokens=16), kv_cache_bytes=2**22)
    losses: list[float] = []
    job = engine.finetune(
        DATA,
        "trained",
        peft=LOSSY_RECIPE,
        on_step=lambda step: losses.append(step.loss),
        max_steps=STEPS,
        batch_size=4,
        learning_rate=1e-2,
    )
    while not engine.is_idle:
        engine.step()
    assert job.error is None
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("run", [by_itself, by_an_engine])
def test_losses_fall_as_they_do_without(run: Any) -> None:
    exact, lossy = run(None), run("fp8")
    assert len(exact) == len(lossy) == STEPS
    assert lossy[0] == pytest.approx(exact[0], rel=1e-5)  # the forward is exact
    assert lossy != exact
    assert sum(lossy[-4:]) / 4 < 0.6 * lossy[0]
    assert sum(lossy[-4:]) == pytest.approx(sum(exact[-4:]), rel=0.05)


# --------------------------------------------------------------------------- states in host memory

SHAPES = {"small": (3, 5), "large": (65, 64), "bias": (1, 7)}
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in OPTIMIZERS),
    ("adam", {"amsgrad": True}),
    ("rmsprop", {"momentum": 0.9, "centered": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_updates_are_those_of_the_library(
    name: str, options: Mapping[str, Any], device: str
) -> None:
    """Beside its own step over all parameters; in the middle the job is resumed."""
    torch.manual_seed(0)
    start = {path: torch.randn(shape, device=device) for path, shape in SHAPES.items()}
    here, there = copy.deepcopy(start), copy.deepcopy(start)
    kind = Optimizer.of(name, options, is_offloaded=True)
    theirs = make_optimizer(here, kind, 1e-2)
    ours = make_optimizer(there, kind, 1e-2)
    states = HostStates(ours)
    for step in range(5):
        if step == 3:
            saved = copy.deepcopy(optimizer_tensors(ours, there))
            ours = make_optimizer(there, kind, 1e-2)
            states = HostStates(ours)
            load_optimizer(ours, kind, there, saved)
        for path in SHAPES:
            gradient = torch.randn(SHAPES[path], device=device)
            here[path].grad, there[path].grad = gradient, gradient.clone()
        theirs.step()
        states.step()
    for path, tensor in here.items():
        assert torch.equal(there[path], tensor)
        assert not torch.equal(tensor, start[path])
    found, expected = optimizer_tensors(ours, there), optimizer_tensors(theirs, here)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key].to(found[key].device)) for key in expected)
    moved = [v for k, v in found.items() if v.ndim and k not in SHARED_KEYS]
    assert all(not v.is_cuda and v.is_pinned() == (device == "cuda") for v in moved)


@pytest.mark.parametrize(
    ("name", "options"),
    # Without dampening SGD's learning rate would be on the device that is not there.
    [("sgd", {"momentum": 0.9, "dampening": 0.1}), ("adamw8bit", {}), ("lion8bit", {})],
)
def test_a_gpu_has_the_states_of_one_parameter(name: str, options: Mapping[str, Any]) -> None:
    """Tensors without data show where states lie; what all parameters share stays there."""
    kind = Optimizer.of(name, options, is_offloaded=True)
    shapes = {str(i): (64 + i, 64) for i in range(3)}
    expected = kind.state_memory(shapes.values(), torch.float32)
    stream = mock.Mock()
    streams = {"current_stream": mock.Mock(return_value=stream)}
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # bitsandbytes' table of codes has data
    with fake:
        parameters = {path: torch.empty(shape, device="cuda") for path, shape in shapes.items()}
    optimizer = make_optimizer(parameters, kind, 1e-3)
    with fake, mock.patch.multiple("torch.cuda", synchronize=mock.DEFAULT, **streams):
        states = HostStates(optimizer)
        library_step, most = optimizer.step, 0

        def bytes_on(device: str) -> int:
            return sum(
                value.nbytes
                for state in optimizer.state.values()
                for key, value in state.items()
                if isinstance(value, Tensor) and key not in SHARED_KEYS
                if value.device.type == device
            )

        def step() -> None:
            nonlocal most
            library_step()
            most = max(most, bytes_on("cuda"))

        with mock.patch.object(optimizer, "step", step):
            for _ in range(2):
                for tensor in parameters.values():
                    tensor.grad = torch.empty_like(tensor)
                states.step()
                assert bytes_on("cuda") == 0
        assert (bytes_on("cpu"), most) == (expected.host_bytes, expected.update_bytes)
        assert stream.synchronize.call_count == 2


def test_explain_counts_both_memories() -> None:
    report = pcg.explain(make_model(), LORA, optimizer="paged_adamw")
    moments = 2 * 4 * report.parameters["trainable"]
    counts = 4 * 8  # of the steps of each of eight matrices
    memory = report.memory_bytes
    assert (memory["optimizer"], report.host_bytes) == (0, {"optimizer": moments + counts})
    assert memory["total"] == sum(memory.values()) - memory["total"]
    update = report.timeline[-1]
    assert (update.label, update.kept_bytes) == ("update", 0)
    assert update.workspace_bytes == 2 * 4 * 4 * 64  # the moments of an A at down_proj
    assert "and in host memory: " in report.to_text()
    assert "In host memory, beside it:" in report.to_html()
