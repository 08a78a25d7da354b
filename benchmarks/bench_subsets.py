"""Measure finetuning steps of adapters on some layers, or of ranks that differ, against eager.

    python benchmarks/bench_subsets.py [--rounds 7] [--batch 4] [--sequence 256]

The model and the peer are those of `bench_finetuning`, in fp32 on one thread: forward, loss,
backward and AdamW, on the same tokens, at a memory budget of 1. Each case is a LoRA configuration
of peft's, which both take as it is. Times are CPU seconds of the one thread. `saved_mib` are the
bytes saved for backward as `pcg explain` accounts for them: of eager transformers + peft, and of
pcg.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench_finetuning import PEER, tokens
from bench_generation import random_llama
from measure import interleave, medians, ratio, write
from peft import LoraConfig, get_peft_model

import pcg

LAYERS = 8
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "every layer": {"target_modules": PROJECTIONS},
    "the last layer": {"target_modules": PROJECTIONS, "layers_to_transform": [LAYERS - 1]},
    "the last quarter": {"target_modules": PROJECTIONS, "layers_to_transform": [6, 7]},
    "a layer in the middle": {"target_modules": PROJECTIONS, "layers_to_transform": [3]},
    "a regex": {"target_modules": r".*\.(3|5)\.self_attn\.[qv]_proj|.*\.7\.mlp\.down_proj"},
    "ranks by layer": {
        "target_modules": PROJECTIONS,
        "rank_pattern": {r"layers\.[0-3]\..*": 4, r"layers\.[67]\..*": 32},
    },
}
OURS = "pcg"


def cpu_seconds(act: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread that a call takes."""
    started = time.thread_time()
    act()
    return time.thread_time() - started


def step_of(
    run_backward: Callable[[], object], parameters: list[torch.Tensor]
) -> Callable[[], None]:
    """Return a call that runs a step: gradients by a contender, then AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def run() -> None:
        run_backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def contenders(
    model: torch.nn.Module, recipe: dict[str, Any], ids: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """Return the steps of pcg and of the peer by their names."""
    from pcg.runtime.data.example import Example

    batch, sequence = ids.shape
    config = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **recipe)
    runner = pcg.compile(model, {"mine": config}, batch=batch, seq=sequence).training_runner("mine")
    examples = [Example(row, row) for row in ids.tolist()]
    wrapped = get_peft_model(copy.deepcopy(model), config).train()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in runner.parameters.values())

    def peer() -> None:
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def ours() -> None:
        runner.forward_backward(examples, batch * (sequence - 1))

    mine = list(runner.parameters.values())
    return {OURS: step_of(ours, mine), PEER: step_of(peer, trained)}


def saved_mib(
    model: torch.nn.Module, recipe: dict[str, Any], ids: torch.Tensor
) -> dict[str, float]:
    """Return the MiB that eager and pcg save for backward."""
    batch, sequence = ids.shape
    config = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **recipe)
    report = pcg.explain(model, config, batch=batch, seq=sequence)
    stages = {stage.stage: round(stage.bytes / 2**20, 1) for stage in report.activations}
    return {PEER: stages["eager"], OURS: stages["compressed"]}


def main() -> None:
    """Run the contenders of each case in turn and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ids = tokens(arguments.batch, arguments.sequence)
    result: dict[str, Any] = {"batch": arguments.batch, "sequence": arguments.sequence}
    for case in arguments.cases:
        torch.manual_seed(0)
        model = random_llama().eval()
        runs = contenders(model, CASES[case], ids)
        timed = {name: lambda run=run: cpu_seconds(run) for name, run in runs.items()}
        values = interleave(timed, arguments.rounds)
        result[case] = {
            "cpu_seconds_per_step": medians(values),
            f"{OURS} / {PEER}": ratio(values, OURS, PEER),
            "saved_mib": saved_mib(model, CASES[case], ids),
        }
    write("subsets", result)


if __name__ == "__main__":
    main()
