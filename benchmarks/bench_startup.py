"""Measure start-up: explain of a 70B model, `pcg --help` and a server as processes; an adapter.

    python benchmarks/bench_startup.py [--rounds 3]

Contenders, in seconds of wall time, in turn in every round:

    import          python -c "import torch; from transformers import LlamaForCausalLM"
    explain         pcg explain meta-llama/Llama-3.1-70B, 80 layers; with its peak memory
    explain 4       the same with 4 layers
    help            pcg --help
    read            `read_adapter` of 448 tensors, 64 by 64: 32 layers, all linears, as in one step
    safetensors     `safetensors.torch.load_file` of the same file
    passes          all passes over Llama-3.1-70B except tracing, in this process
    search          the search over a layer of it, 4 ranks, LoRA on all seven linears
    serve           pcg serve of the shipped checkpoint, until it takes requests and ends by
                    SIGTERM: seconds of processor time of all its processes; and of wall time until
                    it answers at all (`first answer`)
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import interleave, medians, ratio, seconds, write
from safetensors.torch import load_file

from pcg.compiler import compile_program
from pcg.ir.program.program import ModelGraph
from pcg.options import PlanOptions
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.layer_costs import DeviceCosts
from pcg.passes.attach import Bypasses
from pcg.passes.graphs.pass_base import PassRecord
from pcg.passes.pipeline import Settings, pipeline
from pcg.passes.shard import Shard
from pcg.passes.stages import Prepared
from pcg.peft.adapter import new_adapter
from pcg.peft.adapter_files import read_adapter, write_adapter
from pcg.peft.lora import LoraBypass
from pcg.peft.registry import SHORTHANDS

CHECKPOINT = Path(__file__).parent.parent / "examples" / "checkpoint"
CONFIG = Path(__file__).parent.parent / "pcg" / "configs" / "meta-llama--Llama-3.1-70B.json"
IMPORT = "import torch; from transformers import LlamaForCausalLM"


def process(*command: str) -> Callable[[], float]:
    """Return a call that runs a Python process and returns its wall time."""
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    return lambda: seconds(partial(run, [sys.executable, *command]))


def serving() -> dict[str, Callable[[], float]]:
    """Return calls that start a server: its processor time, and the time to its first answer."""
    answered: list[float] = []

    def start() -> float:
        before, port = processor_s(), free_port()
        command = [sys.executable, "-m", "pcg_cli", "serve", str(CHECKPOINT), "--port", str(port)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        began = time.perf_counter()
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                    assert connection.recv(99).startswith(b"HTTP/1.1 503")
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        answered.append(time.perf_counter() - began)
        assert process.stderr is not None
        assert any(line.startswith("listening at") for line in process.stderr)
        process.terminate()
        process.communicate(timeout=60)
        return processor_s() - before

    return {"serve": start, "first answer": lambda: answered[-1]}


def processor_s() -> float:
    """Return the processor time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def reading(folder: Path) -> dict[str, Callable[[], float]]:
    """Return calls that time reading one adapter, by pcg and the file alone."""
    names = [f"self_attn.{x}_proj" for x in "qkvo"]
    names += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    linears = {f"model.layers.{i}.{name}": (64, 64) for i in range(32) for name in names}
    write_adapter(new_adapter("x", SHORTHANDS["lora"], linears), folder)

    file = folder / "adapter_model.safetensors"
    return {
        "read": lambda: seconds(lambda: read_adapter(folder, "x")),
        "safetensors": lambda: seconds(lambda: load_file(file)),
    }


def compiling() -> dict[str, Callable[[], float]]:
    """Return calls that time the passes over a 70B model, and the search over its layer."""
    config = json.loads(CONFIG.read_text())
    prepared: list[Prepared] = []

    def passes() -> float:
        records: list[PassRecord] = []
        compile_program(config, SHORTHANDS["lora"], observe=records.append)
        return sum(record.seconds for record in records if record.name != "trace")

    def search() -> float:
        if not prepared:
            options = PlanOptions(tp=4, dtype="bfloat16")
            stages = pipeline(Settings(options, bypasses=_all_linear))
            attached = stages.attach.run(stages.base(config))
            prepared.append(stages.parallelize.until(Shard).run(attached))
        (state,) = prepared
        assert state.training is not None
        started = time.perf_counter()
        costs = DeviceCosts(find_cost_model("H100"), 4, 1024, 1024)
        Shard(4, costs).searches(state.training, state, trains=True)[0].find()
        return time.perf_counter() - started

    return {"passes": passes, "search": search}


def _all_linear(base: ModelGraph) -> Bypasses:
    sites = (s for s in base.linear_sites() if "{layer}" in s)
    return Bypasses(dict.fromkeys(sites, (LoraBypass(16),)))


def main() -> None:
    """Run the contenders in turn and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shallow = Path(folder) / "config.json"
        shallow.write_text(json.dumps({**json.loads(CONFIG.read_text()), "num_hidden_layers": 4}))
        command = ("-m", "pcg_cli", "explain")
        values = interleave(
            {
                **reading(Path(folder) / "adapter"),
                **compiling(),
                "import": process("-c", IMPORT),
                "explain": process(*command, "meta-llama/Llama-3.1-70B"),
                "explain 4": process(*command, str(shallow)),
                "help": process("-m", "pcg_cli", "--help"),
                **serving(),
            },
            arguments.rounds,
        )
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    found = medians(values)
    write(
        "startup",
        {
            "seconds": found,
            "explain / import (at most 2.5)": ratio(values, "explain", "import"),
            "80 layers / 4 layers (at most 1.1)": ratio(values, "explain", "explain 4"),
            "reading an adapter / its file": ratio(values, "read", "safetensors"),
            "passes over 70B beyond tracing, seconds (at most 3)": found["passes"],
            "search over a 70B layer, seconds (at most 1)": found["search"],
            "help, seconds (at most 0.5)": found["help"],
            "serve, processor seconds": found["serve"],
            "first answer of a server, seconds (at most 1)": found["first answer"],
            "largest peak memory of them, MiB (at most 1024)": round(peak_kib / 1024),
        },
    )


if __name__ == "__main__":
    main()
