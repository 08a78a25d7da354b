"""Measure what guides, penalties and biases add to a decode step, and what they cost unasked.

    python benchmarks/bench_guided.py [--new-tokens 100]

16 prompts of 17 to 64 tokens, drawn at temperature 1, one thread, fp32, on a random 8-layer Llama
of hidden size 512 and a vocabulary of 32,000, with a byte-level BPE tokenizer of as many tokens. A
guide is a JSON schema of objects with strings, numbers, an enum and arrays; no request ends before
the others. Each contender is an engine, and their decode steps run in turn. The unit is processor
time of a step, all threads together, as the wall time of a step on a shared machine is its
neighbours'; masks are made on another thread, so that a machine with a free core waits for less:

    plain        no fields beside the temperature
    guided       every row has the schema
    half         every other row has it
    penalized    presence, frequency and repetition penalties, and a bias of 100 tokens
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
import torch
from bench_generation import random_llama
from measure import interleave, medians, ratio, write
from tokenizers import decoders, models, pre_tokenizers, trainers

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
    parser.add_argument("--new-tokens", type=int, default=100)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = random_llama()
    model.generation_config.eos_token_id = model.config.eos_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        save_tokenizer(Path(folder))
        executor = pcg.compile(folder)
    assert executor.tokenizer is not None
    prompts = [torch.randint(5, VOCABULARY - 5, (n,)).tolist() for n in LENGTHS]
    new_tokens = arguments.new_tokens
    common: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}

    def begun(*fields: dict[str, Any]) -> Any:
        """An engine whose prompts are computed."""
        engine = executor.engine(kv_cache_bytes=2**27)
        for row, prompt in enumerate(prompts):
            own = fields[row % len(fields)]
            engine.submit(executor.request(prompt, seed=row, **common, **own))
        engine.wait_prepared()
        engine.step()
        return engine

    def step_s(engine: Any) -> float:
        started = time.process_time()
        engine.step()
        took = time.process_time() - started
        assert len(engine.scheduler.running) == len(prompts)
        return took

    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    bias = dict.fromkeys(range(100, 200), 1.0)
    engines = {
        "plain": begun({}),
        "guided": begun({"guided_json": SCHEMA}),
        "half": begun({"guided_json": SCHEMA}, {}),
        "penalized": begun({**penalties, "logit_bias": bias}),
    }
    steps = {name: partial(step_s, engine) for name, engine in engines.items()}
    values = interleave(steps, new_tokens - 3)
    write(
        "guided",
        {
            "prompts": len(prompts),
            "new_tokens": new_tokens,
            "vocabulary": VOCABULARY,
            "llguidance": version("llguidance"),
            "processor_seconds_per_step": medians(values),
            "guided / plain (at most 1.05)": ratio(values, "guided", "plain"),
            "half guided / plain": ratio(values, "half", "plain"),
            "penalized / plain": ratio(values, "penalized", "plain"),
        },
    )


if __name__ == "__main__":
    main()
