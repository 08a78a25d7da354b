"""Measure what guides, penalties and biases add to a decode step, and what they cost unasked.

    python benchmarks/bench_guided.py [--rounds 9] [--new-tokens 48]

16 prompts of 17 to 64 tokens, drawn at temperature 1, one thread, fp32, on a random 8-layer Llama
of hidden size 512 and a vocabulary of 32,000, with a byte-level BPE tokenizer of as many tokens. A
guide is a JSON schema of an object with strings, numbers, an enum and arrays; no request ends
before the others. The contenders run in turn in every round; the unit is seconds a step:

    plain        no fields beside the temperature
    guided       every row has the schema
    half         every other row has it
    penalized    presence, frequency and repetition penalties, and a bias of 100 tokens
"""

from __future__ import annotations

import argparse
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from measure import interleave, medians, ratio, seconds, write
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

import pcg

LENGTHS = (24, 40, 32, 56, 17, 33, 48, 21, 64, 30, 29, 45, 52, 38, 26, 60)
VOCABULARY = 32_000
# Requests end where their schema does: these arrays are longer than the outputs.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Za-z ]{1,40}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "score": {"type": "number"},
            "kind": {"enum": ["person", "company", "place"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
            "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
        "required": ["name", "age", "score", "kind", "tags", "note"],
        "additionalProperties": False,
    },
}


def save_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer of as many tokens as the model has."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters, spoken = random.Random(0), "aabcdeeefghiiijklmnnooprrsssttuvwy"
    words = ["".join(letters.choices(spoken, k=letters.randint(2, 9))) for _ in range(60_000)]
    made.train_from_iterator([" ".join(words[i : i + 50]) for i in range(0, 60_000, 50)], trainer)
    made.save(str(directory / "tokenizer.json"))


def main() -> None:
    """Run the contenders in turn and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        save_tokenizer(Path(folder))
        executor = pcg.compile(folder)
    assert executor.tokenizer is not None
    prompts = [torch.randint(5, VOCABULARY - 5, (n,)).tolist() for n in LENGTHS]
    new_tokens = arguments.new_tokens
    common: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": 0}

    def step_s(**fields: Any) -> float:
        found: list[Any] = []
        took = seconds(
            lambda: found.extend(executor.generate(prompts, ignore_eos=True, **common, **fields))
        )
        assert all(len(completion.token_ids) == new_tokens for completion in found)
        return took / new_tokens

    contenders: dict[str, Callable[[], float]] = {
        "plain": step_s,
        "guided": lambda: step_s(guided_json=[SCHEMA] * len(prompts)),
        "half": lambda: step_s(guided_json=[SCHEMA, None] * (len(prompts) // 2)),
        "penalized": lambda: step_s(
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias=dict.fromkeys(range(100, 200), 1.0),
        ),
    }
    values = interleave(contenders, arguments.rounds)
    write(
        "guided",
        {
            "prompts": len(prompts),
            "new_tokens": new_tokens,
            "vocabulary": VOCABULARY,
            "seconds_per_step": medians(values),
            "guided / plain (at most 1.05)": ratio(values, "guided", "plain"),
            "half guided / plain": ratio(values, "half", "plain"),
            "penalized / plain": ratio(values, "penalized", "plain"),
        },
    )


if __name__ == "__main__":
    main()
