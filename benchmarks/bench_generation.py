"""Measure generation: mixed adapters against peft's mixed batch and against the base alone.

    python benchmarks/bench_generation.py [--rounds 5] [--new-tokens 64]

16 prompts of 17 to 64 tokens, 8 adapters (rank 16, all linear modules), two prompts each, greedy,
one thread, fp32; on the shipped checkpoint and on a random 8-layer Llama of hidden size 512.
The contenders run in turn in every round; the unit is tokens a second:

    ours, base       executor.generate without adapters
    ours, mixed      each prompt with its adapter
    transformers     model.generate of the base, left-padded
    peft, mixed      PeftModel.generate(adapter_names=…)
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import interleave, medians, ratio, seconds, write
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import pcg

CHECKPOINT = Path(__file__).parent.parent / "examples" / "checkpoint"
LENGTHS = (24, 40, 32, 56, 17, 33, 48, 21, 64, 30, 29, 45, 52, 38, 26, 60)
NAMES = [f"adapter{i}" for i in range(8)]
RECIPE: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
SHIPPED_RECIPE: dict[str, Any] = {**RECIPE, "r": 8, "lora_alpha": 16}  # of examples/adapters


def shipped() -> torch.nn.Module:
    """Return the checkpoint in `examples/checkpoint/`."""
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)


def random_llama() -> torch.nn.Module:
    """Return a Llama of 8 layers and hidden size 512 with random weights."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    return AutoModelForCausalLM.from_config(config)


def left_padded(prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Return arguments of transformers' `generate`, which pads prompts on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }


def contenders(
    model: torch.nn.Module, new_tokens: int, recipe: dict[str, Any]
) -> dict[str, Callable[[], float]]:
    """Return calls by name that generate for all prompts once and return tokens a second."""
    model = model.eval()
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(5, vocabulary - 5, (n,)).tolist() for n in LENGTHS]
    adapters = [NAMES[i % len(NAMES)] for i in range(len(prompts))]
    executor = pcg.compile(model)
    for name in NAMES:
        adapter = executor.add_adapter(name, {"peft_type": "LORA", **recipe})
        for weights in adapter.weights.values():
            weights.b.normal_(0, 0.02)
    options = left_padded(prompts, new_tokens)

    def rate(run: Callable[[], object]) -> float:
        with torch.inference_mode():
            return len(prompts) * new_tokens / seconds(run)

    def ours(names: list[str] | None) -> float:
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True}
        return rate(lambda: executor.generate(prompts, names, **sampling))

    base = AutoModelForCausalLM.from_config(model.config).eval()
    base.load_state_dict(model.state_dict())
    peft_model = get_peft_model(model, LoraConfig(**recipe), adapter_name=NAMES[0])
    for name in NAMES[1:]:
        peft_model.add_adapter(name, LoraConfig(**recipe))
    peft_model.eval()
    return {
        "ours, base": lambda: ours(None),
        "ours, mixed": lambda: ours(adapters),
        "transformers": lambda: rate(lambda: base.generate(**options)),
        "peft, mixed": lambda: rate(lambda: peft_model.generate(**options, adapter_names=adapters)),
    }


def main() -> None:
    """Run the contenders in turn on both models and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: dict[str, Any] = {"new_tokens": arguments.new_tokens, "prompts": len(LENGTHS)}
    for name, build, recipe in (
        ("shipped", shipped, SHIPPED_RECIPE),
        ("random 8x512", random_llama, RECIPE),
    ):
        runs = contenders(build(), arguments.new_tokens, recipe)
        values = interleave(runs, arguments.rounds)
        result[name] = {
            "tokens_per_s": medians(values),
            "mixed / peft mixed (at least 3)": ratio(values, "ours, mixed", "peft, mixed"),
            "mixed / transformers base (at least 1.5)": ratio(
                values, "ours, mixed", "transformers"
            ),
            "mixed / our base (at least 0.9)": ratio(values, "ours, mixed", "ours, base"),
            "our base / transformers base": ratio(values, "ours, base", "transformers"),
        }
    write(f"generation-{arguments.new_tokens}", result)


if __name__ == "__main__":
    main()
