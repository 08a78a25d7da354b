"""AdaLoRA trained by peft and by pcg, over the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch

from pcg.runtime.executor import Executor
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.peft_cases import CAUSAL, trained, wrap

SCHEDULE = {"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 2, "total_step": 12}


FIELDS: dict[str, Any] = {**SCHEDULE, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}


DICT = {"peft_type": "ADALORA", **FIELDS}


OPTIONS: dict[str, Any] = {
    "batch_size": 1,
    "learning_rate": 0.02,
    "schedule": "constant",
    "eps": 1e-3,
    "max_grad_norm": None,
    "progress": False,
}


def pair(directory: Path, **fields: Any) -> tuple[Any, Any, Executor]:
    """A base, peft's model with noise, and an executor with the same adapter `a`.

    Without a task type, peft's model leaves the orthogonal loss out.
    """
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    wrapped = wrap(base, peft.AdaLoraConfig(**{**FIELDS, **CAUSAL, **fields}))
    oracle.save(wrapped, directory / "start")
    return base, wrapped, compiled.executor(base, {"a": str(directory / "start")})


def train_peft(
    wrapped: Any, sequences: list[list[int]], steps: int, *, allocates: bool = True
) -> list[float]:
    """Steps as peft's documentation has them; the data's part of each loss."""
    optimizer = torch.optim.AdamW(trained(wrapped).values(), lr=0.02, eps=1e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        ids = torch.tensor([sequences[step % len(sequences)]])
        out = wrapped(ids, labels=ids)
        out.loss.backward()
        logits = out.logits.detach()[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
        optimizer.step()
        if allocates:
            wrapped.base_model.update_and_allocate(step + 1)
        optimizer.zero_grad()
    return losses
