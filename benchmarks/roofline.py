"""The roofline of emitted steps by count: launches, bytes, FLOPs, floor and expected time.

    python benchmarks/roofline.py [--only STEP …]

Llama-3.1-8B on an H200, neither of which is needed: the engine runs each step on a GPU that is not
there (`roofline_steps.py`), in processes of one and of two layers, whose difference is a layer's.
What a launch reads, writes and multiplies is counted from its arguments (`roofline_counts.py`), its
occupancy from the machine code, and the time by the formulas of `roofline_device.py`.

Results: results/roofline.json, with the formula beside each number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_work
from gpu_model import CONFIG, config
from gpu_work import LlamaShape, Work
from measure import write
from rich.console import Console
from rich.table import Table
from roofline_counts import REPLAY, Launch
from roofline_device import H200, Gpu
from roofline_steps import ROOT, Sizes

SIZES = Sizes()
STEPS: Mapping[str, tuple[str, int]] = {
    "decode, base": ("decode", 0),
    "decode, adapters": ("decode", SIZES.adapters),
    "prefill, base": ("prefill", 0),
    "prefill, adapters": ("prefill", SIZES.prompts),
    "finetuning": ("finetune", 0),
    "recorded window": ("window", 0),
}
"""Name of a step and number of its adapters, by setting."""
FIRST_TRAINED_LAUNCHES = 106
"""Launches of a layer of finetuning, forward and backward, when they were counted first."""
RECORDED = ("decode",)
"""Steps that are replayed from a graph."""


@dataclass(frozen=True)
class Step:
    """The launches of a step, and those of one of its layers."""

    every: Sequence[Launch]
    layer: Sequence[Launch]
    recorded: bool

    @property
    def work(self) -> Work:
        return sum((launch.whole_work for launch in self.every), Work(0))

    @property
    def launches(self) -> int:
        return sum(launch.count for launch in self.every if launch.kernel != REPLAY)

    @property
    def layer_launches(self) -> int:
        return sum(launch.count for launch in self.layer if launch.kernel != REPLAY)


def of_layers(one: Sequence[Launch], two: Sequence[Launch], layers: int, recorded: bool) -> Step:
    """The step of a model, by its launches with one and with two layers.

    A launch that is larger with two layers, as a copy of what all layers read, grows by as much
    with each.

    Raises:
        ValueError: a launch of the smaller model is not in the larger one.
    """
    smaller, larger = Counter(one), Counter(two)
    more = list((larger - smaller).elements())
    every = list((smaller & larger).elements())
    for launch in (smaller - larger).elements():
        grown = next((other for other in more if other.kernel == launch.kernel), None)
        if grown is None:
            raise ValueError(f"{launch.kernel} is launched with one layer and not with two")
        more.remove(grown)
        growth = Work(grown.work.bytes - launch.work.bytes, grown.work.flops - launch.work.flops)
        every.append(replace(grown, work=launch.work + growth.times(layers - 1)))
    return Step([*every, *more * (layers - 1)], more, recorded)


def launches(step: str, adapters: int, layers: int, gpu: Gpu) -> list[Launch]:
    """The launches of a step of a model with so many layers, counted in a process."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    script = Path(__file__).parent / "roofline_steps.py"
    numbers = [str(adapters), str(layers), str(gpu.architecture)]
    ran = subprocess.run(
        [sys.executable, script, CONFIG, step, *numbers],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"error: {step} of {layers} layers was not counted: {ran.stderr}")
    found = json.loads(ran.stdout.splitlines()[-1])
    return [Launch.of_json(fields) for fields in found]


# ---------------------------------------------------------------------------------------- numbers


def number(value: float, formula: str) -> dict[str, Any]:
    """A number with the formula that it comes of."""
    return {"value": round(value, 3), "formula": formula}


def numbers(step: Step, gpu: Gpu) -> dict[str, Any]:
    """The numbers of a step, each with its formula."""
    work = step.work
    bound = "" if step.recorded else f", at least {gpu.host_us} us of the host a launch"
    return {
        "launches": number(step.launches, "with one layer + 31 times (with two - with one)"),
        "launches_a_layer": number(step.layer_launches, "with two layers - with one"),
        "bytes": number(work.bytes, "sum over launches of what they read and write once"),
        "flops": number(work.flops, "sum over launches of 2 a multiplication and its sum"),
        "floor_us": number(
            gpu.floor_us(work), f"max(bytes / {gpu.bytes_per_s:.3g}, FLOPs / {gpu.flops_per_s:.3g})"
        ),
        "expected_us": number(
            gpu.step_us(step.every, step.recorded),
            f"sum over launches of {gpu.launch_us} + {gpu.fill_us} us + max(bytes / (bandwidth "
            f"hidden), FLOPs / (rate busy)){bound}; of two side by side once that of the longer "
            f"one, at least bytes of both / bandwidth, and {gpu.launch_us} us to join",
        ),
        "layer": [_kernel(one, count, gpu) for one, count in Counter(step.layer).items()],
    }


def _kernel(launch: Launch, count: int, gpu: Gpu) -> dict[str, Any]:
    found = {
        "kernel": launch.kernel,
        "launches": count,
        "bytes": launch.work.bytes,
        "flops": launch.work.flops,
        "expected_us": round(gpu.expected_us(launch), 2),
    }
    if launch.beside:
        found["beside"] = _kernel(launch.beside, count, gpu)
    if launch.programs:
        found |= {
            "programs": launch.programs,
            "registers": launch.registers,
            "shared_bytes": launch.shared_bytes,
            "resident": gpu.resident(launch),
        }
    return found


