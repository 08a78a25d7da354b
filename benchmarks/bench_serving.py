"""Measure serving and co-serving: thousands of adapters, mixed batches, finetuning beside them.

    python benchmarks/bench_serving.py [--rounds 3] [--adapters 2000] [--requests 64]
        [--seconds 30] [--parts throughput,mixed,co-serving,gaps]

Parts that are not asked for keep their place in the result file.

The model is a random 8-layer Llama of hidden size 512, on one thread in fp32. Adapters are LoRA on
q, k, v and o, as S-LoRA's, of ranks 8, 16, 32 and 64 in turn, all of them in memory. Contenders run
in turn in every round:

    2000 adapters, 5      requests at once over so many adapters (Zipf, α = 1), 32 of them running;
                          output tokens a second
    mixed, base, peft     64 prompts of 16 to 64 tokens on 64 of the adapters, on none, and peft's
                          generate(adapter_names=…) with left padding; output tokens a second
    …, r16                the same with 64 adapters of rank 16

Then co-serving by means (burst=4), at 0.3 of the rate that the engine serves at most (batches are
smaller then, and a request costs more), with the same requests for each rule of sharing and one job
that trains (LoRA r16 all-linear, 2 × 128 tokens a step):

    left      share of the time in which inference alone had nothing to run
    kept      finetuning tokens a second / (those of Executor.finetune alone · left)

The SLOs are a time per output token of four times a step of 8 sequences, and S-LoRA's 6 s to the
first token.

gaps: 4 requests a second, and a promise per gap of 1.5 times the median gap of inference alone,
which runs before and after the others: the machine is shared, and its own gaps exceed that, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from bench_generation import left_padded, random_llama
from measure import RESULTS, environment, interleave, medians, ratio, seconds
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import pcg
from pcg.runtime.data.example import Example
from pcg.runtime.engine.calibration import calibrated
from pcg.runtime.engine.clock import MachineClock
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.sharing import CoServing, Sharing, Step
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.metrics import ServingReport
from pcg.runtime.model.load import Load
from pcg.simulate.papers.s_lora import S_LORA_TTFT_SLO_S
from pcg.simulate.papers.sharing_rules import InferenceOnly, SpatialSharing, TemporalSharing
from pcg.simulate.replay import replay, train
from pcg.simulate.workloads.arrivals import Constant, Poisson
from pcg.simulate.workloads.lengths import Between, Fixed
from pcg.simulate.workloads.popularity import PowerLaw
from pcg.simulate.workloads.synthetic import assign_adapters, synthetic
from pcg.simulate.workloads.workload import Workload

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANKS = (8, 16, 32, 64)
MIXED = 64
NEW = 32
PARTS = ("throughput", "mixed", "co-serving", "gaps")
GAPS_RATE = 4.0
PROMISED = 1.5
"""The promise per gap, relative to the median gap of inference alone."""
IDLE_STEPS_S = (0.2, 0.8)
"""The most that steps last which serve nothing: the default, and one that hardly should matter."""
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


# --------------------------------------------------------------------------------- co-serving


RULES: Mapping[str, Callable[[], Sharing]] = {
    "inference alone": InferenceOnly,
    "co-serving": functools.partial(CoServing, 4),
    "temporal, 32": functools.partial(TemporalSharing, 32),
    "temporal, 128": functools.partial(TemporalSharing, 128),
    "spatial, 0.25": functools.partial(SpatialSharing, 0.25),
    "spatial, 0.5": functools.partial(SpatialSharing, 0.5),
}


def capacity(executor: Executor) -> float:
    """Return the most requests a second that the engine serves."""
    workload = synthetic(Constant(1e6), PROMPTS, Fixed(NEW), seed=1, requests=64)
    workload = assign_adapters(workload, PowerLaw(8, 1.0), seed=1)
    engine = executor.engine(Limits(running=32), kv_cache_bytes=KV_CACHE_BYTES)
    return served(engine, workload).request_throughput


def examples() -> list[Example]:
    """Return examples of 128 random tokens each."""
    drawn = random.Random(2)
    rows = [[drawn.randrange(5, 31000) for _ in range(128)] for _ in range(64)]
    return [Example(row, row) for row in rows]


def training(engine: Engine) -> None:
    """Give an engine a job that does not end."""
    engine.finetune(examples(), "trained", peft=JOB, max_steps=100_000, batch_size=2)


def alone_tokens_per_s(executor: Executor) -> float:
    """Return tokens a second of finetuning alone: whole batches, after a step that compiles."""
    for steps in (1, 16):
        options = {"max_steps": steps, "batch_size": 2, "progress": False}
        result = executor.finetune(examples(), "alone", peft=JOB, **options)
    executor.remove_adapter("alone")
    return result.tokens / result.seconds


def timed_steps(engine: Engine) -> list[float]:
    """Return a list that gets the seconds of each step that runs something, from now on."""
    took: list[float] = []
    step = engine.step

    def timed() -> Any:
        started = time.perf_counter()
        chunks = step()
        if engine.worked:
            took.append(time.perf_counter() - started)
        return chunks

    engine.step = timed  # type: ignore[method-assign]
    return took


def co_serving(executor: Executor, duration_s: float) -> dict[str, Any]:
    """Measure every rule of sharing under the same requests."""
    rate_per_s = 0.3 * capacity(executor)
    measured = calibrated(executor.state, MachineClock())
    tpot_slo_s = 4 * measured.forward.seconds(Load(8, 8 * 64, sampled=8))
    limits = Limits(running=32, ttft_slo_s=S_LORA_TTFT_SLO_S, tpot_slo_s=tpot_slo_s)
    workload = synthetic(Poisson(rate_per_s), PROMPTS, Fixed(NEW), seed=3, duration_s=duration_s)
    workload = assign_adapters(workload, PowerLaw(8, 1.0), seed=3)

    def engine_of(rule: Sharing) -> Engine:
        return executor.engine(limits, kv_cache_bytes=KV_CACHE_BYTES, sharing=rule)

    alone = alone_tokens_per_s(executor)
    engine = engine_of(CoServing(4))
    training(engine)
    train(engine, min(5.0, duration_s))  # compiles
    in_engine = train(engine, duration_s).finetuning_throughput
    engine.cancel_job("trained")
    print(f"  finetuning alone {alone:.1f} tokens/s", file=sys.stderr)
    found: dict[str, Any] = {}
    left = 0.0
    for name, rule in RULES.items():
        engine = engine_of(rule())
        if engine.sharing.trains:
            training(engine)
        took = timed_steps(engine)
        report = served(engine, workload)
        if engine.sharing.trains:
            engine.cancel_job("trained")
        else:
            left = max(0.0, 1 - sum(took) / report.duration_s)
        found[name] = _row(report, alone * left)
        print(f"  {name:<16} {found[name]}", file=sys.stderr)
    return {
        "requests_per_s": round(rate_per_s, 2),
        "requests": len(workload),
        "tpot_slo_ms": round(1e3 * tpot_slo_s, 1),
        "ttft_slo_ms": 1e3 * S_LORA_TTFT_SLO_S,
        "finetuning alone, tokens/s": round(alone, 1),
        "… by the engine without requests, in steps of 0.2 s": round(in_engine, 1),
        "left (share of the time)": round(left, 3),
        "rules": found,
        "kept (at least 0.8)": found["co-serving"]["kept"],
        "attainment (at least 0.99 where inference alone has it)": found["co-serving"][
            "slo_attainment"
        ],
        "against the best at equal attainment (above 1)": _against_best(found),
    }


class _Waiting(CoServing):
    """Co-serving where requests wait for the ends of steps that serve nothing."""

    def begin(self, step: Step) -> None:
        step.awaited = None
        super().begin(step)


def gaps(executor: Executor, duration_s: float) -> dict[str, Any]:
    """Measure which gaps are kept, and what is trained, under a promise per gap."""
    workload = synthetic(Poisson(GAPS_RATE), PROMPTS, Fixed(NEW), seed=3, duration_s=duration_s)
    workload = assign_adapters(workload, PowerLaw(8, 1.0), seed=3)

    def run(
        rule: Sharing, tpot_slo_s: float | None, idle_step_s: float = IDLE_STEPS_S[0]
    ) -> ServingReport:
        limits = Limits(
            running=32,
            ttft_slo_s=S_LORA_TTFT_SLO_S,
            tpot_slo_s=tpot_slo_s,
            idle_step_s=idle_step_s,
        )
        engine = executor.engine(limits, kv_cache_bytes=KV_CACHE_BYTES, sharing=rule)
        if rule.trains:
            training(engine)
            train(engine, min(5.0, duration_s))  # compiles
        report = served(engine, workload)
        if rule.trains:
            engine.cancel_job("trained")
        return report

    alone = run(InferenceOnly(), None)
    assert alone.itl is not None
    tpot_slo_s = PROMISED * alone.itl.median_s
    default_s, long_s = IDLE_STEPS_S
    rules: dict[str, tuple[Callable[[], Sharing], float]] = {
        "inference alone": (InferenceOnly, default_s),
        "co-serving": (CoServing, default_s),
        "… requests wait for idle steps": (_Waiting, default_s),
        f"co-serving, idle steps of {long_s} s": (CoServing, long_s),
        f"… requests wait for idle steps of {long_s} s": (_Waiting, long_s),
        "inference alone, again": (InferenceOnly, default_s),
    }
    found = {}
    for name, (rule, idle_step_s) in rules.items():
        found[name] = _row(run(rule(), tpot_slo_s, idle_step_s), 0.0)
        print(f"  {name:<24} {found[name]}", file=sys.stderr)
    return {
        "requests_per_s": GAPS_RATE,
        "step_of_inference_alone_ms": round(1e3 * alone.itl.median_s, 2),
        "promised_gap_ms": round(1e3 * tpot_slo_s, 2),
        "rules": found,
    }


def _row(report: ServingReport, most: float) -> dict[str, Any]:
    tpot, ttft, itl = report.tpot, report.ttft, report.itl
    return {
        "finetuning_tokens_per_s": round(report.finetuning_throughput, 1),
        "kept": round(report.finetuning_throughput / most, 3) if most else None,
        "slo_attainment": report.slo_attainment,
        "gap_attainment": report.gap_attainment,
        "p99_tpot_ms": None if tpot is None else round(1e3 * tpot.p99_s, 1),
        "p99_ttft_ms": None if ttft is None else round(1e3 * ttft.p99_s, 1),
        "p99_itl_ms": None if itl is None else round(1e3 * itl.p99_s, 1),
        "output_tokens_per_s": round(report.output_throughput, 1),
    }


def _against_best(found: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return finetuning against the best rule that attains as much; None if none does."""
    own = found["co-serving"]
    rates = [
        row["finetuning_tokens_per_s"]
        for name, row in found.items()
        if name.startswith(("temporal", "spatial"))
        and row["slo_attainment"] >= own["slo_attainment"]
    ]
    if not rates or not max(rates):
        return None
    return round(own["finetuning_tokens_per_s"] / max(rates), 3)


def main() -> None:
    """Run all parts and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
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
        "co-serving": lambda: co_serving(executor, arguments.seconds),
        "gaps": lambda: gaps(executor, arguments.seconds),
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
