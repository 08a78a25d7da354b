"""Measure the peak of a CPU training step's memory against what `pcg.explain` predicts.

    python benchmarks/bench_peak.py [--rounds 3] [--budgets 1 0.5 0]
    python benchmarks/bench_peak.py --cases 60 [--processes 2]

The first measures resident memory: a small Llama with LoRA on all linear layers, random weights,
and AdamW, in a fresh process for each measurement. A step of another, tiny model comes first, which
loads the libraries' code, and one of 80 tokens, which makes the optimizer's states. Then

    measured  = peak over two steps (VmHWM, reset before) - floor before them (VmRSS)
    predicted = activations + workspace + gradients of `pcg.explain`
    process   = the same peak - VmRSS before the model is loaded
    explained = total + allocator_bytes of `pcg.explain --device cpu`

Adapters and optimizer states are in the floor. Contenders in every round: pcg as it is, and with
nothing given back to the system but by glibc itself. Seconds are CPU time of one step, and
fresh pages those that the kernel zeroes in it, which what is given back costs.

The second draws models, methods, budgets and steps (`tests.support.measured_memory.drawn_step`),
and measures the bytes of tensors that are alive at once (results/peak_cases.json).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from measure import write

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
WAYS = ("pcg", "glibc alone")
MOST_ERROR = 0.1
MOST_CASE_ERROR = 0.03
TINY = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS for now, VmHWM for the peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def fresh_pages() -> int:
    """Return how many pages this process has got from the kernel so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def one(budget: float, batch: int, seq: int, layers: int, is_default: bool) -> dict[str, float]:
    """Measure this process, which is a fresh one.

    Args:
        is_default: True to leave to glibc what is given back.
    """
    import torch

    import pcg
    from pcg import compiler
    from pcg.peft.lora import LoraConfig
    from pcg.runtime.data.example import Example
    from pcg.runtime.memory.host_memory import FreedMemory
    from pcg.runtime.model.weights import RandomWeights
    from pcg.runtime.training import runner as training

    torch.set_num_threads(1)
    recipes = {"a": LoraConfig(r=8, target_modules="all-linear")}
    options: dict[str, Any] = {"memory_budget": budget, "batch": batch, "seq": seq}
    options["dtype"] = "float32"
    if is_default:
        mock.patch.object(training, "return_freed_memory").start()
        mock.patch.object(FreedMemory, "look").start()

    def step_of(program: Any) -> tuple[Callable[[int, int], None], Any]:
        executor = compiler.make_executor(program, RandomWeights(0.02, 0), recipes, None, "cpu")
        runner = executor.training_runner("a")
        optimizer = torch.optim.AdamW(list(runner.parameters.values()))

        def step(batch: int, seq: int) -> None:
            runner.forward_backward([Example([3] * seq, [3] * seq)] * batch, batch * (seq - 1))
            optimizer.step()
            optimizer.zero_grad()

        return step, executor

    step, _ = step_of(compiler.compile_program({**CONFIG, **TINY}, recipes, **options))
    step(1, 80)
    del step, _
    config = {**CONFIG, "num_hidden_layers": layers}
    report = pcg.explain(config, recipes, device="cpu", **options)
    memory = report.memory_bytes
    program = compiler.compile_program(config, recipes, **options)
    start = resident("VmRSS")
    step, executor = step_of(program)  # which holds the packed copies
    step(1, 80)
    floor = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    started, faults = time.process_time(), fresh_pages()
    step(batch, seq)
    step(batch, seq)
    peak = resident("VmHWM")
    del executor
    return {
        "seconds": (time.process_time() - started) / 2,
        "fresh_pages_mib": (fresh_pages() - faults) * resource.getpagesize() / 2 / 2**20,
        "floor_mib": floor / 2**20,
        "measured_mib": (peak - floor) / 2**20,
        "predicted_mib": sum(memory[k] for k in ("activations", "workspace", "gradients")) / 2**20,
        "process_mib": (peak - start) / 2**20,
        "explained_mib": (memory["total"] + report.allocator_bytes) / 2**20,
        "packed_mib": report.packed_bytes / 2**20,
        "allocator_mib": report.allocator_bytes / 2**20,
    }


