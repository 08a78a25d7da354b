"""A random Llama of two layers with a tokenizer, saved as transformers saves it."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import toy_tokenizers as toys

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def config() -> dict[str, Any]:
    """Its config.json."""
    made = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    fields: dict[str, Any] = json.loads(made.to_json_string())
    return fields


def save(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Write config, weights and tokenizer to a directory; `changes` are of the configuration."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
    model.save_pretrained(directory)
    tokenizer = {"eos_token": "<|im_end|>", "chat_template": toys.CHATML}
    return toys.save(directory, toys.byte_level(), tokenizer)
