"""A small model and examples for finetuning jobs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from pcg.runtime.data.example import Example
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import FinetuneResult, StepRecord

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def examples(count: int, seed: int = 0) -> list[Example]:
    torch.manual_seed(seed)
    sequences = [torch.randint(2, 99, (4 + i % 7,)).tolist() for i in range(count)]
    return [Example(ids, ids) for ids in sequences]


OPTIONS: dict[str, Any] = {
    "peft": LORA, "epochs": 3, "batch_size": 2, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "eval_data": examples(3, seed=1), "eval_every": 2, "patience": 5, "save_every": 3,
}  # fmt: skip


DATA = examples(10)  # five batches, three steps an epoch


STEPS = 9


def job(
    executor: Executor,
    directory: Path | None,
    on_step: Callable[[StepRecord], None] | None = None,
    data: list[Example] = DATA,
    **options: Any,
) -> FinetuneResult:
    options = {**OPTIONS, **options}
    if directory is None:
        options["save_every"] = None
    return executor.finetune(data, "a", checkpoint_dir=directory, on_step=on_step, **options)