def measure(rounds: int, budgets: list[float], sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Measure every budget in both ways, in turn in every round; medians over the rounds."""
    found: dict[tuple[float, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for budget in budgets:
            for way in WAYS:
                command = [sys.executable, __file__, "--one", way, "--budgets", str(budget)]
                command += ["--sizes", *map(str, sizes)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found.setdefault((budget, way), []).append(json.loads(output))
                print(f"  budget {budget:g} {way:<20} {output.strip()}", file=sys.stderr)
    return [_row(budget, way, runs) for (budget, way), runs in found.items()]


def _row(budget: float, way: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    middle = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
    error = round(middle["measured_mib"] / middle["predicted_mib"] - 1, 3)
    process = round(middle["process_mib"] / middle["explained_mib"], 3)
    return {"memory_budget": budget, "malloc": way, **middle, "error": error, "process": process}


def draw(seeds: list[int]) -> None:
    """Measure the random steps of some seeds, and print a line of JSON for each."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.support.measured_memory import drawn_step

    for seed in seeds:
        step, error = drawn_step(seed)
        print(json.dumps({"seed": seed, "step": str(step), "error": round(error, 4)}), flush=True)


def measure_cases(cases: int, processes: int) -> None:
    """Draw steps in some processes and write their result file. SystemExit: an error too large."""
    command = [sys.executable, __file__, "--seeds"]
    running = [
        subprocess.Popen(
            [*command, *map(str, range(first, cases, processes))],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for first in range(processes)
    ]
    lines = [line for one in running for line in one.communicate()[0].splitlines()]
    rows = sorted(map(json.loads, lines), key=lambda row: row["seed"])
    errors = sorted((row["error"] for row in rows), key=abs)
    key = f"largest error (at most {MOST_CASE_ERROR:.0%})"
    median = statistics.median(map(abs, errors))
    write("peak_cases", {"cases": len(rows), key: errors[-1], "median": median, "results": rows})
    if len(rows) < cases or abs(errors[-1]) > MOST_CASE_ERROR:
        raise SystemExit(f"error: {len(rows)} of {cases} cases, of at most {errors[-1]:+.1%} error")


def main() -> None:
    """Run the contenders in turn and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.5, 0.0])
    parser.add_argument(
        "--sizes", type=int, nargs=3, default=[4, 512, 8], metavar=("BATCH", "SEQ", "LAYERS")
    )
    parser.add_argument("--cases", type=int, help="draw so many random steps instead")
    parser.add_argument("--processes", type=int, default=1, help="that draw them")
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="draw these steps alone, and print them"
    )
    parser.add_argument("--one", choices=WAYS, help="measure this process alone, and print it")
    arguments = parser.parse_args()
    if arguments.one:
        found = one(arguments.budgets[0], *arguments.sizes, arguments.one != WAYS[0])
        print(json.dumps(found))
        return
    if arguments.seeds:
        draw(arguments.seeds)
        return
    if arguments.cases:
        measure_cases(arguments.cases, arguments.processes)
        return
    rows = measure(arguments.rounds, arguments.budgets, tuple(arguments.sizes))
    batch, seq, layers = arguments.sizes
    most = max(abs(row["error"]) for row in rows if row["malloc"] == WAYS[0])
    write(
        "peak",
        {
            "model": {**CONFIG, "num_hidden_layers": layers},
            "batch": batch,
            "seq": seq,
            "dtype": "float32",
            "results": rows,
            f"largest error of pcg's (at most {MOST_ERROR:.0%})": most,
        },
    )


if __name__ == "__main__":
    main()
