"""Learning from preferences and rewards, on the shipped model in fp32 with LoRA of rank 8.

dpo         DPO learns to prefer a signature with types to the same one without; held-out pairs are
            of functions whose names it was never trained on
grpo        examples/configs/grpo.yaml: the reward is 1 for a completion that raises something,
            which random text seldom does. The result has the reward of each update with its time,
            with a staleness of 0 and of 1, and the share of 512 completions that have it before and
            after; run with OMP_NUM_THREADS=2.
grpo_trl    a step of GRPO, rollouts and update, against TRL's GRPOTrainer with peft, which runs in
            a process of its own (`trl_steps.py`, in an environment with trl) with the same model,
            prompts, LoRA, batch and length. Steps of the two take turns, and the ratios are of
            pairs. A learning rate of 1e-6 leaves the lengths of completions alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import harness as bench
import torch

import pcg
from pcg.train.grpo import GrpoOptions, train_grpo
from pcg.train.preference.dpo import dpo as train_dpo
from pcg.train.preference.options import DpoArguments

sys.path.insert(0, str(bench.ROOT / "examples"))
from signature_tasks import examples

PROMPTS = [
    json.loads(line)["prompt"]
    for line in (bench.ROOT / "examples/configs/prompts.jsonl").read_text().splitlines()
]
LORA = {**bench.LORA, "r": 8, "lora_alpha": 16}
GROUP, BATCH = 16, 64


def pairs(count: int, *, held_out: bool) -> list[dict[str, str]]:
    """Return pairs of a signature with types and the same one without."""
    found = []
    for row in examples("typed", 2 * count, held_out=held_out):
        plain = "\n" + row["prompt"]
        if row["completion"] != plain:  # one without defaults has no types
            found.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": plain})
    return found[:count]


@bench.case("dpo", "held_out: 48: rewards/accuracies", steps=2, trained=16, held_out=8)
def dpo(steps: int = 48, trained: int = 256, held_out: int = 48) -> dict[str, Any]:
    sizes: Any = {"batch_size": 8, "beta": 0.1, "learning_rate": 5e-4}
    names = ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")
    curve: dict[str, Any] = {}

    def rounded(metrics: Any) -> dict[str, float]:
        return {name: round(metrics[name], 4) for name in names}

    def on_step(record: Any) -> None:
        curve[str(record.step)] = rounded({"loss": record.loss, **record.metrics})
        bench.note(f"step {record.step}: {curve[str(record.step)]}")

    begun = time.process_time()
    options: Any = {"adapter": "typed", "peft": LORA, "max_steps": steps, **sizes}
    evaluation: Any = {"eval_data": pairs(held_out, held_out=True), "eval_at_start": True}
    data = pairs(trained, held_out=False)
    arguments = DpoArguments(data, eval_every=8, on_step=on_step, **options, **evaluation)
    result = train_dpo(pcg.compile(bench.CHECKPOINT, dtype="float32"), arguments)
    return {
        "model": "examples/checkpoint",
        "peft": LORA,
        "pairs": trained,
        "held_out_pairs": held_out,
        **sizes,
        "processor_seconds": round(time.process_time() - begun, 1),
        "held_out": {str(step): rounded(found) for step, found in result.evaluations},
        "train": curve,
    }


# ------------------------------------------------------------------------------------------- GRPO

GOAL, WINDOW = 0.9, 5
"""A reward, and the updates over which its mean has to be above it."""
_GAP = "sampling/sampling_logp_difference"


def options_of(length: int, rate: float, steps: int, **more: Any) -> GrpoOptions:
    return GrpoOptions(
        num_generations=GROUP, batch_size=BATCH, max_completion_length=length, learning_rate=rate,
        lr_scheduler_type="constant", max_steps=steps, **more,
    )  # fmt: skip


def raises(completions: list[str], **_: object) -> list[float]:
    return [float("raise" in text) for text in completions]


def share(executor: Any, adapter: str | None, count: int) -> float:
    """Return the share of sampled completions that have the reward."""
    prompts, fields = (PROMPTS * 64)[:count], {"max_new_tokens": 16, "temperature": 1.0, "seed": 7}
    found = executor.generate(prompts, adapter=adapter, **fields)
    return round(sum(raises([one.text for one in found])) / len(found), 4)


def learn(executor: Any, staleness: int, steps: int, count: int) -> dict[str, object]:
    """Train an adapter; return its curve."""
    name, began, curve = f"stale-{staleness}", time.monotonic(), list[dict[str, float]]()

    def on_step(step: int, numbers: Mapping[str, float], _: object) -> None:
        names = ("reward", "entropy", "completions/mean_length", "staleness")
        kept = {name: round(numbers[name], 4) for name in names}
        curve.append({"step": step, "seconds": round(time.monotonic() - began, 1), **kept})
        bench.note(curve[-1])

    options = options_of(16, 2e-3, steps, max_staleness=staleness)
    done = train_grpo(executor, PROMPTS, raises, options, adapter=name, peft=LORA, on_step=on_step)
    rewards = [one["reward"] for one in curve]
    means = [sum(rewards[at - WINDOW : at]) / WINDOW for at in range(WINDOW, len(rewards) + 1)]
    reached = next((at for at, mean in enumerate(means, WINDOW - 1) if mean > GOAL), None)
    exact = [one for one in done.history if not one["staleness"]]
    gaps = {
        kind: max((one[f"{_GAP}/{kind}"] for one in exact if f"{_GAP}/{kind}" in one), default=None)
        for kind in ("mean", "max")
    }
    return {
        "rewarded_after": share(executor, name, count),
        "seconds": round(done.seconds, 1),
        f"mean_of_{WINDOW}_above_{GOAL}": None if reached is None else curve[reached],
        "sampled_and_trained_logprobs_differ_by": gaps,
        "curve": curve,
    }


@bench.case("grpo", "rewarded_before", "rewarded_after", steps=1, count=16)
def grpo(steps: int = 50, count: int = 512) -> dict[str, Any]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    executor = pcg.compile(bench.CHECKPOINT, dtype="float32")
    before = share(executor, None, count)
    runs = {str(staleness): learn(executor, staleness, steps, count) for staleness in (0, 1)}
    return {"threads": torch.get_num_threads(), "rewarded_before": before, "staleness": runs}


# -------------------------------------------------------------------------------------------- TRL


def vowels(completions: list[str], **_: object) -> list[float]:
    """Return the share of each completion that is vowels, which no two have alike."""
    return [sum(x in "aeiou" for x in text) / max(len(text), 1) for text in completions]


def trl_step(peer: Any) -> dict[str, float]:
    """Let TRL do a step; return its seconds and the mean length of its completions."""
    peer.stdin.write("\n")
    peer.stdin.flush()
    for line in peer.stdout:
        if line.startswith("STEP "):
            found: dict[str, float] = json.loads(line[5:])
            return found
    raise SystemExit("error: TRL ended; see above")


def paired(python: str, length: int, steps: int) -> dict[str, Any]:
    """Run steps in turns; return their seconds and the median ratios."""
    sizes = {"batch": BATCH, "group": GROUP, "length": length, "rate": 1e-6, "steps": steps + 8}
    settings = json.dumps({"model": str(bench.CHECKPOINT), "prompts": PROMPTS, **sizes})
    command, pipe = [python, str(bench.ROOT / "benchmarks/trl_steps.py"), settings], subprocess.PIPE
    peer = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    rows: list[dict[str, float]] = []
    began = processor_began = 0.0

    def on_step(step: int, numbers: Mapping[str, float], _: object) -> None:
        nonlocal began, processor_began
        ours, processor = time.perf_counter() - began, time.process_time() - processor_began
        theirs = trl_step(peer)
        row = {"pcg_s": ours, "trl_s": theirs["seconds"], "pcg_processor_s": processor}
        row |= {"trl_processor_s": theirs["processor_s"], "pcg_update_s": numbers["update_s"]}
        row |= {"pcg_length": numbers["completions/mean_length"], "trl_length": theirs["length"]}
        if step > 1:  # the first ones warm up
            rows.append({name: round(value, 3) for name, value in row.items()})
            bench.note(rows[-1])
        began, processor_began = time.perf_counter(), time.process_time()

    try:
        executor = pcg.compile(bench.CHECKPOINT, dtype="float32")
        options = options_of(length, 1e-6, steps + 1)
        train_grpo(executor, PROMPTS, vowels, options, peft=LORA, on_step=on_step)
    finally:
        peer.kill()
        peer.wait()

    def ratio(unit: str) -> float:
        return round(statistics.median(row[f"trl_{unit}"] / row[f"pcg_{unit}"] for row in rows), 2)

    ratios = {"times_as_fast": ratio("s"), "times_as_fast_processor": ratio("processor_s")}
    return {**ratios, "steps": rows}


@bench.case("grpo_trl", "times_as_fast", "times_as_fast_processor", steps=1, lengths=(4,))
def grpo_trl(
    trl: str = ".venv-clients/trl/bin/python", steps: int = 5, lengths: tuple[int, ...] = (16, 64)
) -> dict[str, Any]:
    script = "from importlib.metadata import version; print(version('trl'))"
    version = subprocess.run([trl, "-c", script], check=True, capture_output=True, text=True)
    result = {"trl": version.stdout.strip(), "threads": torch.get_num_threads()}
    runs = {str(length): paired(trl, length, steps) for length in lengths}
    return {**result, "completions": BATCH, "lengths": runs}


if __name__ == "__main__":
    bench.main()
