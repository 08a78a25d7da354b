"""Measure what a long prompt costs others: the gaps of a stream, and a short request's first token.

    python benchmarks/bench_long_prompts.py [--model examples/checkpoint] [--prompt 900]
        [--rounds 3] [--stretches 10,inf]

A request streams. Once it has some tokens, a long prompt of random tokens comes, and once its first
chunk has run, a short request. All are of one tenant, without a promise, on one thread for tensors.
Contenders are values of `Limits(prompt_stretch=…)`, of which `inf` has no bound; each is a new
engine in every round. Times are processor seconds of the engine's thread, by the events of its log,
as what else the machine runs does not count:

    gap         median gap of the stream before the long prompt comes
    longest     its longest gap from then on until the prompt's first token, in such gaps
    short       from the short request's submission to its first token, seconds
    long        from the long prompt's submission to its first token, seconds
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from typing import Any

import torch
from measure import medians, write

import pcg
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.events import Event, EventLog, Kind

BEFORE, SHORT = 64, 30
"""Tokens of the stream before the long prompt comes, and of the short request's prompt."""
NAMES = ("stream", "long", "short")


def measured(executor: Executor, stretch: float, prompt: int, seed: int) -> dict[str, float]:
    """Run the three requests once; returns times, of which gaps are relative to the median."""
    drawn = random.Random(seed)
    vocabulary = executor.program.base.vocabulary
    ids = {
        name: [drawn.randrange(3, vocabulary) for _ in range(length)]
        for name, length in zip(NAMES, (SHORT, prompt, SHORT), strict=True)
    }
    engine = executor.engine(pcg.Limits(prompt_stretch=stretch), log=EventLog(0))
    submitted: dict[str, float] = {}
    tokens: dict[str, list[float]] = {name: [] for name in NAMES}

    def submit(name: str, new: int) -> None:
        engine.submit(
            executor.request(ids[name], max_new_tokens=new, ignore_eos=True, request_id=name)
        )
        submitted[name] = time.thread_time()

    def note(event: Event) -> None:
        if event.kind is Kind.TOKEN:
            tokens[event.subject].append(time.thread_time())

    engine.log.listen(note)
    submit("stream", 100_000)
    while len(tokens["stream"]) < BEFORE:
        engine.step()
    submit("long", 1)
    engine.step()
    submit("short", 2)
    while not (tokens["long"] and tokens["short"]):
        engine.step()
    gaps = [b - a for a, b in itertools.pairwise(tokens["stream"])]
    gap_s = statistics.median(gaps[BEFORE // 2 : BEFORE - 1])
    return {
        "gap_ms": 1e3 * gap_s,
        "longest": max(gaps[BEFORE - 1 :]) / gap_s,
        "short_s": tokens["short"][0] - submitted["short"],
        "long_s": tokens["long"][0] - submitted["long"],
    }


def main() -> None:
    """Run the contenders in turn, and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="examples/checkpoint")
    parser.add_argument("--prompt", type=int, default=900, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stretches", default="10,inf")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    executor = pcg.compile(arguments.model)
    stretches = [float(one) for one in arguments.stretches.split(",")]
    found: dict[float, list[dict[str, float]]] = {one: [] for one in stretches}
    for round_ in range(arguments.rounds):
        for stretch in stretches:
            found[stretch].append(measured(executor, stretch, arguments.prompt, round_))
            print(f"  round {round_} stretch {stretch:g} {found[stretch][-1]}")
    results: dict[str, Any] = {"model": str(arguments.model).rpartition("/")[2]}
    results |= {"prompt": arguments.prompt, "rounds": arguments.rounds}
    for stretch, rows in found.items():
        name = "unbounded" if stretch == math.inf else f"stretch {stretch:g}"
        values = {key: [row[key] for row in rows] for key in rows[0]}
        results[name] = medians(values) | {"longest_of_all": round(max(values["longest"]), 2)}
    write("long_prompts", results)


if __name__ == "__main__":
    main()
