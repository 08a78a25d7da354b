"""A finetuning step against the same step in eager transformers + peft.

    python benchmarks/bench_finetuning.py [--rounds 7] [--batch 4] [--sequence 512]

Random 8-layer Llama of hidden size 512, LoRA rank 16 on all linear modules, fp32, one thread:
forward, loss, backward and AdamW, on the same tokens. The peer is peft's model with
torch.optim.AdamW.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench_generation import RECIPE, random_llama
from measure import interleave, medians, ratio, write
from peft import LoraConfig, get_peft_model

import pcg


def contenders(batch: int, sequence: int) -> dict[str, Callable[[], float]]:
    """By name, what runs one step of a contender and returns its time."""
    from pcg.runtime.data import Example

    model = random_llama().eval()
    ids = torch.randint(5, model.config.vocab_size - 5, (batch, sequence))
    executor = pcg.compile(model)
    executor.add_adapter("mine", {"peft_type": "LORA", **RECIPE})
    runner = executor.training_runner("mine")
    examples = [Example(row, row) for row in ids.tolist()]
    parameters = list(runner.parameters.values())
    ours_optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def ours() -> float:
        started = time.perf_counter()
        runner.forward_backward(examples, batch * (sequence - 1))
        ours_optimizer.step()
        ours_optimizer.zero_grad()
        return time.perf_counter() - started

    peft_model = get_peft_model(model, LoraConfig(**RECIPE)).train()
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    peer_optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def peer() -> float:
        started = time.perf_counter()
        peft_model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peer_optimizer.step()
        peer_optimizer.zero_grad()
        return time.perf_counter() - started

    return {"ours": ours, "transformers + peft": peer}


def main() -> None:
    """Run the contenders in turn and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = interleave(contenders(arguments.batch, arguments.sequence), arguments.rounds)
    result: dict[str, Any] = {
        "batch": arguments.batch,
        "sequence": arguments.sequence,
        "seconds_per_step": medians(values),
        "ours / eager peft (at most 1)": ratio(values, "ours", "transformers + peft"),
    }
    write("finetuning", result)


if __name__ == "__main__":
    main()
