"""Ranks that have parts of the tokens of every sequence train what one rank trains."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.parallel.ranks.mesh import MeshSizes, RankMesh
from pcg.runtime.executor import Executor
from tests.support.ranked import EXAMPLES, JOB, METHODS, make_executor, make_program
from tests.support.threads import run_mesh


def finetuned(executor: Executor, recipe: Any, **options: Any) -> list[Tensor]:
    """The losses of a job, and what it trains."""
    executor.add_adapter("m", recipe, seed=3)
    noise = torch.Generator().manual_seed(1)
    for tensor in executor.adapters["m"].tensors:
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=noise))
    executor.refresh_adapter("m")
    result = executor.finetune(EXAMPLES, "m", **{**JOB, **options})
    losses = [*result.losses, *(loss for _, loss in result.eval_losses)]
    return [torch.tensor(losses), *executor.adapters["m"].tensors]


@cache
def on_one(name: str, method: str) -> list[Tensor]:
    program = make_program(name, 1, peft=None)
    return finetuned(make_executor(program, name), METHODS.get(method, method))


def check(name: str, method: str, **sizes: int) -> None:
    program = make_program(name, sizes.get("tp", 1), peft=None)

    def run(mesh: RankMesh) -> list[Tensor]:
        return finetuned(make_executor(program, name, mesh), METHODS.get(method, method))

    for found in run_mesh(MeshSizes(**sizes), run):
        for a, b in zip(found, on_one(name, method), strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("name", ["llama3", "gpt2", "gemma2", "bloom"])
def test_families(name: str) -> None:
    check(name, "lora", cp=2)
