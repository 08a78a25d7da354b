"""Measure the host's time for a decode step that is replayed, CUDA's own calls left out.

    python benchmarks/bench_host_step.py [--sequences 32] [--steps 400]

An engine decodes sequences of a small model that is compiled for Triton, without an adapter and
with one of rank 16 each. Its recorder replays nothing, and its device is the CPU's memory: what is
left is the engine's own work of a step, from its plan to the tokens that requests get, whatever the
size of the model. Measured is processor time, the least and the median of the steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from measure import write

os.environ["TRITON_INTERPRET"] = "1"  # where there is no GPU, kernels can be imported so alone

import torch

import pcg.compiler as compiler
from pcg.runtime.admission.limits import Limits
from pcg.source import resolve

LORA = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
PROMPT = [1] * 40
WARM_STEPS = 60


class NoDevice:
    """A recorder whose replays do nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def measured(adapters: int, sequences: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of a step."""
    config = {**resolve("meta-llama/Llama-3.1-8B").config, **SIZES}
    executor = compiler.compile_random(config, backend="triton", device="cpu", dtype="bfloat16")
    for number in range(adapters):
        executor.add_adapter(f"a{number}", LORA)
    engine = executor.engine(Limits(running=sequences, tokens=2048), kv_cache_bytes=2**26)
    graphs: Any = engine.device.graphs
    graphs.recorder, graphs.eager_steps = NoDevice(), 0
    outputs = graphs._outputs_for(sequences)
    outputs.logits.zero_()
    outputs.tokens.fill_(7)
    most = WARM_STEPS + steps
    for number in range(sequences):
        name = f"a{number % adapters}" if adapters else None
        engine.submit(executor.request(PROMPT, name, max_new_tokens=2 * most, ignore_eos=True))
    times = []
    for _ in range(most):
        started = time.thread_time()
        engine.step()
        times.append(1e3 * (time.thread_time() - started))
    assert graphs.replayed == most, f"{dict(graphs.eager)} ran eagerly"
    ours = times[WARM_STEPS:]
    return {"least_ms": round(min(ours), 3), "median_ms": round(statistics.median(ours), 3)}


def main() -> None:
    """Measure both and write `results/host_step.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = {"base": 0, "adapters": options.sequences}
    found: dict[str, Any] = {
        name: measured(count, options.sequences, options.steps) for name, count in counts.items()
    }
    write("host_step", {"sequences": options.sequences, **found})


if __name__ == "__main__":
    main()
