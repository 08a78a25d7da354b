"""Compare rules of sharing in simulated time: the finetuning of each, and the gaps that it keeps.

    python benchmarks/bench_sharing.py [--seconds 120] [--seeds 3] [--parts gpu,loads,numbers]

Parts that are not asked for keep their place in the result file.

gpu: Llama-3.1-8B on a simulated A100 of 80 GB with FlexLLM's job (LoRA r16 at the down
projections), in sequences of 2,048 tokens, under its bursty requests and at loads of 1 to 3 %.
First inference alone, without a promise; then a gap of 1.5 and of 3 times the median of its gaps is
promised, to one job and to three. "of idle" is relative to the tokens that a job by itself trains
in the time that inference alone leaves idle, "of alone" to all of the time.

loads: the simulated engine with the costs of `bench_serving.py`'s model on a CPU, as its steps,
windows and parts were measured (one thread of an AMD EPYC):

    step      15.4 ms + 0.64 ms a token + 0.4 µs a key + 0.8 ms a row of logits
              + 1 ms where there is a window
    layer     back 2.7 ms + 0.11 ms a token + 0.1 µs a key; forward half of it
    loss      0.5 ms + 1 ms a token
    update    12 ms

The engine begins with latencies like those that it calibrates there, and learns. Requests are those
of `bench_serving.py`, and others with four times the output; the SLO is 60, 83 or 150 ms a token.
For each load, co-serving against the best of temporal and spatial sharing that keeps at least 99 %
of the gaps.

numbers: each tuned number of the rule and of the latencies, halved and doubled: tokens that are
trained under these loads, with an SLO of 83 ms and with none, relative to those of the number as it
is, and the gaps kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from typing import Any

from measure import RESULTS, write

from pcg.parallel.costs.step_costs import StepShape
from pcg.runtime.admission import latency
from pcg.runtime.admission.latency import Latencies, Latency
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.scheduling import co_serving
from pcg.runtime.engine.scheduling.co_serving import CoServing
from pcg.runtime.engine.scheduling.work import Sharing
from pcg.runtime.metrics.events import Kind
from pcg.runtime.metrics.report import ServingReport, Slo, serving_report
from pcg.simulate import flexllm
from pcg.simulate.distributions import Between, Fixed, Poisson
from pcg.simulate.flexllm import InferenceOnly, SpatialSharing, TemporalSharing
from pcg.simulate.replay import replay
from pcg.simulate.s_lora import S_LORA_TTFT_SLO_S
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.simulated_program import SimulatedProgram
from pcg.simulate.simulation import RoundRobin, Simulation
from pcg.simulate.synthetic import synthetic

RATES = {32: (1.0, 2.9, 4.5), 128: (0.3, 0.8, 1.4)}
"""Requests a second, by the number of output tokens."""
PROMISES_S = (0.06, 0.083, 0.15)
GPU_RATES = (0.01, 0.03, 1.0, 3.0, 5.0, 8.0)
PROMISED = (1.5, 3.0)
"""Promises per gap, relative to the median gap of inference alone."""
TRAINED_TOKENS = 2048
KEPT = 0.99
PARTS = ("gpu", "loads", "numbers")
TUNED = {
    co_serving: ("_STRETCH", "_PIECE", "_ROOMS", "_RATIO"),
    latency: ("_FORGET", "_NOISE", "_MOST_ERROR", "_UPDATE", "_RATE", "_MOST_RESERVE"),
}
"""The numbers of each module; those near 1, by their distance from it."""
OTHERS: Mapping[str, Callable[[], Sharing]] = {
    **{f"temporal, {n}": partial(TemporalSharing, n) for n in (16, 32, 64, 128)},
    **{f"spatial, {share}": partial(SpatialSharing, share) for share in (0.25, 0.5)},
}


class CpuCosts:
    """The costs of a CPU; see `pcg.parallel.costs.step_costs.StepCosts`."""

    layers = 8

    def step_seconds(self, shape: StepShape) -> float:
        of_window = 1e-3 * (shape.trained > 0)
        of_tokens = 6.4e-4 * shape.tokens + 4e-7 * shape.pairs
        return 0.0154 + of_tokens + 8e-4 * shape.sampled + of_window

    def layer_seconds(self, layer: int, shape: StepShape) -> float:
        return self.backward_seconds(layer, shape) / 2

    def loss_seconds(self, tokens: int) -> float:
        return 0.0005 + 1.0e-3 * tokens

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        return 0.0027 + 1.1e-4 * shape.tokens + 1e-7 * shape.pairs

    def update_seconds(self) -> float:
        return 0.012

    def copy_seconds(self, size_bytes: int) -> float:
        return 0.0


def served(
    rule: Sharing, rate_per_s: float, new: int, tpot_slo_s: float | None, seed: int, seconds: float
) -> ServingReport:
    """Simulate one rule under one load."""
    forward = Latency(0.0155, 7e-4, 4e-7, 7e-4, 1.8e-4, 0.004)
    latencies = Latencies(forward, Latency(0.002, 1.7e-4, 1e-7), Latency(0.0, 1.4e-3, 0.0))
    limits = Limits(running=32, ttft_slo_s=S_LORA_TTFT_SLO_S, tpot_slo_s=tpot_slo_s)
    engine = SimulatedEngine(CpuCosts(), 20_000, 1, limits, latencies=latencies, sharing=rule)
    engine.finetune("trained", repeat((128, 128)))
    lengths = Between(16, 64), Fixed(new)
    workload = synthetic(Poisson(rate_per_s), *lengths, seed=seed, duration_s=seconds)
    return replay(engine, workload, {}, 32_000, wait=engine.clock.advance)


def served_on_gpu(
    program: SimulatedProgram, rule: Sharing, rate_per_s: float, tpot_slo_s: float | None, *,
    seed: int, seconds: float, jobs: int = 1,
) -> tuple[SimulatedEngine, ServingReport]:  # fmt: skip
    """Simulate one rule under FlexLLM's requests on one GPU."""
    limits = Limits(ttft_slo_s=flexllm.TTFT_SLO_S, tpot_slo_s=tpot_slo_s)
    engine = program.engine(limits, sharing=rule)
    for job in range(jobs if rule.trains else 0):
        engine.finetune(f"trained {job}", repeat((TRAINED_TOKENS,)))
    workload = flexllm.bursty_workload(rate_per_s, seed=seed, duration_s=seconds)
    workload = workload.at_rate(rate_per_s)
    events = Simulation([engine], RoundRobin()).run(workload, workload.duration_s)
    slo = Slo(flexllm.TTFT_SLO_S, tpot_slo_s)
    return engine, serving_report(events, slo, start_s=0.0, end_s=workload.duration_s)


