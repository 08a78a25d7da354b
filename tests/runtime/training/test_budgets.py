"""A memory budget in bytes holds for every step, and the plan's step is the default one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import pcg
import pcg.compiler as compiler
from pcg.errors import MemoryBudgetError
from pcg.peft.lora import LoraConfig
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.data.order import Batches
from pcg.runtime.executor import Executor
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.measured_memory import measured

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
    return compiler.compile(base, {"a": RECIPE}, memory_budget=budget, **options)


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


@pytest.mark.parametrize(
    ("bounds", "virtual", "expected"),
    [
        ({"batch_size": 2}, 0, (2, 15)),
        ({"batch_size": 2}, 4, (2, 23)),
        ({"max_tokens": 12}, 0, (2, 12)),
        ({"max_tokens": 12}, 2, (2, 16)),
        ({"batch_size": 2, "max_tokens": 12}, 0, (2, 12)),
        ({"batch_size": 9}, 0, (5, 29)),
    ],
)
def test_the_largest_batch_of_any_epoch(
    bounds: dict[str, int], virtual: int, expected: tuple[int, int]
) -> None:
    examples = [Example([5] * size, [5] * size) for size in (7, 3, 8, 5, 6)]
    batches = Batches(examples, **bounds)
    assert batches.largest(virtual) == expected
    count, tokens = expected
    for epoch in range(20):
        for batch in batches.plan(epoch):
            assert len(batch) <= count
            assert sum(len(examples[i].ids) + virtual for i in batch) <= tokens


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
    return compiler.compile(model, {"a": LOSSY_RECIPE}, lossy_activations=lossy)


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
