"""Finetuning with saved activations in 8 bits: losses fall as they do without."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import pcg.compiler as compiler
from pcg.ranks.group import Ranks
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from tests.support import oracle, ranked
from tests.support.threads import run_ranks

CONFIG: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
RECIPE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
STEPS = 30
DATA = [Example(row, row) for row in ([5 + (i * j) % 50 for j in range(24)] for i in range(1, 9))]


def executor(lossy: str | None) -> Executor:
    config = transformers.LlamaConfig(**CONFIG).to_dict()
    model = oracle.random_model({**config, "model_type": "llama"})
    return compiler.compile(model, {"a": RECIPE}, lossy_activations=lossy)


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
        peft=RECIPE,
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


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_losses_over_ranks_are_those_of_one(sequence_parallel: bool) -> None:
    def losses(degree: int, **options: Any) -> tuple[float, ...]:
        program = ranked.make_program("llama3", degree, lossy_activations="fp8", **options)

        def run(ranks: Ranks | None = None) -> tuple[float, ...]:
            made = ranked.make_executor(program, "llama3", ranks)
            return made.finetune(ranked.EXAMPLES, "a", **ranked.JOB).losses

        return run() if degree == 1 else run_ranks(degree, run)[0]

    found = losses(2, sequence_parallel=sequence_parallel)
    assert found == pytest.approx(losses(1), rel=2e-3)  # blocks of parts round otherwise