# ------------------------------------------------------------------------------------------ goals


@dataclass(frozen=True)
class Goal:
    """A number that is aimed at."""

    name: str
    reached: float
    most: float
    formula: str

    @property
    def met(self) -> bool:
        return self.reached <= self.most

    def to_json(self) -> dict[str, Any]:
        return {
            "goal": self.name,
            "reached": round(self.reached, 3),
            "at_most": self.most,
            "met": self.met,
            "formula": self.formula,
        }


def goals(steps: Mapping[str, Step], shape: LlamaShape, gpu: Gpu) -> list[Goal]:
    """The goals of the steps that were counted."""
    found: list[Goal] = []
    expected = {name: gpu.step_us(step.every, step.recorded) for name, step in steps.items()}
    if {"decode, base", "decode, adapters"} <= {*steps}:
        step, base = steps["decode, adapters"], steps["decode, base"]
        needed = gpu_work.decode_work(shape, SIZES.batch, SIZES.keys, 0, 0, 0)
        own = step.work.bytes - base.work.bytes
        found += [
            Goal("bytes of decode with adapters", step.work.bytes / needed.bytes, 1.17,
                 "bytes / (weights + keys and values, by gpu_work.decode_work)"),
            Goal("launches of a layer of decode with adapters", step.layer_launches, 14,
                 "with two layers - with one"),
            Goal("expected decode step with adapters",
                 expected["decode, adapters"] / gpu.floor_us(step.work), 1.35,
                 "expected / floor, both with adapters"),
            Goal("adapters' time in decode",
                 (expected["decode, adapters"] - expected["decode, base"])
                 / (1e6 * own / gpu.bytes_per_s), 1.25,
                 "(expected with - expected without) / (bytes with - bytes without) bandwidth"),
        ]  # fmt: skip
    if {"prefill, base", "prefill, adapters"} <= {*steps}:
        found.append(
            Goal("prefill with adapters", expected["prefill, adapters"] / expected["prefill, base"],
                 1.15, "expected with adapters / without")
        )  # fmt: skip
    if "finetuning" in steps:
        step = steps["finetuning"]
        found += [
            Goal("finetuning step, ms", expected["finetuning"] / 1e3, 240,
                 "expected, forward and backward, without the optimizer"),
            Goal("launches of a layer of finetuning", step.layer_launches,
                 FIRST_TRAINED_LAUNCHES / 2,
                 f"forward and backward; half of {FIRST_TRAINED_LAUNCHES}"),
        ]  # fmt: skip
    if "recorded window" in steps:
        every = steps["recorded window"].every
        replays = sum(launch.kernel == REPLAY for launch in every)
        others = sum(not launch.recorded for launch in every) - replays
        found.append(
            Goal(f"host's time over the device's, a step of {SIZES.window} tokens",
                 gpu.of_host_us(every) / gpu.device_us(every), 1.0,
                 f"({others} launches of the host · {gpu.host_us} us + {replays} replays · "
                 f"{gpu.replay_us} us) / expected of the device, losses and update included")
        )  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------- main


def tables(steps: Mapping[str, Step], found: Sequence[Goal], gpu: Gpu) -> list[Table]:
    """The table of steps and that of goals."""
    counts = Table(title=f"Llama-3.1-8B on {gpu.name}, by count")
    for name in ("step", "launches", "a layer", "GB", "TFLOP", "floor ms", "expected ms"):
        counts.add_column(name, justify="left" if name == "step" else "right")
    for name, step in steps.items():
        work = step.work
        counts.add_row(
            name, f"{step.launches:,}", f"{step.layer_launches}", f"{work.bytes / 1e9:,.2f}",
            f"{work.flops / 1e12:,.2f}", f"{gpu.floor_us(work) / 1e3:,.2f}",
            f"{gpu.step_us(step.every, step.recorded) / 1e3:,.2f}",
        )  # fmt: skip
    aims = Table(title="goals")
    for name in ("goal", "reached", "at most", ""):
        aims.add_column(name, justify="left" if name == "goal" else "right")
    for goal in found:
        verdict = "pass" if goal.met else "miss"
        aims.add_row(goal.name, f"{goal.reached:,.2f}", f"{goal.most:,.2f}", verdict,
                     style=None if goal.met else "red")  # fmt: skip
    return [counts, aims]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count the steps that are asked for, and print and write what they take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=list(STEPS), metavar="STEP")
    given = parser.parse_args(arguments)
    shape = LlamaShape.of(config())
    steps: dict[str, Step] = {}
    for name in given.only or STEPS:
        step, adapters = STEPS[name]
        one, two = (launches(step, adapters, layers, H200) for layers in (1, 2))
        steps[name] = of_layers(one, two, shape.layers, step in RECORDED)
        print(f"  counted {name}", file=sys.stderr)
    found = goals(steps, shape, H200)
    result = {
        "gpu": {"name": H200.name, "sources": list(H200.sources)},
        "steps": {name: numbers(step, H200) for name, step in steps.items()},
        "goals": [goal.to_json() for goal in found],
    }
    if given.only is None:
        write("roofline", result)
    for table in tables(steps, found, H200):
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
