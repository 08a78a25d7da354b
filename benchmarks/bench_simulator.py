"""The simulator against the engine on this machine: the same requests and job, foretold and run.

    python benchmarks/bench_simulator.py [--requests 40] [--rate 3]

A random 8-layer Llama of hidden size 512 in fp32 on one thread serves Poisson arrivals and trains
an adapter beside them. The simulated engine has the same limits and pages, and takes what the
engine measured of three steps before it began (`pcg.runtime.engine.calibration`): nothing of the
run itself.

Reported, of both: TTFT, TPOT, finetuning tokens a second, and seconds to the last request's end.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Iterable

import torch
from bench_generation import random_llama
from measure import write

import pcg
from pcg.parallel.step_costs import StepShape
from pcg.runtime.data import Example
from pcg.runtime.engine.calibration import calibrated
from pcg.runtime.engine.clock import MachineClock
from pcg.runtime.engine.engine import Latencies
from pcg.runtime.engine.events import Event, Kind
from pcg.runtime.engine.latency import Load
from pcg.runtime.engine.metrics import serving_report
from pcg.runtime.engine.request import Request
from pcg.runtime.engine.scheduler import Limits
from pcg.runtime.engine.simulated_engine import SimulatedEngine
from pcg.runtime.engine.simulation import Simulation, TakingTurns
from pcg.runtime.kv_cache import bytes_of_page, kv_types
from pcg.runtime.sampling_params import SamplingParams
from pcg.runtime.workloads.arrivals import Poisson
from pcg.runtime.workloads.lengths import Between
from pcg.runtime.workloads.synthetic import synthetic
from pcg.runtime.workloads.workload import Workload

LIMITS = Limits(ttft_slo_s=5.0, tpot_slo_s=0.3)
PAGES = 2048
TRAINED = 96
RECIPE = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


class MeasuredCosts:
    """What three steps on this machine took, of any step; see `StepCosts`.

    Args:
        latencies: of them.
        layers: of the model.
    """

    def __init__(self, latencies: Latencies, layers: int) -> None:
        self.layers = layers
        self._latencies = copy.deepcopy(latencies)

    def step_seconds(self, shape: StepShape) -> float:
        return self._latencies.forward.seconds(Load(shape.tokens, shape.pairs))

    def backward_seconds(self, layer: int, shape: StepShape) -> float:
        return self._latencies.backward.seconds(Load(shape.tokens, shape.pairs))

    def update_seconds(self) -> float:
        return 0.0

    def copy_seconds(self, size_bytes: int) -> float:
        return 0.0


def measured(events: Iterable[Event], end_s: float) -> dict[str, float]:
    """The numbers of one run."""
    report = serving_report(events, start_s=0.0, end_s=end_s)
    assert report.ttft is not None
    assert report.tpot is not None
    return {
        "mean_ttft_s": round(report.ttft.mean_s, 4),
        "mean_tpot_s": round(report.tpot.mean_s, 4),
        "finetuning_tokens_per_s": round(report.finetuning_throughput, 1),
        "seconds": round(end_s, 2),
    }


def main() -> None:
    """Run both and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=3.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    executor = pcg.compile(random_llama().eval())
    runner, stacks = executor.serving
    latencies = calibrated(runner, stacks, executor.device, executor.max_positions, MachineClock())
    layers = len(runner.model.layers)
    workload = synthetic(
        Poisson(arguments.rate),
        Between(16, 128),
        Between(16, 64),
        seed=0,
        requests=arguments.requests,
    )
    page_bytes = bytes_of_page(kv_types(runner.model))
    simulated = SimulatedEngine(
        MeasuredCosts(latencies, layers),
        PAGES,
        page_bytes,
        LIMITS,
        latencies=copy.deepcopy(latencies),
    )
    simulated.finetune("trained", [(TRAINED,)] * 10_000)
    events, end_s = _until_served(simulated, workload)
    foretold = measured(events, end_s)

    engine = executor.engine(LIMITS, kv_cache_bytes=PAGES * page_bytes, latencies=latencies)
    ids = random.Random(0).choices(range(5, 30_000), k=TRAINED)
    engine.finetune(
        [Example(ids, ids)], "trained", peft=RECIPE, max_steps=10_000, batch_size=1, epochs=None
    )
    coming, left = list(workload), len(workload)
    started = engine.clock.now_s()
    while left:
        while coming and coming[0].time_s <= engine.clock.now_s() - started:
            one = coming.pop(0)
            params = SamplingParams(max_new_tokens=one.output_tokens, ignore_eos=True)
            came_s = started + one.time_s
            engine.submit(Request((7,) * one.prompt_tokens, params), came_s)
        left -= sum(chunk.completion is not None for chunk in engine.step())
    end_s = engine.clock.now_s() - started
    moved = [Event(max(0.0, e.time_s - started), e.kind, e.subject, e.details) for e in engine.log]
    found = measured(moved, end_s)
    ratios = {name: round(foretold[name] / found[name], 3) for name in found}
    write(
        "simulator",
        {"foretold": foretold, "measured": found, "foretold / measured": ratios},
    )


def _until_served(engine: SimulatedEngine, workload: Workload) -> tuple[tuple[Event, ...], float]:
    """Simulate to the end of the last request; the job goes on till then."""
    left = len(workload)

    def after(place: int) -> None:
        nonlocal left
        left = len(workload) - sum(event.kind is Kind.FINISHED for event in engine.log)
        if not left:
            engine.cancel_job("trained")

    events = Simulation([engine], TakingTurns(), on_step=after).run(workload)
    return events, engine.clock.now_s()


if __name__ == "__main__":
    main()
