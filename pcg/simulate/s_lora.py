"""S-LoRA §7.2, table 3: throughput over the number of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pcg.errors import BenchmarkError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.metrics.report import ServingReport, Slo, serving_report
from pcg.simulate.distributions import Between, PowerLaw
from pcg.simulate.simulated_program import SimulatedProgram, simulated_program
from pcg.simulate.simulation import RoundRobin, Simulation
from pcg.simulate.synthetic import s_lora

S_LORA_LENGTHS = Between(8, 512)
S_LORA_TTFT_SLO_S = 6.0
"""The first-token SLO of S-LoRA §7.1, seconds."""


@dataclass(frozen=True)
class ManyAdapters:
    """A row of S-LoRA's table 1, and its requests a second in table 3.

    Attributes:
        ranks: the adapters' ranks, in turn.
        paper: requests a second by the number of adapters.
    """

    model: str
    ranks: tuple[int, ...]
    paper: Mapping[int, float]


S_LORA_MODELS: Mapping[str, ManyAdapters] = MappingProxyType(
    {
        "S1": ManyAdapters(
            "huggyllama/llama-7b",
            (8,),
            MappingProxyType({5: 8.05, 100: 7.99, 1000: 7.64, 2000: 7.61}),
        ),
        "S2": ManyAdapters(
            "huggyllama/llama-7b",
            (64, 32, 16, 8),
            MappingProxyType({5: 7.48, 100: 7.29, 1000: 6.69, 2000: 6.71}),
        ),
        "S4": ManyAdapters(
            "huggyllama/llama-13b",
            (64, 32, 16),
            MappingProxyType({2: 4.49, 100: 4.28, 1000: 3.96}),
        ),
    }
)
S_LORA_RATES_PER_S = MappingProxyType({"S1": 10.0, "S2": 10.0, "S4": 6.0})
"""The rates of table 2, on an A100 of 80 GB."""


def many_adapters_program(name: str) -> SimulatedProgram:
    """Return a model of table 3 on a single A100 of 80 GB, with adapters at q, k, v and o.

    Raises:
        BenchmarkError: no setting has the name.
    """
    if name not in S_LORA_MODELS:
        raise BenchmarkError(f"no S-LoRA setting {name!r}; use {', '.join(S_LORA_MODELS)}")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    return simulated_program(S_LORA_MODELS[name].model, "A100-80", targets=targets)


def many_adapters(
    program: SimulatedProgram,
    name: str,
    adapters: int,
    *,
    rate_per_s: float | None = None,
    seed: int = 0,
    duration_s: float = 300.0,
) -> ServingReport:
    """Serve requests for many adapters, each to its end.

    Args:
        rate_per_s: the rate of the requests; table 2's by default.
        duration_s: the duration of the workload; five minutes in the paper.
    """
    setting = S_LORA_MODELS[name]
    workload = s_lora(
        PowerLaw(adapters, 1.0),
        S_LORA_RATES_PER_S[name] if rate_per_s is None else rate_per_s,
        1.0,
        S_LORA_LENGTHS,
        S_LORA_LENGTHS,
        seed=seed,
        duration_s=duration_s,
    )
    ranks = setting.ranks
    held = {
        f"adapter-{i}": program.adapter(f"adapter-{i}", ranks[i % len(ranks)])
        for i in range(adapters)
    }
    simulation = Simulation([program.engine(Limits())], RoundRobin(), held)
    events = simulation.run(workload)
    return serving_report(events, Slo(S_LORA_TTFT_SLO_S), start_s=0.0)
