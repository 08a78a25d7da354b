"""Measure finetuning jobs that run at once in one engine against the same jobs in turn.

    python benchmarks/bench_jobs.py [--rounds 5] [--steps 4]

The model is a random 8-layer Llama of hidden size 512, on one thread in fp32; each job trains LoRA
of rank 16 on all linear modules, one sequence a step. When jobs run at once, their windows go
through the base's products together, forward and backward, so that its weights are read once for
all. peft trains one adapter after another, each with torch.optim.AdamW. The unit is tokens a
second.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench_generation import RECIPE, random_llama
from measure import interleave, medians, ratio, seconds, write
from peft import LoraConfig, get_peft_model

import pcg
from pcg.runtime.data.example import Example

CASES = ((4, 16), (4, 64), (4, 256), (16, 16), (16, 64))
"""Numbers of jobs, and of tokens of a sequence."""
AT_ONCE, IN_TURN, PEER = "at once", "in turn", "transformers + peft, in turn"


def sequences(job: int, length: int, steps: int) -> list[list[int]]:
    """Return the tokens that a job trains on."""
    generator = torch.Generator().manual_seed(job)
    found: list[list[int]] = torch.randint(5, 31_000, (steps, length), generator=generator).tolist()
    return found


def ours(jobs: int, length: int, steps: int, at_once: bool) -> Callable[[], float]:
    """Return a call that trains all jobs in an engine and returns tokens a second."""
    engine = pcg.compile(random_llama().eval()).engine(kv_cache_bytes=2**30)
    options: dict[str, Any] = {"max_steps": steps, "batch_size": 1, "learning_rate": 1e-4}
    recipe = {"peft_type": "LORA", **RECIPE}

    def run() -> None:
        for job in range(jobs):
            rows = [Example(ids, ids) for ids in sequences(job, length, steps)]
            engine.finetune(rows, f"job {job}", peft=recipe, **options)
            while not at_once and not engine.is_idle:
                engine.step()
        while not engine.is_idle:
            engine.step()

    return lambda: jobs * steps * length / seconds(run)


def peer(jobs: int, length: int, steps: int) -> Callable[[], float]:
    """Return a call that does the same in transformers and peft."""
    wrapped = get_peft_model(random_llama().eval(), LoraConfig(**RECIPE), "job 0").train()
    for job in range(1, jobs):
        wrapped.add_adapter(f"job {job}", LoraConfig(**RECIPE))
    optimizers = {}
    for job in range(jobs):
        wrapped.set_adapter(f"job {job}")
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        optimizers[job] = torch.optim.AdamW(trained, lr=1e-4)

    def run() -> None:
        for job, optimizer in optimizers.items():
            wrapped.set_adapter(f"job {job}")
            for row in sequences(job, length, steps):
                ids = torch.tensor([row])
                wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return lambda: jobs * steps * length / seconds(run)


def measure(jobs: int, length: int, steps: int, rounds: int) -> dict[str, Any]:
    """Return the rates of one case, and their ratios."""
    contenders = {
        AT_ONCE: ours(jobs, length, steps, True),
        IN_TURN: ours(jobs, length, steps, False),
        PEER: peer(jobs, length, steps),
    }
    values = interleave(contenders, rounds)
    return {
        "jobs": jobs,
        "tokens a sequence": length,
        "tokens_per_s": medians(values),
        f"{AT_ONCE} / {IN_TURN}": ratio(values, AT_ONCE, IN_TURN),
        f"{AT_ONCE} / {PEER}": ratio(values, AT_ONCE, PEER),
    }


def main() -> None:
    """Run all cases and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [measure(*case, arguments.steps, arguments.rounds) for case in CASES]
    write("jobs", {"steps": arguments.steps, "cases": cases})


if __name__ == "__main__":
    main()
