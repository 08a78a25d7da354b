"""Measure serving and finetuning with one copy of each weight against oneDNN's packed copies.

    python benchmarks/bench_copies.py [--rounds 5] [--new-tokens 24]

The model is a random 8-layer Llama of hidden size 512, on one thread, in fp32 and bf16. In every
round each contender runs once; measured is processor time:

    decode 1, 16        tokens a second of 1 or 16 prompts after each one's first token
    finetune            steps a second of LoRA of rank 8 on q, v and down, 2 sequences of 128
    transformers        decoding by `generate`, as in `bench_decode.py`

`weights_bytes` are the base's bytes after a load, as `pcg.explain` says them.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_decode import Decoding, rate_of_transformers
from bench_generation import random_llama
from measure import interleave, medians, ratio, write

import pcg
from pcg.runtime.data.example import Example

COUNTS = (1, 16)
RECIPE = {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
TOKENS = 128


def finetuning_rate(decoding: Decoding) -> float:
    """Return steps a second of processor time."""
    examples = [Example([3] * TOKENS, [3] * TOKENS)] * 2
    runner = decoding.executor.training_runner("lora")
    started = time.thread_time()
    runner.forward_backward(examples, 2 * (TOKENS - 1))
    return 1 / (time.thread_time() - started)


def contenders(model: torch.nn.Module, dtype: str, new: int) -> dict[str, Callable[[], float]]:
    """Return calls by name that run once and return their rate."""
    drawn = random.Random(0)
    prompts = [[drawn.randrange(5, 31000) for _ in range(32)] for _ in range(max(COUNTS))]
    found: dict[str, Callable[[], float]] = {}
    for label, packs in (("packed", True), ("one copy", False)):
        one = Decoding(model, {"lora": RECIPE}, dtype=dtype, packed_weights=packs)
        for count in COUNTS:
            run = partial(one.rate, prompts[:count], [None] * count, new)
            found[f"decode {count}, {label}"] = run
        found[f"finetune, {label}"] = partial(finetuning_rate, one)
    for count in COUNTS:
        run = partial(rate_of_transformers, model, prompts[:count], new)
        found[f"decode {count}, transformers"] = run
    return found


def measured(dtype: str, rounds: int, new: int) -> dict[str, Any]:
    """Return the rates of a dtype, what one copy costs of them, and the bytes."""
    model = random_llama().eval().to(getattr(torch, dtype))
    values = interleave(contenders(model, dtype, new), rounds)
    works = [*(f"decode {count}" for count in COUNTS), "finetune"]
    reports = [
        pcg.explain(model.config.to_dict(), None, dtype=dtype, device="cpu", packed_weights=packs)
        for packs in (True, False)
    ]
    return {
        "rates": medians(values),
        "one_copy_to_packed": {
            work: ratio(values, f"{work}, one copy", f"{work}, packed") for work in works
        },
        "one_copy_to_transformers": {
            work: ratio(values, f"{work}, one copy", f"{work}, transformers") for work in works[:-1]
        },
        "weights_bytes": {
            label: report.memory_bytes["weights"]
            for label, report in zip(("packed", "one copy"), reports, strict=True)
        },
    }


def main() -> None:
    """Measure both dtypes and write `results/copies.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {
        dtype: measured(dtype, arguments.rounds, arguments.new_tokens)
        for dtype in ("float32", "bfloat16")
    }
    write("copies", found)


if __name__ == "__main__":
    main()
