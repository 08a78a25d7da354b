"""The papers' workloads, ready to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pcg.errors import BenchmarkError
from pcg.simulate.workloads.arrivals import Bursty, RateCurve
from pcg.simulate.workloads.lengths import SHAREGPT_OUTPUTS, SHAREGPT_PROMPTS, Between, Lengths
from pcg.simulate.workloads.popularity import PowerLaw, Skewed
from pcg.simulate.workloads.synthetic import assign_adapters, s_lora, synthetic
from pcg.simulate.workloads.workload import Workload


@dataclass(frozen=True)
class SLoraSetting:
    """A row of S-LoRA's table 2; input and output lengths are U[8, 512] in all of them.

    Attributes:
        adapters: n.
        rate_per_s: R, requests a second.
        exponent: α.
        cv: of the Gamma intervals.
    """

    adapters: int
    rate_per_s: float
    exponent: float = 1.0
    cv: float = 1.0


S_LORA_SETTINGS: Mapping[str, SLoraSetting] = MappingProxyType(
    {
        "7b-a10g": SLoraSetting(200, 2),
        "7b-a100-80": SLoraSetting(200, 10),
        "13b-a100-40": SLoraSetting(200, 2),
        "13b-a100-80": SLoraSetting(400, 6),
    }
)
S_LORA_LENGTHS = Between(8, 512)
S_LORA_TTFT_SLO_S = 6.0
"""First-token SLO of S-LoRA §7.1, seconds."""

FLEXLLM_TTFT_SLO_S = 5.0
FLEXLLM_TPOT_SLO_S: Mapping[str, float] = MappingProxyType(
    {"Llama-3.1-8B": 0.050, "Qwen2.5-14B": 0.075, "Qwen2.5-32B": 0.075}
)
"""SLOs of FlexLLM v2 §8 by model, seconds."""


def s_lora_preset(name: str, *, seed: int, duration_s: float = 300.0) -> Workload:
    """A workload of S-LoRA's table 2.

    Raises:
        BenchmarkError: there is no such setting.
    """
    setting = S_LORA_SETTINGS.get(name)
    if setting is None:
        raise BenchmarkError(f"no S-LoRA setting {name!r}; use {', '.join(S_LORA_SETTINGS)}")
    return s_lora(
        PowerLaw(setting.adapters, setting.exponent),
        setting.rate_per_s,
        setting.cv,
        S_LORA_LENGTHS,
        S_LORA_LENGTHS,
        seed=seed,
        duration_s=duration_s,
    )


def punica_hour(
    rate_per_s: float,
    *,
    seed: int,
    duration_s: float = 3600.0,
    prompts: Lengths = SHAREGPT_PROMPTS,
    outputs: Lengths = SHAREGPT_OUTPUTS,
) -> Workload:
    """Punica's hour on a cluster (§7.3): a rate that rises and falls, adapters Zipf-1.5.

    The paper shows the rate's curve and does not tell its numbers: here it rises from 0 to twice
    the mean at half-time and falls to 0, on straight lines.

    Args:
        rate_per_s: mean rate.
    """
    arrivals = RateCurve(rate_per_s, duration_s, (0.0, 1.0, 0.0))
    workload = synthetic(arrivals, prompts, outputs, seed=seed, duration_s=duration_s)
    return assign_adapters(workload, Skewed(1.5), seed=seed)


def flexllm(
    rate_per_s: float,
    cv: float,
    *,
    seed: int,
    duration_s: float = 1200.0,
    prompts: Lengths = SHAREGPT_PROMPTS,
    outputs: Lengths = SHAREGPT_OUTPUTS,
) -> Workload:
    """Inference beside finetuning as in FlexLLM v2 §8: twenty minutes of bursty arrivals.

    The paper replays parts of BurstGPT; `read_public_trace(…).part(…).at_rate(…)` does so where the
    file is at hand. This stands in for it.

    Args:
        rate_per_s: mean rate; 4 to 20 in the paper.
        cv: how much the rate varies; not a number of the paper.
    """
    arrivals = Bursty(rate_per_s, cv)
    return synthetic(arrivals, prompts, outputs, seed=seed, duration_s=duration_s)
