"""The engine's own time in a step, and what a long prompt costs others.

host_step     a decode step that is replayed, CUDA's own calls left out: an engine decodes sequences
              of a small model that is compiled for Triton, without an adapter and with one of rank
              16 each. Its recorder replays nothing and its device is the CPU's memory, so that what
              is left is the engine's own work, whatever the size of the model. Processor time.

long_prompts  A request streams. Once it has some tokens, a long prompt comes, and once its first
              chunk has run, a short request. Contenders are values of `Limits(prompt_stretch=…)`;
              `inf` has no bound. Times are processor seconds of the engine's thread:
    gap         median gap of the stream before the long prompt comes
    longest     its longest gap from then on until the prompt's first token, in such gaps
    short       from the short request's submission to its first token, seconds
    long        from the long prompt's submission to its first token, seconds
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness as bench

os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU, kernels are imported so alone


import pcg
from pcg import compiler
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.source import resolve

# -------------------------------------------------------------------------------------- host step

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
WARM_STEPS = 60


class NoDevice:
    """A recorder whose replays do nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


@bench.case("host_step", sequences=2, steps=5)
def host_step(sequences: int = 32, steps: int = 400) -> dict[str, Any]:
    counts = {"base": 0, "adapters": sequences}
    found = {name: replayed_step(count, sequences, steps) for name, count in counts.items()}
    return {"sequences": sequences, **found}


def replayed_step(adapters: int, sequences: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of a step."""
    config = {**resolve("meta-llama/Llama-3.1-8B").config, **SIZES}
    executor = compiler.compile_random(config, backend="triton", device="cpu", dtype="bfloat16")
    for number in range(adapters):
        executor.add_adapter(f"a{number}", bench.LORA)
    engine = executor.engine(Limits(running=sequences, tokens=2048), kv_cache_bytes=2**26)
    graphs: Any = engine.device.graphs
    graphs.recorder, graphs.eager_steps = NoDevice(), 0
    outputs = graphs._outputs_for(sequences)
    outputs.logits.zero_()
    outputs.tokens.fill_(7)
    most = WARM_STEPS + steps
    for number in range(sequences):
        name = f"a{number % adapters}" if adapters else None
        engine.submit(executor.request([1] * 40, name, max_new_tokens=2 * most, ignore_eos=True))
    times = [1e3 * bench.seconds(engine.step, time.thread_time) for _ in range(most)]
    assert graphs.replayed == most, f"{dict(graphs.eager)} ran eagerly"
    ours = times[WARM_STEPS:]
    median = round(statistics.median(ours), 3)
    return {"least_ms": round(min(ours), 3), "median_ms (at most 0.6)": median}


# ----------------------------------------------------------------------------------- long prompts

BEFORE, SHORT = 64, 30
"""Tokens of the stream before the long prompt comes, and of the short request's prompt."""
NAMES = ("stream", "long", "short")


def beside_long(executor: Any, stretch: float, prompt: int, seed: int) -> dict[str, float]:
    """Run the three requests once; return times, of which gaps are relative to the median."""
    drawn, vocabulary = random.Random(seed), executor.program.base.vocabulary
    ids = {
        name: [drawn.randrange(3, vocabulary) for _ in range(length)]
        for name, length in zip(NAMES, (SHORT, prompt, SHORT), strict=True)
    }
    engine = executor.engine(pcg.Limits(prompt_stretch=stretch), log=EventLog(0))
    submitted: dict[str, float] = {}
    tokens: dict[str, list[float]] = {name: [] for name in NAMES}

    def submit(name: str, new: int) -> None:
        fields: Any = {"max_new_tokens": new, "ignore_eos": True, "request_id": name}
        engine.submit(executor.request(ids[name], **fields))
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
    first_s = {f"{name}_s": tokens[name][0] - submitted[name] for name in ("short", "long")}
    return {"gap_ms": 1e3 * gap_s, "longest": max(gaps[BEFORE - 1 :]) / gap_s, **first_s}


@bench.case("long_prompts", "longest", rounds=1, prompt=100)
def long_prompts(
    model: str = str(bench.CHECKPOINT),
    prompt: int = 900,
    rounds: int = 3,
    stretches: tuple[float, ...] = (10.0, math.inf),
) -> dict[str, Any]:
    executor = pcg.compile(model)
    found: dict[float, list[dict[str, float]]] = {one: [] for one in stretches}
    for round_ in range(rounds):
        for stretch in stretches:
            found[stretch].append(beside_long(executor, stretch, prompt, round_))
            bench.note(f"round {round_} stretch {stretch:g} {found[stretch][-1]}")
    result: dict[str, Any] = {"model": model.rpartition("/")[2], "prompt": prompt, "rounds": rounds}
    for stretch, rows in found.items():
        name = "unbounded" if stretch == math.inf else f"stretch {stretch:g}"
        longest = round(max(row["longest"] for row in rows), 2)
        result[name] = bench.medians_of_rows(rows) | {"longest_of_all": longest}
    return result


if __name__ == "__main__":
    bench.main()
