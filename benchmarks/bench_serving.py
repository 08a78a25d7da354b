"""Measure serving: thousands of adapters, and mixed batches.

    python benchmarks/bench_serving.py [--rounds 3] [--adapters 2000] [--requests 64]
        [--parts throughput,mixed]

Parts that are not asked for keep their place in the result file.

The model is a random 8-layer Llama of hidden size 512, on one thread in fp32. Adapters are LoRA on
q, k, v and o, as S-LoRA's, of ranks 8, 16, 32 and 64 in turn, all of them in memory. Contenders run
in turn in every round:

    2000 adapters, 5      requests at once over so many adapters (Zipf, α = 1), 32 of them running;
                          output tokens a second
    mixed, base, peft     64 prompts of 16 to 64 tokens on 64 of the adapters, on none, and peft's
                          generate(adapter_names=…) with left padding; output tokens a second
    …, r16                the same with 64 adapters of rank 16
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench_generation import left_padded, random_llama
from measure import RESULTS, environment, interleave, medians, ratio, seconds
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import pcg
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.report import ServingReport
from pcg.simulate.distributions import Between, Constant, Fixed, PowerLaw
from pcg.simulate.replay import replay
from pcg.simulate.synthetic import assign_adapters, synthetic
from pcg.simulate.workload import Workload

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANKS = (8, 16, 32, 64)
MIXED = 64
NEW = 32
PARTS = ("throughput", "mixed")
PROMPTS = Between(16, 64)
KV_CACHE_BYTES = 2 * 2**30
JOB: dict[str, Any] = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}


def recipe(index: int, ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    """Return the recipe of an adapter."""
    rank = ranks[index % len(ranks)]
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": TARGETS}


def with_adapters(model: torch.nn.Module, count: int) -> Executor:
    """Return an executor of the model with so many adapters in memory, and 64 of rank 16."""
    executor = pcg.compile(model)
    started = time.perf_counter()
    recipes = {f"adapter-{index}": recipe(index) for index in range(count)}
    recipes |= {f"r16-{index}": recipe(index, (16,)) for index in range(MIXED)}
    for seed, (name, fields) in enumerate(recipes.items()):
        executor.add_adapter(name, {"peft_type": "LORA", **fields}, seed=seed)
    print(f"  {len(recipes)} adapters in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return executor


def served(engine: Engine, workload: Workload) -> ServingReport:
    """Serve a workload to its end."""
    state = engine.state
    vocabulary = int(state.program.config["vocab_size"])
    return replay(engine, workload, state.adapters, vocabulary)


def over_adapters(executor: Executor, adapters: int, requests: int) -> float:
    """Return output tokens a second of requests that come at once, over so many adapters."""
    workload = synthetic(Constant(1e6), PROMPTS, Fixed(NEW), seed=0, requests=requests)
    workload = assign_adapters(workload, PowerLaw(adapters, 1.0), seed=0)
    engine = executor.engine(Limits(running=32), kv_cache_bytes=KV_CACHE_BYTES)
    return served(engine, workload).output_throughput


def mixed_contenders(model: torch.nn.Module, executor: Executor) -> dict[str, Callable[[], float]]:
    """Return calls by name that generate for all prompts once."""
    drawn = random.Random(0)
    lengths = [PROMPTS.draw(drawn) for _ in range(MIXED)]
    prompts = [[drawn.randrange(5, 31000) for _ in range(length)] for length in lengths]
    options = left_padded(prompts, NEW)

    def rate(run: Callable[[], object]) -> float:
        return MIXED * NEW / seconds(run)

    def ours(prefix: str | None) -> float:
        names = None if prefix is None else [f"{prefix}-{index}" for index in range(MIXED)]
        sampling = {"max_new_tokens": NEW, "ignore_eos": True}
        return rate(lambda: executor.generate(prompts, names, **sampling))

    def peft_of(prefix: str, ranks: Sequence[int]) -> Callable[[], float]:
        names = [f"{prefix}-{index}" for index in range(MIXED)]
        base = AutoModelForCausalLM.from_config(model.config).eval()
        made = get_peft_model(base, LoraConfig(**recipe(0, ranks)), adapter_name=names[0])
        for index, name in enumerate(names[1:], start=1):
            made.add_adapter(name, LoraConfig(**recipe(index, ranks)))
        made.eval()

        def generate() -> object:
            with torch.inference_mode():
                return made.generate(**options, adapter_names=names)

        return lambda: rate(generate)

    return {
        "base": lambda: ours(None),
        "mixed": lambda: ours("adapter"),
        "peft": peft_of("adapter", RANKS),
        "mixed, r16": lambda: ours("r16"),
        "peft, r16": peft_of("r16", (16,)),
    }


def main() -> None:
    """Run all parts and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = random_llama().eval()
    executor = with_adapters(model, arguments.adapters)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "throughput": lambda: _throughput(
            executor, arguments.adapters, arguments.requests, arguments.rounds
        ),
        "mixed": lambda: _mixed(model, executor, arguments.rounds),
    }
    before = RESULTS / "serving.json"
    result = json.loads(before.read_text()) if before.exists() else {}
    for part in arguments.parts.split(","):
        result[part] = {**measures[part](), "environment": environment()}
    result = {part: result[part] for part in PARTS if part in result}
    text = json.dumps(result, indent=2, ensure_ascii=False)
    print(text)
    before.write_text(text + "\n", "utf-8")


def _throughput(executor: Executor, adapters: int, requests: int, rounds: int) -> dict[str, Any]:
    many = f"{adapters} adapters"
    found = interleave(
        {
            many: lambda: over_adapters(executor, adapters, requests),
            "5 adapters": lambda: over_adapters(executor, 5, requests),
        },
        rounds,
    )
    return {
        "output_tokens_per_s": medians(found),
        f"{many} / 5 (at least 0.95)": ratio(found, many, "5 adapters"),
    }


def _mixed(model: torch.nn.Module, executor: Executor, rounds: int) -> dict[str, Any]:
    found = interleave(mixed_contenders(model, executor), rounds)
    return {
        "output_tokens_per_s": medians(found),
        "mixed / base (at least 0.9)": ratio(found, "mixed", "base"),
        "mixed / peft mixed (at least 5)": ratio(found, "mixed", "peft"),
        "mixed / base, r16": ratio(found, "mixed, r16", "base"),
        "mixed / peft mixed, r16": ratio(found, "mixed, r16", "peft, r16"),
    }


if __name__ == "__main__":
    main()
