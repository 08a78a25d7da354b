"""The same LoRA adapters in pcg and in peft, on one small Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pcg.runtime.executor import Executor
from tests.support import compiled


def small_llama(dtype: torch.dtype = torch.float32, positions: int = 64) -> LlamaForCausalLM:
    """Return a Llama of two layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=positions,
    )
    model = LlamaForCausalLM(config).eval().to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model


def lora_pair(
    recipes: Mapping[str, Mapping[str, Any]],
    model: LlamaForCausalLM,
    copied: Callable[[Tensor], Tensor] = lambda weight: weight,
    **options: Any,
) -> tuple[Executor, PeftModel]:
    """Return pcg's and peft's adapters on a model.

    Args:
        copied: what becomes of pcg's weights on their way to peft's.
        options: those of `pcg.compile`.
    """
    executor = compiled.executor(model, **options)
    wrapped: Any = None
    for name, fields in recipes.items():
        if wrapped is None:
            wrapped = get_peft_model(model, LoraConfig(**fields), adapter_name=name)
        else:
            wrapped.add_adapter(name, LoraConfig(**fields))
        adapter = executor.add_adapter(name, {"peft_type": "LORA", **fields})
        for path, weights in adapter.weights.items():
            weights.b.normal_(0, 0.2)
            module = wrapped.base_model.model.get_submodule(path)
            module.lora_A[name].weight.data.copy_(copied(weights.a))
            module.lora_B[name].weight.data.copy_(copied(weights.b))
    return executor, wrapped.eval()