def trained(engine: SimulatedEngine) -> float:
    """Return the tokens that jobs trained per second."""
    tokens = sum(e.details["tokens"] for e in engine.log if e.kind is Kind.STEPPED)
    return tokens / engine.clock.now_s()


def on_gpu(seeds: int, seconds: float) -> list[dict[str, Any]]:
    """Return the finetuning of co-serving by requests a second, promise and jobs."""
    program = flexllm.co_serving_program(flexllm.MODELS[0])
    engine = program.engine(Limits(), sharing=CoServing())
    engine.finetune("trained", repeat((TRAINED_TOKENS,)))
    while engine.clock.now_s() < seconds:
        engine.step()
    by_itself = trained(engine)
    rows = []
    for rate in GPU_RATES:
        found = [
            served_on_gpu(program, InferenceOnly(), rate, None, seed=seed, seconds=seconds)
            for seed in range(seeds)
        ]
        idle = statistics.fmean(1 - e.device.busy_s / e.clock.now_s() for e, _ in found)
        step_s = statistics.fmean(r.itl.median_s for _, r in found if r.itl)
        for promised in PROMISED:
            for jobs in (1, 3):
                served = [
                    served_on_gpu(
                        program, CoServing(), rate, promised * step_s, seed=seed,
                        seconds=seconds, jobs=jobs,
                    )
                    for seed in range(seeds)
                ]  # fmt: skip
                tokens = statistics.fmean(trained(engine) for engine, _ in served)
                rows.append(
                    {
                        "requests_per_s": rate,
                        "promise": promised,
                        "promised_gap_ms": round(1e3 * promised * step_s, 2),
                        "jobs": jobs,
                        "idle_of_inference_alone": round(idle, 4),
                        **row([report for _, report in served]),
                        "of alone": round(tokens / by_itself, 3),
                        "of idle": round(tokens / by_itself / idle, 3) if idle > 0.01 else None,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def numbers(seconds: float) -> list[dict[str, Any]]:
    """Return what halving and doubling each tuned number changes."""
    loads = [
        (rate, new, slo) for new, rates in RATES.items() for rate in rates for slo in (0.083, None)
    ]

    def reports() -> list[ServingReport]:
        return [served(CoServing(), *load, seed=0, seconds=seconds) for load in loads]

    before, rows = reports(), []
    for module, names in TUNED.items():
        for name in names:
            value = getattr(module, name)
            from_1 = name in ("_RATIO", "_FORGET")
            for factor in (0.5, 2.0):
                other = 1 + factor * (value - 1) if from_1 else type(value)(factor * value)
                setattr(module, name, other)
                found = reports()
                setattr(module, name, value)
                ratios = [
                    one.finetuning_throughput / old.finetuning_throughput
                    for one, old in zip(found, before, strict=True)
                ]
                kept = [one.gap_attainment for one in found if one.gap_attainment is not None]
                rows.append(
                    {
                        "number": f"{module.__name__.rpartition('.')[2]}.{name}",
                        "from": value,
                        "to": other,
                        "tokens": round(statistics.geometric_mean(ratios), 3),
                        "tokens, least": round(min(ratios), 3),
                        "gap_attainment": round(min(kept), 4),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def row(reports: list[ServingReport]) -> dict[str, float]:
    """Return means over seeds, and the least attainment."""
    mean = statistics.fmean
    return {
        "finetuning_tokens_per_s": round(mean(r.finetuning_throughput for r in reports), 1),
        "slo_attainment": round(min(r.slo_attainment or 0.0 for r in reports), 4),
        "gap_attainment": round(min(r.gap_attainment or 0.0 for r in reports), 4),
        "p99_itl_ms": round(1e3 * mean(r.itl.p99_s for r in reports if r.itl), 1),
        "p99_ttft_ms": round(1e3 * mean(r.ttft.p99_s for r in reports if r.ttft), 1),
    }


def main() -> None:
    """Simulate all loads and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()

    def of(rule: Callable[[], Sharing], rate: float, new: int, tpot_slo_s: float) -> dict[str, Any]:
        seeds = range(arguments.seeds)
        return row(
            [served(rule(), rate, new, tpot_slo_s, seed, arguments.seconds) for seed in seeds]
        )

    def all_loads() -> list[dict[str, Any]]:
        loads = []
        for new, rates in RATES.items():
            for tpot_slo_s in PROMISES_S:
                for rate in rates:
                    gaps = of(CoServing, rate, new, tpot_slo_s)
                    found = {name: of(rule, rate, new, tpot_slo_s) for name, rule in OTHERS.items()}
                    load = {"requests_per_s": rate, "output_tokens": new, "tpot_slo_s": tpot_slo_s}
                    by_gaps = _against(gaps, found, "gap_attainment", KEPT)
                    loads.append({**load, **by_gaps})
                    print(loads[-1], flush=True)
        return loads

    made: dict[str, Callable[[], Any]] = {
        "gpu": lambda: on_gpu(arguments.seeds, arguments.seconds),
        "loads": all_loads,
        "numbers": lambda: numbers(arguments.seconds),
    }
    before = RESULTS / "sharing.json"
    result = json.loads(before.read_text()) if before.exists() else {}
    for part in arguments.parts.split(","):
        result[part] = made[part]()
    write("sharing", {part: result[part] for part in PARTS if part in result})


def _against(
    own: Mapping[str, float], others: Mapping[str, Mapping[str, float]], name: str, least: float
) -> dict[str, Any]:
    """Return a rule with the best of others that attain so much, and their ratio; null if none."""
    others = {rule: other for rule, other in others.items() if other[name] >= least}
    if not others:
        return {**own, "best other": None}
    best = max(others, key=lambda rule: others[rule]["finetuning_tokens_per_s"])
    ratio = own["finetuning_tokens_per_s"] / others[best]["finetuning_tokens_per_s"]
    return {**own, "best other": {best: others[best]}, "against it": round(ratio, 3)}


if __name__ == "__main__":
    main()
