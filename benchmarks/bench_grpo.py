"""Measure that GRPO learns: a reward that random text seldom gets, with the shipped model.

    OMP_NUM_THREADS=2 python benchmarks/bench_grpo.py [--steps 50]

It is examples/configs/grpo.yaml: the reward is 1 for a completion that raises something, else 0.
The result has the reward of each update with its time, with a staleness of 0 and of 1, and the
share of 512 completions that have it before and after, sampled anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from measure import write

import pcg
from pcg.runtime.executor import Executor
from pcg.train.grpo import GrpoOptions, train_grpo

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (EXAMPLES / "configs" / "prompts.jsonl").read_text().splitlines()
]
LENGTH, GROUP, BATCH = 16, 16, 64
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
GOAL = 0.9
_GAP = "sampling/sampling_logp_difference"
WINDOW = 5
"""Updates over which the mean reward has to be above the goal."""


def raises(completions: list[str], **_: object) -> list[float]:
    """Return 1 for a completion that raises something."""
    return [float("raise" in text) for text in completions]


def share(executor: Executor, adapter: str | None) -> float:
    """Return the share of 512 sampled completions that have the reward."""
    found = executor.generate(
        PROMPTS * 64, adapter=adapter, max_new_tokens=LENGTH, temperature=1.0, seed=7
    )
    return round(sum(raises([one.text for one in found])) / len(found), 4)


def learn(executor: Executor, staleness: int, steps: int) -> dict[str, object]:
    """Train an adapter; return how it went."""
    name = f"stale-{staleness}"
    began = time.monotonic()
    curve: list[dict[str, float]] = []

    def on_step(step: int, numbers: Mapping[str, float], _: object) -> None:
        names = ("reward", "entropy", "completions/mean_length", "staleness")
        kept = {name: round(numbers[name], 4) for name in names}
        curve.append({"step": step, "seconds": round(time.monotonic() - began, 1), **kept})
        print(curve[-1], file=sys.stderr, flush=True)

    options = GrpoOptions(
        num_generations=GROUP,
        batch_size=BATCH,
        max_completion_length=LENGTH,
        max_staleness=staleness,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_steps=steps,
    )
    done = train_grpo(executor, PROMPTS, raises, options, adapter=name, peft=LORA, on_step=on_step)
    rewards = [one["reward"] for one in curve]
    means = [sum(rewards[at - WINDOW : at]) / WINDOW for at in range(WINDOW, len(rewards) + 1)]
    reached = next((at for at, mean in enumerate(means, WINDOW - 1) if mean > GOAL), None)
    exact = [one for one in done.history if not one["staleness"]]
    gaps = {
        kind: [one[f"{_GAP}/{kind}"] for one in exact if f"{_GAP}/{kind}" in one]
        for kind in ("mean", "max")
    }
    return {
        "rewarded_after": share(executor, name),
        "seconds": round(done.seconds, 1),
        f"mean_of_{WINDOW}_above_{GOAL}": None if reached is None else curve[reached],
        "sampled_and_trained_logprobs_differ_by": {
            kind: max(values, default=None) for kind, values in gaps.items()
        },
        "curve": curve,
    }


def main() -> None:
    """Train with and without staleness, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    executor = pcg.compile(EXAMPLES / "checkpoint", dtype="float32")
    write(
        "grpo",
        {
            "threads": torch.get_num_threads(),
            "rewarded_before": share(executor, None),
            "staleness": {str(count): learn(executor, count, given.steps) for count in (0, 1)},
        },
    )


if __name__ == "__main__":
    main()
