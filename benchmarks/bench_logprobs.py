"""Measure what logprobs cost: decode steps that return them against the same ones without.

    python benchmarks/bench_logprobs.py [--rounds 4] [--new-tokens 48]

16 prompts on 8 adapters (rank 16, all linear modules), greedy, one thread, fp32, on a random
8-layer Llama of hidden size 512 with 32,000 tokens. Requests that ask for nothing, for each token's
logprob, for 5 and for 20 of the likeliest ones are in an engine each, whose steps run in turn. The
unit is milliseconds of processor time of a step that decodes; ratios are medians over the steps.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from bench_generation import LENGTHS, NAMES, RECIPE, random_llama
from measure import medians, ratio, write

import pcg

COUNTS = {"none": None, "logprobs=0": 0, "logprobs=5": 5, "logprobs=20": 20}


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = random_llama().eval()
    prompts = [torch.randint(5, model.config.vocab_size - 5, (n,)).tolist() for n in LENGTHS]
    adapters = [NAMES[i % len(NAMES)] for i in range(len(prompts))]
    executor = pcg.compile(model)
    for name in NAMES:
        adapter = executor.add_adapter(name, {"peft_type": "LORA", **RECIPE})
        for weights in adapter.weights.values():
            weights.b.normal_(0, 0.02)

    values: dict[str, list[float]] = {name: [] for name in COUNTS}
    for _ in range(arguments.rounds):
        engines = {}
        for name, count in COUNTS.items():
            engines[name] = engine = executor.engine()
            for prompt, adapter in zip(prompts, adapters, strict=True):
                fields: Any = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True}
                engine.submit(executor.request(prompt, adapter, logprobs=count, **fields))
            engine.step()  # the prompts
            engine.step()
        for _ in range(arguments.new_tokens - 3):
            for name, engine in engines.items():
                started = time.process_time()
                engine.step()
                values[name].append(1e3 * (time.process_time() - started))
    result: dict[str, Any] = {
        "new_tokens": arguments.new_tokens,
        "prompts": len(prompts),
        "adapters": len(NAMES),
        "vocabulary": model.config.vocab_size,
        "step_ms": medians(values),
        "logprobs=5 / none (at most 1.03)": ratio(values, "logprobs=5", "none"),
        "logprobs=0 / none": ratio(values, "logprobs=0", "none"),
        "logprobs=20 / none": ratio(values, "logprobs=20", "none"),
    }
    write("logprobs", result)


if __name__ == "__main__":
    main()
