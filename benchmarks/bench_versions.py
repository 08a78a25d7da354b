"""Measure what a version of an adapter costs beside the training step that made it.

    python benchmarks/bench_versions.py [--steps 6]

An adapter of rank 16 at all linear modules of a random 8-layer Llama of hidden size 512 is trained
by an engine on batches of four sequences of 256 tokens, fp32, one thread, and each step is
published. Times are processor time of the thread that works, medians: of a training step; of
putting a version in place of another, which the engine's thread does; and of the digest, which a
thread of its own computes, or nobody where no request names the version.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from bench_generation import RECIPE, random_llama
from measure import write

import pcg
from pcg.peft.adapter_files import digest_of
from pcg.runtime.data.example import Example


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    executor = pcg.compile(random_llama().eval())
    rows = torch.randint(5, 1000, (4, 256)).tolist()
    ends = [time.thread_time()]
    engine = executor.engine()
    engine.finetune(
        [Example(row, row) for row in rows],
        "mine",
        peft={"peft_type": "LORA", **RECIPE},
        max_steps=arguments.steps,
        batch_size=4,
        publish_every=1,
        on_step=lambda _: ends.append(time.thread_time()),
    )
    while not engine.is_idle:
        engine.step()
    step_ms = statistics.median(1e3 * (b - a) for a, b in pairwise(ends[1:]))
    adapter = executor.adapters["mine"]
    put_ms = median_ms(lambda: executor.state.put_adapter(adapter))
    digest_ms = median_ms(lambda: digest_of(adapter))
    result: dict[str, Any] = {
        "adapter_mib": round(adapter.size_bytes / 2**20, 2),
        "step_ms": round(step_ms, 1),
        "put_ms": round(put_ms, 4),
        "digest_ms": round(digest_ms, 3),
        "put / step, on the engine's thread": round(put_ms / step_ms, 6),
        "digest / step, on a thread beside it": round(digest_ms / step_ms, 5),
    }
    write("versions", result)


def median_ms(act: Callable[[], object]) -> float:
    """Return the median of a call's processor time, milliseconds."""
    times = []
    for _ in range(21):
        started = time.thread_time()
        act()
        times.append(1e3 * (time.thread_time() - started))
    return statistics.median(times)


if __name__ == "__main__":
    main()
