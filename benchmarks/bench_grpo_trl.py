"""Measure a step of GRPO, rollouts and update, against TRL's GRPOTrainer.

    OMP_NUM_THREADS=1 python benchmarks/bench_grpo_trl.py --trl .venv-clients/trl/bin/python

TRL generates by transformers and trains by peft, in a process of its own with the same model,
prompts, LoRA, batch and length, all fp32. Steps of the two take turns, and the ratios are of pairs.
A learning rate of 1e-6 leaves the lengths of completions alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from measure import write

import pcg
from pcg.train.grpo import GrpoOptions, train_grpo

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "checkpoint"
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "examples" / "configs" / "prompts.jsonl").read_text().splitlines()
]
BATCH, GROUP, RATE = 64, 16, 1e-6
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def vowels(completions: list[str], **_: object) -> list[float]:
    """Return the share of each completion that is vowels, which no two have alike."""
    return [sum(x in "aeiou" for x in text) / max(len(text), 1) for text in completions]


class Peer:
    """TRL in a process of its own, which does a step when it is told to."""

    def __init__(self, python: str, settings: Mapping[str, Any]) -> None:
        command = [python, str(ROOT / "benchmarks" / "trl_steps.py"), json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> dict[str, float]:
        """Have it do a step; returns its seconds and the mean length of its completions."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("STEP "):
                found: dict[str, float] = json.loads(line[5:])
                return found
        raise SystemExit("error: TRL ended; what it said is above")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def pairs(python: str, length: int, steps: int) -> dict[str, Any]:
    """Run steps in turns; return their seconds and the median ratio."""
    settings = {
        "model": str(MODEL),
        "prompts": PROMPTS,
        "batch": BATCH,
        "group": GROUP,
        "length": length,
        "rate": RATE,
        "steps": steps + 8,
    }
    peer = Peer(python, settings)
    rows: list[dict[str, float]] = []
    began = processor_began = 0.0

    def on_step(step: int, numbers: Mapping[str, float], _: object) -> None:
        nonlocal began, processor_began
        ours, processor = time.perf_counter() - began, time.process_time() - processor_began
        theirs = peer.step()
        row = {
            "pcg_s": round(ours, 3),
            "trl_s": round(theirs["seconds"], 3),
            "pcg_processor_s": round(processor, 3),
            "trl_processor_s": round(theirs["processor_s"], 3),
            "pcg_update_s": round(numbers["update_s"], 3),
            "pcg_length": numbers["completions/mean_length"],
            "trl_length": theirs["length"],
        }
        if step > 1:  # the first ones warm up
            rows.append(row)
            print(row, flush=True)
        began, processor_began = time.perf_counter(), time.process_time()

    executor = pcg.compile(MODEL, dtype="float32")
    options = GrpoOptions(
        num_generations=GROUP,
        batch_size=BATCH,
        max_completion_length=length,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_steps=steps + 1,
    )
    try:
        train_grpo(executor, PROMPTS, vowels, options, peft=LORA, on_step=on_step)
    finally:
        peer.close()
    return {
        "times_as_fast": _ratio(rows, "s"),
        "times_as_fast_processor": _ratio(rows, "processor_s"),
        "steps": rows,
    }


def _ratio(rows: list[dict[str, float]], unit: str) -> float:
    """Return the median of pairs' ratios."""
    return round(statistics.median(row[f"trl_{unit}"] / row[f"pcg_{unit}"] for row in rows), 2)


def main() -> None:
    """Measure two lengths, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", required=True, help="the Python of an environment with trl")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    versions = subprocess.run(
        [given.trl, "-c", "from importlib.metadata import version; print(version('trl'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    result = {
        "trl": versions.stdout.strip(),
        "threads": torch.get_num_threads(),
        "completions": BATCH,
        "lengths": {str(one): pairs(given.trl, one, given.steps) for one in (16, 64)},
    }
    write("grpo_trl", result)


if __name__ == "__main__":
    main()
