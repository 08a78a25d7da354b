"""Compare the simulator with the engine on this machine: the same requests and job.

    python benchmarks/bench_simulator.py [--requests 25] [--rate 2]

A random 8-layer Llama of hidden size 512 in fp32 on one thread serves Poisson arrivals and trains
an adapter beside them. First the engine runs other requests, of another seed, and its steps, units
and updates are noted; the simulated engine's costs are fitted to these
(`profiled_costs`), and it knows nothing of the run that it predicts. Both have the
same limits and pages, and begin to plan by the same latencies.

Time is the process's own, so that other work on the machine is not measured.

Reported, of both: TTFT, TPOT, finetuning tokens a second, and seconds to the last request's end.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable

import torch
from bench_generation import random_llama
from measure import write
from profiled_costs import ProfiledCosts, StepProfile

import pcg
from pcg.runtime.admission.latency import Latencies
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.device.calibration import calibrated
from pcg.runtime.executor import Executor
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types
from pcg.runtime.metrics.events import Event, Kind
from pcg.runtime.metrics.report import serving_report
from pcg.runtime.requests.request import Request
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.simulate.distributions import Between, Poisson
from pcg.simulate.simulated_engine import SimulatedEngine
from pcg.simulate.simulation import RoundRobin, Simulation
from pcg.simulate.synthetic import synthetic
from pcg.simulate.workload import Workload

LIMITS = Limits(ttft_slo_s=5.0, tpot_slo_s=0.3)
PAGES = 2048
TRAINED = 96
RECIPE = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


class ProcessClock:
    """A clock of the process's own time, without what else the machine does meanwhile."""

    def __init__(self) -> None:
        self._start = time.process_time()

    def now_s(self) -> float:
        return time.process_time() - self._start


def measured(events: Iterable[Event], end_s: float) -> dict[str, float]:
    """Return the numbers of one run."""
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
    """Run both and write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=25)
    parser.add_argument("--rate", type=float, default=2.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    executor = pcg.compile(random_llama().eval())
    model = executor.serving.runner.model

    def workload(seed: int) -> Workload:
        lengths = Between(16, 128), Between(16, 64)
        arrivals = Poisson(arguments.rate)
        return synthetic(arrivals, *lengths, seed=seed, requests=arguments.requests)

    profile = StepProfile()
    first = calibrated(executor.state, ProcessClock())
    run(executor, workload(1), "profiled", first, profile)
    costs = ProfiledCosts(profile, len(model.layers))
    page_bytes = bytes_of_page(kv_types(model))
    simulated = SimulatedEngine(costs, PAGES, page_bytes, LIMITS, latencies=costs.latencies())
    simulated.finetune("trained", [(TRAINED,)] * 10_000)
    foretold = measured(*_until_served(simulated, workload(0)))
    found = measured(*run(executor, workload(0), "trained", costs.latencies(), StepProfile()))
    ratios = {name: round(foretold[name] / found[name], 3) for name in found}
    noted = {"steps": len(profile.steps), "units": len(profile.units)}
    noted |= {"updates": len(profile.updates)}
    write(
        "simulator",
        {"noted": noted, "foretold": foretold, "measured": found, "foretold / measured": ratios},
    )


def run(
    executor: Executor,
    workload: Workload,
    job_name: str,
    latencies: Latencies,
    profile: StepProfile,
) -> tuple[list[Event], float]:
    """Serve a workload beside a job and note its steps; return events and seconds to the end."""
    page_bytes = bytes_of_page(kv_types(executor.serving.runner.model))
    engine = executor.engine(LIMITS, kv_cache_bytes=PAGES * page_bytes, latencies=latencies)
    ids = random.Random(0).choices(range(5, 30_000), k=TRAINED)
    job = engine.finetune(
        [Example(ids, ids)], job_name, peft=RECIPE, max_steps=10_000, batch_size=1, epochs=None
    )
    engine.clock = ProcessClock()
    device = profile.watch(engine, job)
    coming, left = list(workload), len(workload)
    while left:
        while coming and coming[0].time_s <= engine.clock.now_s():
            one = coming.pop(0)
            params = SamplingParams(max_new_tokens=one.output_tokens, ignore_eos=True)
            engine.submit(Request((7,) * one.prompt_tokens, params), one.time_s)
        left -= device.step(engine)
    end_s = engine.clock.now_s()
    engine.cancel_job(job_name)
    return [event for event in engine.log if event.time_s <= end_s], end_s


def _until_served(engine: SimulatedEngine, workload: Workload) -> tuple[tuple[Event, ...], float]:
    """Simulate to the end of the last request; the job goes on till then."""
    left = len(workload)

    def after(place: int) -> None:
        nonlocal left
        left = len(workload) - sum(event.kind is Kind.FINISHED for event in engine.log)
        if not left:
            engine.cancel_job("trained")

    events = Simulation([engine], RoundRobin(), on_step=after).run(workload)
    return events, engine.clock.now_s()


if __name__ == "__main__":
    main()
