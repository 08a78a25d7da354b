"""Measure a finetuning step under memory budgets against eager transformers + peft.

    python benchmarks/bench_finetuning.py [--dtype float32] [--rounds 7] [--batch 4]

The model is a random 8-layer Llama of hidden size 512 with LoRA rank 16 on all linear modules, fp32
or bf16, one thread: forward, loss, backward and AdamW, on the same tokens. The peer is peft's model
with torch.optim.AdamW. pcg runs at a memory budget of 1 (no matrix product recomputed) and at the
budget that recomputes 62 % of the forward.

The first step is that of a fresh executor, its compilation included. A process's peak is its
resident memory at the most, over three steps, less that before the first; each contender has a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench_generation import RECIPE, random_llama
from measure import interleave, medians, ratio, seconds, write
from peft import LoraConfig, get_peft_model

import pcg

PEER = "transformers + peft"
RECOMPUTED = 0.62
DTYPES = ("float32", "bfloat16")
OURS = {"budget 1": 1.0, "62 % again": None}
"""pcg's contenders by memory budget; None is the budget that recomputes that share."""


def tokens(batch: int, sequence: int) -> torch.Tensor:
    """Return the same random tokens for all contenders, [batch, sequence]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, 31_000, (batch, sequence), generator=generator)


def budget_of(model: torch.nn.Module, batch: int, sequence: int) -> float:
    """Return the memory budget whose plan recomputes at most that share of the forward."""
    options = {"batch": batch, "seq": sequence, "dtype": str(next(model.parameters()).dtype)}
    low, high = 0.0, 1.0
    for _ in range(7):
        middle = (low + high) / 2
        report = pcg.explain(model, "lora", memory_budget=middle, **options)
        (stage,) = [stage for stage in report.activations if stage.stage == "compressed"]
        low, high = (middle, high) if stage.recompute_flops_ratio > RECOMPUTED else (low, middle)
    return high


def ours(model: torch.nn.Module, ids: torch.Tensor, budget: float) -> Callable[[], None]:
    """Return a call that runs a step of pcg."""
    from pcg.runtime.data.example import Example

    batch, sequence = ids.shape
    executor = pcg.compile(model, {"mine": "lora"}, memory_budget=budget, batch=batch, seq=sequence)
    runner = executor.training_runner("mine")
    examples = [Example(row, row) for row in ids.tolist()]
    optimizer = torch.optim.AdamW(list(runner.parameters.values()), lr=1e-4)

    def run() -> None:
        runner.forward_backward(examples, batch * (sequence - 1))
        optimizer.step()
        optimizer.zero_grad()

    return run


def peer(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """Return a call that runs a step of the peer."""
    wrapped = get_peft_model(model, LoraConfig(**RECIPE)).train()
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-4)

    def run() -> None:
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def made(name: str, dtype: str, ids: torch.Tensor) -> Callable[[], None]:
    """Return a contender's step by its name."""
    torch.manual_seed(0)
    model = random_llama().to(getattr(torch, dtype)).eval()
    if name == PEER:
        return peer(model, ids)
    budget = OURS[name]
    return ours(model, ids, budget_of(model, *ids.shape) if budget is None else budget)


def resident(field: str) -> int:
    """Return bytes of this process by /proc: VmRSS for now, VmHWM for the peak."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak(name: str, dtype: str, ids: torch.Tensor) -> dict[str, float]:
    """Return the peak MiB of three steps beyond what was there before, in this process."""
    run = made(name, dtype, ids)
    before = resident("VmRSS")
    for _ in range(3):
        run()
    return {"peak_mib": round((resident("VmHWM") - before) / 2**20, 1)}


def measure(dtype: str, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Measure times and peaks of all contenders in one dtype."""
    names = (*OURS, PEER)
    runs = {name: made(name, dtype, ids) for name in names}
    values = interleave({name: lambda run=run: seconds(run) for name, run in runs.items()}, rounds)
    result: dict[str, Any] = {"seconds_per_step": medians(values)}
    for name in OURS:
        result[f"{name} / {PEER}"] = ratio(values, name, PEER)
    del runs
    model = random_llama().to(getattr(torch, dtype)).eval()
    first = seconds(lambda: ours(model, ids, 1.0)())
    result["first step, in steps of the peer"] = round(first / medians(values)[PEER], 2)
    result["peak_mib"] = {name: _in_a_process(name, dtype, ids) for name in names}
    return result


def _in_a_process(name: str, dtype: str, ids: torch.Tensor) -> float:
    size = [str(number) for number in ids.shape]
    command = [sys.executable, __file__, "--peak-of", name, dtype, "--batch", size[0]]
    found = subprocess.run(
        [*command, "--sequence", size[1]], check=True, capture_output=True, text=True
    )
    return float(json.loads(found.stdout.splitlines()[-1])["peak_mib"])


def main() -> None:
    """Run the contenders in turn and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--peak-of", nargs=2, metavar=("CONTENDER", "DTYPE"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ids = tokens(arguments.batch, arguments.sequence)
    if arguments.peak_of:
        print(json.dumps(peak(*arguments.peak_of, ids)))
        return
    sizes = {"batch": arguments.batch, "sequence": arguments.sequence}
    result = measure(arguments.dtype, ids, arguments.rounds)
    write(f"finetuning-{arguments.dtype}", {**sizes, **result})


if __name__ == "__main__":
    main()
