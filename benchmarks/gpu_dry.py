"""The first hour without a GPU: small sizes, Triton's interpreter, and a stand-in of a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import gpu_device
import gpu_kernels
import gpu_model
import torch

from pcg.runtime.model import step_graphs
from tests.support import tiny_llama
from tests.support.interpreter import bf16
from tests.support.interpreter.stand_in import stand_in
from tests.support.interpreter.streams import ORDER

MODULES = ["q_proj", "down_proj"]


@cache
def config() -> dict[str, Any]:
    """A Llama of one layer."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 128}
    return tiny_llama.config() | sizes


SIZES: Mapping[Any, Mapping[str, Any]] = {
    gpu_device: {"COPIED": 4096, "SQUARE": 64, "MOST_TESTS": 2},
    gpu_kernels: {
        "HIDDEN": 64, "INTERMEDIATE": 136, "VOCABULARY": 200, "HEADS": 4, "KV_HEADS": 2, "HEAD": 16,
        "LAYERS": 2, "BATCHES": (3,), "PAGE_ELEMENTS": 8 * 64, "RANK": 8, "HIGH_RANKS": (4, 20),
        "LOSSES": (9,), "SIGNS": (3, 64), "DRAWN": (2,), "ATTENTION": ((2, 1, 48), (1, 32, 32)),
        "PRODUCTS": (3,),
        "TOKENS": 5, "BACKWARDS": ((9,), (8, 8)), "LEAST_BYTES": 0, "MOST_GROUPS": 2,
        "config": tiny_llama.config,
    },
    gpu_model: {
        "NAMES": ["adapter-0", "adapter-1"], "PEER_ADAPTERS": 2,
        "RECIPE": {"r": 16, "lora_alpha": 32, "target_modules": MODULES},
        "KV_CACHE_BYTES": 2**21, "VOCABULARY": 100, "BATCH": 2, "CONTEXT": 5, "STEPS": 2,
        "EAGER_STEPS": 1, "PROMPTS": (1, 6), "FINETUNED": (1, 9), "WARM_STEPS": 1,
        "TRAINED_STEPS": 1, "SKEW": 64, "GREEDY": (2, 9, 6), "small_config": config,
        "SERVED_S": 0.3, "SERVING": {"running": 1, "tokens": 16}, "PROMPT_TOKENS": (8, 16),
        "NEW_TOKENS": (2, 4), "config": config,
    },
    step_graphs: {"EAGER_STEPS": 1},
}  # fmt: skip
_MEMORY = {
    "memory_allocated": lambda: 2**20,
    "max_memory_allocated": lambda: 2**21,
    "reset_peak_memory_stats": lambda: None,
}


@contextmanager
def small() -> Iterator[None]:
    """Patch in a GPU that is not there, and sizes that take seconds on a CPU."""
    bf16.install()
    with ExitStack() as stack:
        for module, values in SIZES.items():
            for name, value in values.items():
                stack.enter_context(patch.object(module, name, value))
        for name, value in _MEMORY.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch, "compile", lambda function, **_: function))
        stack.enter_context(patch.object(ORDER, "is_watched", False))  # for the time it takes
        stack.enter_context(stand_in())
        yield
