"""Measure the steps of one request while adapters of large ranks are first used beside it.

    python benchmarks/bench_wide_adapters.py [--ranks 64 256 1000 2000] [--rounds 3]

The model is a random Llama of 8 layers. In each round an engine decodes one request of the base;
after 60 steps a request of an adapter comes that has never run, LoRA on all linears. Over the
rounds, medians of:

    longest     the longest step up to the second token of the adapter's request, to the median
                step before it came
    settled     the median step with both requests, to the same: what the adapter costs anyway
    copies      bytes of the tables that the adapter is served from, to those of its tensors
"""

from __future__ import annotations

import argparse
import statistics
import time

from bench_generation import random_llama
from measure import write

import pcg
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams

BEFORE, BOTH = 60, 20


def measured(executor: Executor, rank: int) -> dict[str, float]:
    """Return the ratios of one round."""
    recipe = {"peft_type": "LORA", "r": rank, "target_modules": "all-linear"}
    adapter = executor.add_adapter("wide", recipe)
    engine = executor.engine(kv_cache_bytes=4 * adapter.size_bytes + 2**28)
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    engine.submit(Request((3, 1, 4), params))
    before, first, both = list[float](), list[float](), list[float]()
    tokens = 0
    while len(both) < BOTH:
        if len(before) == BEFORE and not first:
            engine.submit(Request((1, 5, 9), params, adapter))
        started = time.perf_counter()
        chunks = engine.step()
        took_s = time.perf_counter() - started
        tokens += sum(chunk.index == 1 for chunk in chunks)
        step = before if len(before) < BEFORE else first if tokens < 2 else both
        step.append(took_s)
    quiet_s = statistics.median(before)
    copies = executor.serving.tables.beside_pool_bytes / adapter.size_bytes
    executor.remove_adapter("wide")
    return {
        "longest": max(first) / quiet_s,
        "settled": statistics.median(both) / quiet_s,
        "copies": copies,
    }


def main() -> None:
    """Measure all ranks, and write the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1000, 2000])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    executor = pcg.compile(random_llama())
    found: dict[str, dict[str, float]] = {}
    for rank in given.ranks:
        rounds = [measured(executor, rank) for _ in range(given.rounds)]
        found[str(rank)] = {k: statistics.median(one[k] for one in rounds) for k in rounds[0]}
        print(rank, {name: round(value, 2) for name, value in found[str(rank)].items()})
    write("wide_adapters", found)


if __name__ == "__main__":
    main()
