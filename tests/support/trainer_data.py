"""A small model with an adapter of peft's, and data for trainers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import pcg
from pcg.runtime.data.example import IGNORED
from pcg.runtime.executor import Executor
from tests.support import compiled, oracle

VOCABULARY, POSITIONS = 60, 32
TARGETS = ["q_proj", "down_proj"]
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": TARGETS}


def base_model(dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    return oracle.random_model({"model_type": "llama", **config.to_diff_dict()}, dtype)


def pair(dtype: torch.dtype, name: str = "a") -> tuple[Executor, Any]:
    """An executor with an adapter, and peft's model with the same one."""
    base = base_model(dtype)
    wrapped = oracle.with_adapter(base, TARGETS, rank=4).to(dtype)
    executor = compiled.executor(base, dtype=str(dtype).removeprefix("torch."))
    put(executor, wrapped, name)
    return executor, wrapped


def put_alone(executor: Executor, wrapped: Any) -> None:
    """Have the adapter "a" be what peft's model has, and no other be there."""
    for name in executor.adapters:
        executor.remove_adapter(name)
    put(executor, wrapped, "a")


def put(executor: Executor, wrapped: Any, name: str) -> None:
    """Have an adapter be what peft's model has."""
    adapter = executor.add_adapter(name, LORA, replace=True)
    oracle.copy_lora(adapter, wrapped)
    executor.refresh_adapter(name)


def check_step(
    models: tuple[Executor, Any],
    given: Any,
    loss: Any,
    total: Tensor,
    *,
    batch_size: int = 8,
    in_engine: bool = False,
    loss_options: Any = None,
    **trainer_options: Any,
) -> Any:
    """Compare a trainer's call, and its step of SGD at a rate of 1, with autograd through peft.

    Args:
        total: the same loss by transformers and peft.
        in_engine: run the call between the steps of an engine on a thread.
    """
    executor, wrapped = models
    wrapped.zero_grad()
    total.backward()
    put(executor, wrapped, "a")
    engine = executor.engine(kv_cache_bytes=2**20).start() if in_engine else nullcontext()
    options = {"optimizer": "sgd", "batch_size": batch_size, **trainer_options}
    with engine, executor.trainer("a", **options) as trainer:
        done = trainer.forward_backward(given, loss, loss_options=loss_options)
        trainer.optim_step(learning_rate=1.0)
        trainer.snapshot()
    assert done.loss == pytest.approx(float(total.detach()), rel=1e-6, abs=1e-7)
    own = oracle.lora_parameters(wrapped)
    for path, value in parameters(executor, "a").items():
        after = own[path].data - own[path].grad
        torch.testing.assert_close(value, after, rtol=1e-6, atol=1e-6)
    return done


def parameters(executor: Executor, name: str) -> dict[str, Tensor]:
    """The tensors of the adapter that is served, by peft's names."""
    found = {}
    for module, weights in executor.adapters[name].weights.items():
        found |= {f"{module}.lora_A": weights.a, f"{module}.lora_B": weights.b}
    return found


def sampled(lengths: tuple[int, ...] = (7, 4, 12, 5), seed: int = 0) -> list[dict[str, Any]]:
    """Random sequences with targets that are not the next tokens alone, and numbers for each."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    def numbers(count: int) -> list[float]:
        return torch.randn(count, generator=generator, dtype=torch.float64).tolist()

    found = []
    for length in lengths:
        tokens = ids(length + 1)
        prompt = length // 3
        found.append(
            {
                "tokens": tokens[:-1],
                "targets": [*[IGNORED] * prompt, *tokens[prompt + 1 :]],
                "advantages": [*[0.0] * prompt, *numbers(length - prompt)],
                "logprobs": [*[0.0] * prompt, *[x / 3 - 4 for x in numbers(length - prompt)]],
                "weights": numbers(length),
            }
        )
    return found


def data(rows: list[dict[str, Any]], *names: str) -> list[pcg.Datum]:
    return [pcg.Datum(one["tokens"], one["targets"], **{n: one[n] for n in names}) for one in rows]


def log_probabilities(wrapped: Any, row: dict[str, Any], temperature: float = 1.0) -> Tensor:
    """What transformers gives each target, [N]; 0 where there is none."""
    logits = wrapped(torch.tensor([row["tokens"]]), use_cache=False).logits[0]
    targets = torch.tensor(row["targets"])
    found = (logits / temperature).log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return found * (targets != IGNORED)
