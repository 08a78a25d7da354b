"""Start-up: explain of a 70B model and `pcg --help`, as whole processes; reading an adapter.

    python benchmarks/bench_startup.py [--rounds 3]

Contenders, in seconds of wall time, in turn in every round:

    import          python -c "import torch; from transformers import LlamaForCausalLM"
    explain         pcg explain meta-llama/Llama-3.1-70B, 80 layers; with its peak memory
    explain 4       the same with 4 layers
    help            pcg --help
    read            `read_adapter` of 448 tensors, 64 by 64: 32 layers, all linears, as in one step
    safetensors     `safetensors.torch.load_file` of the same file
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import interleave, medians, ratio, write
from safetensors.torch import load_file

from pcg.ir.recipe import LoraRecipe
from pcg.runtime.adapters import new_adapter, read_adapter, write_adapter

CONFIG = Path(__file__).parent.parent / "pcg" / "configs" / "meta-llama--Llama-3.1-70B.json"
IMPORT = "import torch; from transformers import LlamaForCausalLM"


def process(*command: str) -> Callable[[], float]:
    """What runs a Python process and returns its wall time."""

    def run() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started

    return run


def reading(folder: Path) -> dict[str, Callable[[], float]]:
    """What times reading one adapter, ours and the file alone."""
    names = [f"self_attn.{x}_proj" for x in "qkvo"]
    names += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    linears = {f"model.layers.{i}.{name}": (64, 64) for i in range(32) for name in names}
    write_adapter(new_adapter("x", LoraRecipe.default(), linears), folder)

    def timed(read: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            read()
            return time.perf_counter() - started

        return run

    return {
        "read": timed(lambda: read_adapter(folder, "x")),
        "safetensors": timed(lambda: load_file(folder / "adapter_model.safetensors")),
    }


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
                "import": process("-c", IMPORT),
                "explain": process(*command, "meta-llama/Llama-3.1-70B"),
                "explain 4": process(*command, str(shallow)),
                "help": process("-m", "pcg_cli", "--help"),
            },
            arguments.rounds,
        )
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    write(
        "startup",
        {
            "seconds": medians(values),
            "explain / import (at most 2.5)": ratio(values, "explain", "import"),
            "80 layers / 4 layers (at most 1.1)": ratio(values, "explain", "explain 4"),
            "reading an adapter / its file": ratio(values, "read", "safetensors"),
            "help, seconds (at most 0.5)": medians(values)["help"],
            "largest peak memory of them, MiB (at most 1024)": round(peak_kib / 1024),
        },
    )


if __name__ == "__main__":
    main()
