"""Compare rules of sharing in simulated time: what each trains at the same SLO attainment.

    python benchmarks/bench_sharing.py [--seconds 120] [--seeds 3]

The simulated engine with the costs of `bench_serving.py`'s model on a CPU, as its steps, windows
and backward units were measured (one thread of an AMD EPYC):

    step      15.4 ms + 0.64 ms a token + 0.4 µs a key + 0.8 ms a row of logits
              + 20 ms where there is a window + 1.5 ms a token of it
    unit      2.7 ms + 0.11 ms a token + 0.1 µs a key
    update    12 ms

The engine begins with latencies like those that it calibrates there, and learns. Requests are those
of `bench_serving.py`, and others with four times the output; the SLO is 60, 83 or 150 ms a token.
For each, co-serving against the best of temporal and spatial sharing that attains as much; then
larger bursts of co-serving against none, with what they cost.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from typing import Any

from measure import write

from pcg.parallel.costs.step_costs import StepShape
from pcg.runtime.engine.latency import Latencies, Latency
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.sharing import CoServing, Sharing, SpatialSharing, TemporalSharing
from pcg.runtime.metrics.metrics import ServingReport
from pcg.simulate.papers.s_lora import S_LORA_TTFT_SLO_S
from pcg.simulate.replay import replay
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.workloads.arrivals import Poisson
from pcg.simulate.workloads.lengths import Between, Fixed
from pcg.simulate.workloads.synthetic import synthetic

RATES = {32: (1.0, 2.9, 4.5), 128: (0.3, 0.8, 1.4)}
"""Requests a second, by the number of output tokens."""
PROMISES_S = (0.06, 0.083, 0.15)
BURSTS = (1, 2, 3, 4, 6)
OTHERS: Mapping[str, Callable[[], Sharing]] = {
    **{f"temporal, {n}": partial(TemporalSharing, n) for n in (16, 32, 64, 128)},
    **{f"spatial, {share}": partial(SpatialSharing, share) for share in (0.25, 0.5)},
}


class CpuCosts:
    """The costs of a CPU; see `pcg.parallel.costs.step_costs.StepCosts`."""

    layers = 8

    def step_seconds(self, shape: StepShape) -> float:
        of_window = 0.02 * (shape.trained > 0) + 1.5e-3 * shape.trained
        of_tokens = 6.4e-4 * shape.tokens + 4e-7 * shape.pairs
        return 0.0154 + of_tokens + 8e-4 * shape.sampled + of_window

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        return 0.0027 + 1.1e-4 * shape.tokens + 1e-7 * shape.pairs

    def update_seconds(self) -> float:
        return 0.012

    def copy_seconds(self, size_bytes: int) -> float:
        return 0.0


def served(
    rule: Sharing, rate_per_s: float, new: int, tpot_slo_s: float, seed: int, seconds: float
) -> ServingReport:
    """Simulate one rule under one load."""
    forward = Latency(0.0155, 7e-4, 4e-7, 7e-4, 1.4e-3, 0.013)
    latencies = Latencies(forward, Latency(0.002, 1.7e-4, 1e-7))
    limits = Limits(running=32, ttft_slo_s=S_LORA_TTFT_SLO_S, tpot_slo_s=tpot_slo_s)
    engine = SimulatedEngine(CpuCosts(), 20_000, 1, limits, latencies=latencies, sharing=rule)
    engine.finetune("trained", repeat((128, 128)))
    lengths = Between(16, 64), Fixed(new)
    workload = synthetic(Poisson(rate_per_s), *lengths, seed=seed, duration_s=seconds)
    return replay(engine, workload, {}, 32_000, wait=engine.clock.advance)


def row(reports: list[ServingReport]) -> dict[str, float]:
    """Return means over seeds, and the least attainment."""
    mean = statistics.fmean
    return {
        "finetuning_tokens_per_s": round(mean(r.finetuning_throughput for r in reports), 1),
        "slo_attainment": round(min(r.slo_attainment or 0.0 for r in reports), 4),
        "p99_itl_ms": round(1e3 * mean(r.itl.p99_s for r in reports if r.itl), 1),
        "p99_ttft_ms": round(1e3 * mean(r.ttft.p99_s for r in reports if r.ttft), 1),
    }


def main() -> None:
    """Simulate all loads and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()

    def of(rule: Callable[[], Sharing], rate: float, new: int, tpot_slo_s: float) -> dict[str, Any]:
        seeds = range(arguments.seeds)
        return row(
            [served(rule(), rate, new, tpot_slo_s, seed, arguments.seconds) for seed in seeds]
        )

    loads = []
    for new, rates in RATES.items():
        for tpot_slo_s in PROMISES_S:
            for rate in rates:
                own = of(CoServing, rate, new, tpot_slo_s)
                found = {name: of(rule, rate, new, tpot_slo_s) for name, rule in OTHERS.items()}
                as_good = {
                    name: other
                    for name, other in found.items()
                    if other["slo_attainment"] >= own["slo_attainment"]
                }
                load = {"requests_per_s": rate, "output_tokens": new, "tpot_slo_s": tpot_slo_s}
                loads.append({**load, "co-serving": own, **_against(own, as_good)})
                print(loads[-1], flush=True)
    bursts = {
        str(rate): {str(burst): of(partial(CoServing, burst), rate, 32, 0.083) for burst in BURSTS}
        for rate in RATES[32]
    }
    write("sharing", {"loads": loads, "bursts, 83 ms a token, by requests a second": bursts})


def _against(own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the best rule that attains as much, and co-serving against it; nothing if none."""
    if not others:
        return {"best": None}
    best = max(others, key=lambda name: others[name]["finetuning_tokens_per_s"])
    ratio = own["finetuning_tokens_per_s"] / others[best]["finetuning_tokens_per_s"]
    return {"best": {best: others[best]}, "against it": round(ratio, 3)}


if __name__ == "__main__":
    main()
