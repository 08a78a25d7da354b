"""Adapters that are trained over a mesh of ranks, to be compared with those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pcg.ranks.mesh import RankMesh
from pcg.runtime.executor import Executor
from tests.support import ranked
from tests.support.ranked import EXAMPLES, JOB, make_executor, make_program

BATCHES: Mapping[str, Any] = dict(JOB, batch_size=3, gradient_accumulation_steps=1)
CASES = (
    ("llama3", "lora"), ("gpt2", "lora"), ("gemma2", "lora"), ("qwen2", "lora"), ("llama3", "dora"),
    ("llama3", "ia3"), ("llama3", "houlsby"), ("llama3", "vera"), ("llama3", "prefix"),
)  # fmt: skip
"""Families and methods."""

Trained = tuple[tuple[float, ...], tuple[tuple[int, float], ...], dict[str, Tensor]]


def train(executor: Executor, adapter: str = "a", **options: Any) -> Trained:
    result = executor.finetune(EXAMPLES, adapter, **{**BATCHES, **options})
    tensors = {
        f"{path} {index}": tensor.clone()
        for path, weights in executor.adapters[adapter].weights.items()
        for index, tensor in enumerate(weights.tensors)
    }
    return result.losses, result.eval_losses, tensors


def check_close(found: Trained, expected: Trained) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    assert [step for step, _ in found[1]] == [step for step, _ in expected[1]]
    torch.testing.assert_close(
        [x for _, x in found[1]], [x for _, x in expected[1]], rtol=1e-5, atol=0
    )
    assert found[2].keys() == expected[2].keys()
    for name, tensor in expected[2].items():
        assert float((found[2][name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), name


def train_case(name: str, method: str, mesh: RankMesh | None = None) -> Trained:
    """Train a fresh adapter of a method over a mesh, or by one process."""
    program = make_program(name, mesh.tp.size if mesh else 1)
    recipe = ranked.METHODS.get(method, method)
    return train(make_executor(program, name, mesh), "new", peft=recipe)
