"""Start-up: explain of a 70B model, `pcg --help` and a server as processes; adding adapters.

startup    seconds of wall time
    import          python -c "import torch; from transformers import LlamaForCausalLM"
    explain         pcg explain meta-llama/Llama-3.1-70B, 80 layers
    explain 4       the same with 4 layers
    help            pcg --help
    search          the search over a layer of it, 4 ranks, LoRA on all seven linears
    run             pcg run of the shipped checkpoint, with its program in the cache
    run a program   the same with the folder that pcg compile wrote
    serve           pcg serve of the shipped checkpoint, until it takes requests and ends by
                    SIGTERM: seconds of processor time of all its processes

adapters   milliseconds of adding an adapter of 448 tensors and 19 MiB (32 layers, LoRA r16 on all
           linears) when so many are there, beside reads of the same file; medians over the rounds
    raw             `safetensors.torch.load_file`, which maps the file
    touched         the same with a copy of each tensor
    add             `Executor.add_adapter`
    use             copying it to a slot among those that run, as its first step does
    peft            `PeftModel.load_adapter` of the 2nd and 10th, which takes seconds
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness as bench
import peft
import torch
from safetensors.torch import load_file

import pcg
from pcg.options import PlanOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.layer_costs import DeviceCosts
from pcg.passes.attach import Bypasses
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.shard import Shard
from pcg.peft.adapter import new_adapter
from pcg.peft.adapter_files import write_adapter
from pcg.peft.lora import LoraBypass, LoraConfig

CONFIG = bench.ROOT / "pcg" / "configs" / "meta-llama--Llama-3.1-70B.json"
IMPORT = "import torch; from transformers import LlamaForCausalLM"


def process(*command: str, **variables: str) -> Callable[[], float]:
    """Return a call that runs a Python process and returns its wall time."""
    environment = os.environ | variables
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, env=environment)
    return lambda: bench.seconds(partial(run, [sys.executable, *command]))


def serve() -> float:
    """Start a server; return the processor time of its processes."""

    def ended_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = ended_s()
    with bench.command("serve", bench.CHECKPOINT, "--port", 0, pattern="listening at"):
        pass
    return ended_s() - before


def search() -> Callable[[], float]:
    """Return a call that times the search over a layer."""

    def bypasses(base: Any) -> Bypasses:
        sites = (s for s in base.linear_sites() if "{layer}" in s)
        return Bypasses(dict.fromkeys(sites, (LoraBypass(16),)))

    passes = pipeline(Settings(PlanOptions(tp=4, dtype="bfloat16"), bypasses=bypasses))
    attached = passes.attach.run(passes.base(json.loads(CONFIG.read_text())))
    state = passes.parallelize.until(Shard).run(attached)
    assert state.training is not None

    def find() -> None:
        costs = DeviceCosts(find_cost_model("H100"), 4, 1024, 1024)
        Shard(4, costs).searches(state.training, state, trains=True)[0].find()

    return lambda: bench.seconds(find)


@bench.case("startup", rounds=1)
def startup(rounds: int = 3) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        shallow = Path(folder) / "config.json"
        shallow.write_text(json.dumps({**json.loads(CONFIG.read_text()), "num_hidden_layers": 4}))
        command = ("-m", "pcg_cli", "explain")
        model, program = str(bench.CHECKPOINT), str(Path(folder) / "program")
        process("-m", "pcg_cli", "compile", model, "-o", program)()
        run = ("-m", "pcg_cli", "run", "--prompt", "def", "--max-new-tokens", "2")
        again = process(*run, model, XDG_CACHE_HOME=folder)
        again()
        contenders = {
            "search": search(),
            "import": process("-c", IMPORT),
            "explain": process(*command, "meta-llama/Llama-3.1-70B"),
            "explain 4": process(*command, str(shallow)),
            "help": process("-m", "pcg_cli", "--help"),
            "run": again,
            "run a program": process(*run, program),
            "serve": serve,
        }
        values = bench.interleave(contenders, rounds)
    found = bench.medians(values)
    return {
        "seconds": found,
        "explain / import (at most 2.5)": bench.ratio(values, "explain", "import"),
        "80 layers / 4 layers (at most 1.1)": bench.ratio(values, "explain", "explain 4"),
        "search over a 70B layer, seconds (at most 1)": found["search"],
        "help, seconds (at most 0.5)": found["help"],
        "run / run a program (at most 1.3)": bench.ratio(values, "run", "run a program"),
        "serve, processor seconds (at most 5)": found["serve"],
    }


LAYERS, RANK, COUNTS = 32, 16, (1, 9, 64, 512)


@bench.case("adapters", rounds=1, most=1)
def adapters(rounds: int = 5, most: int = 512) -> dict[str, Any]:
    sizes = {"vocab_size": 512, "max_position_embeddings": 4096}
    model = bench.random_llama(num_hidden_layers=LAYERS, **sizes)
    executor = pcg.compile(model, {"first": "lora"}, device="cpu")
    executor.remove_adapter("first")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "adapter"
        file = folder / "adapter_model.safetensors"
        shapes = executor.program.base.module_shapes()
        recipe = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        write_adapter(new_adapter("x", recipe, shapes, output_layer="lm_head"), folder)
        found = []
        for count in (c for c in COUNTS if c <= most):
            while len(executor.adapters) < count - 1:
                executor.add_adapter(f"x{len(executor.adapters)}", folder)
            rows = [added(executor, folder, file) for _ in range(rounds)]
            by_raw = statistics.median(row["add_ms"] / row["raw_ms"] for row in rows)
            both = ((row["add_ms"] + row["use_ms"]) / row["touched_ms"] for row in rows)
            ratios = {"add_by_raw (at most 5)": round(by_raw, 2)}
            ratios |= {"add_and_use_by_touched": round(statistics.median(both), 2)}
            found.append({"adapter": count, **bench.medians_of_rows(rows, 2), **ratios})
            bench.note(found[-1])
        peers = by_peft(model, folder, file)
        size_mib = file.stat().st_size / 2**20
    adapter = f"{LAYERS} layers, all linears, rank {RANK}, {size_mib:.1f} MiB"
    return {"adapter": adapter, "pcg": found, "peft": peers}


def added(executor: Any, folder: Path, file: Path) -> dict[str, float]:
    """Add an adapter, and use it first; return the milliseconds of each part."""
    name = f"x{len(executor.adapters)}"

    def touch() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in load_file(file).values()]

    parts: dict[str, Callable[[], object]] = {
        "raw_ms": lambda: load_file(file),
        "touched_ms": touch,
        "add_ms": lambda: executor.add_adapter(name, folder),
        "use_ms": lambda: executor.serving.tables.order([executor.adapters[name]]),
    }
    return {part: 1e3 * bench.seconds(act, time.perf_counter) for part, act in parts.items()}


def by_peft(model: Any, folder: Path, file: Path) -> list[dict[str, float]]:
    wrapped, found = peft.PeftModel.from_pretrained(model, folder, adapter_name="x1"), []
    for count in range(2, 11):
        raw_s = bench.seconds(lambda: load_file(file))
        name = f"x{count}"
        load_s = bench.seconds(partial(wrapped.load_adapter, folder, adapter_name=name))
        if count in (2, 10):
            row = {"adapter": count, "load_ms": round(1e3 * load_s, 2)}
            found.append({**row, "load_by_raw": round(load_s / raw_s, 1)})
    return found


if __name__ == "__main__":
    bench.main()
