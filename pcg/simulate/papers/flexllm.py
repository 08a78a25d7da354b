"""FlexLLM v2 §8.1 and §8.2, figures 10 and 11: finetuning beside inference, four pipelines.

co-serving     FlexLLM's own                                                    both figures
temporal-n     n steps that serve, then one mini-batch (§8.2)                   figure 11
spatial-p      p hundredths of the time are finetuning's (§8.2)                 figure 11
separate-p     p hundredths of the pipelines serve, the others train (§8.1)     figure 10
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from types import MappingProxyType

from pcg.errors import BenchmarkError
from pcg.runtime.engine.limits import Limits
from pcg.runtime.engine.sharing import (
    CoServing,
    InferenceOnly,
    Sharing,
    SpatialSharing,
    TemporalSharing,
)
from pcg.runtime.metrics.metrics import ServingReport, serving_report
from pcg.runtime.metrics.timelines import Slo
from pcg.simulate.simulated_program import SimulatedProgram, simulated_program
from pcg.simulate.simulation import RoundRobin, SeparateInstances, Simulation
from pcg.simulate.workloads.lengths import (
    SHAREGPT_FIRST_OUTPUTS,
    SHAREGPT_FIRST_PROMPTS,
    Lengths,
)
from pcg.simulate.workloads.presets import FLEXLLM_TPOT_SLO_S, FLEXLLM_TTFT_SLO_S, flexllm

PIPELINES = 4
RATES = (4.0, 8.0, 12.0, 16.0, 20.0)
TRAINED_TOKENS = 8192
"""Where sequences of the reasoning data set are cut; all are taken to be so long."""


@dataclass(frozen=True)
class CoServed:
    """A model of FlexLLM v2 §8.

    Attributes:
        model: its id.
        tp: GPUs of a pipeline, A100s of 80 GB.
        paper: finetuning tokens a second of all pipelines, by arrangement and requests a second, as
            the text of §8.1 has them.
    """

    model: str
    tp: int
    paper: Mapping[tuple[str, float], float]

    @property
    def name(self) -> str:
        """Without its owner."""
        return self.model.partition("/")[2]


def _paper(light: float, heavy: float, separate: float) -> Mapping[tuple[str, float], float]:
    found = {("co-serving", 4.0): light, ("co-serving", 20.0): heavy}
    return MappingProxyType({**found, ("separate-75", 20.0): separate})


MODELS = (
    CoServed("meta-llama/Llama-3.1-8B", 1, _paper(9400.0, 7200.0, 3800.0)),
    CoServed("Qwen/Qwen2.5-14B", 2, _paper(3700.0, 2200.0, 1000.0)),
    CoServed("Qwen/Qwen2.5-32B", 4, _paper(3200.0, 2200.0, 500.0)),
)


@dataclass(frozen=True)
class Arrangement:
    """How pipelines share serving and finetuning.

    Attributes:
        sharing: the rule of a pipeline that has both.
        serving: pipelines that serve; where these are not all, the others alone train.
    """

    sharing: Callable[[], Sharing] = CoServing
    serving: int = PIPELINES

    @property
    def is_separate(self) -> bool:
        """Whether no pipeline does both."""
        return self.serving < PIPELINES


ARRANGEMENTS: Mapping[str, Arrangement] = MappingProxyType(
    {
        "co-serving": Arrangement(),
        **{f"temporal-{n}": Arrangement(partial(TemporalSharing, n)) for n in (64, 128, 512)},
        "spatial-25": Arrangement(partial(SpatialSharing, 0.25)),
        "spatial-50": Arrangement(partial(SpatialSharing, 0.5)),
        "separate-25": Arrangement(serving=1),
        "separate-50": Arrangement(serving=2),
        "separate-75": Arrangement(serving=3),
        "inference-only": Arrangement(InferenceOnly),
    }
)
"""By name. The shares of spatial sharing are not in the paper."""


def co_serving_program(setting: CoServed, product_share: float | None = None) -> SimulatedProgram:
    """The model of a setting, with LoRA of rank 16 at its down projections.

    Args:
        setting: model and machine.
        product_share: of the device's peak, that products reach; as for `simulated_program`.
    """
    return simulated_program(
        setting.model,
        "A100-80",
        tp=setting.tp,
        targets=("down_proj",),
        finetuning_tokens=TRAINED_TOKENS,
        product_share=product_share,
    )


def fitted_share(setting: CoServed, *, seed: int = 0, duration_s: float = 240.0) -> float:
    """The share of the peak at which co-serving trains what the paper says at its lowest rate.

    One number of the paper's is taken for it; what comes of all other rates and arrangements can be
    held against the paper. Throughput is nearly in proportion to the share, so that a few
    corrections find it.

    Args:
        setting: model and machine.
        seed: of the workload.
        duration_s: of it.
    Returns:
        A share whose throughput is within 2 % of the paper's, or within a mini-batch of each
        pipeline: throughput counts whole ones.
    Raises:
        BenchmarkError: none is found.
    """
    wanted, share = setting.paper["co-serving", RATES[0]], 0.5
    near = max(0.02 * wanted, PIPELINES * TRAINED_TOKENS / duration_s)
    for _ in range(8):
        program = co_serving_program(setting, share)
        report = co_serving(program, setting, RATES[0], seed=seed, duration_s=duration_s)
        found = report.finetuning_throughput
        if abs(found - wanted) <= near:
            return share
        share = min(share * wanted / max(found, 0.1 * wanted), 1.0)
    raise BenchmarkError(
        f"{setting.name} trains on {found:.0f} tokens/s at a share of {share:.3f}, and no share "
        f"brings it to {wanted:.0f}; simulate a longer duration"
    )


def co_serving(
    program: SimulatedProgram,
    setting: CoServed,
    rate_per_s: float,
    *,
    arrangement: str = "co-serving",
    seed: int = 0,
    duration_s: float = 1200.0,
    cv: float = 0.5,
    prompts: Lengths = SHAREGPT_FIRST_PROMPTS,
    outputs: Lengths = SHAREGPT_FIRST_OUTPUTS,
) -> ServingReport:
    """Serve the base model and train an adapter on each of four pipelines.

    Args:
        program: of the setting.
        setting: model and machine.
        rate_per_s: of all pipelines; arrivals are stretched or pressed to it, as the paper's are.
        arrangement: of the pipelines, of `ARRANGEMENTS`.
        seed: of the workload.
        duration_s: of the arrivals before they are; twenty minutes in the paper.
        cv: of the arrivals' rate, which is not in the paper.
        prompts: lengths.
        outputs: likewise.
    Returns:
        The report up to the last arrival, where finetuning ends; requests go on to their end.
    Raises:
        BenchmarkError: there is no such arrangement.
    """
    if arrangement not in ARRANGEMENTS:
        raise BenchmarkError(f"no arrangement {arrangement!r}; use {', '.join(ARRANGEMENTS)}")
    chosen = ARRANGEMENTS[arrangement]
    slo = Slo(FLEXLLM_TTFT_SLO_S, FLEXLLM_TPOT_SLO_S[setting.name])
    limits = Limits(ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    # A pipeline that only trains takes whole mini-batches: no request waits for it.
    apart = TemporalSharing if chosen.is_separate else chosen.sharing
    engines = [program.engine(limits, sharing=apart()) for _ in range(PIPELINES)]
    for place, engine in enumerate(engines):
        if not chosen.is_separate or place >= chosen.serving:
            engine.finetune("finetuning", repeat((TRAINED_TOKENS,)))
    workload = flexllm(
        rate_per_s, cv, seed=seed, duration_s=duration_s, prompts=prompts, outputs=outputs
    ).at_rate(rate_per_s)
    router = SeparateInstances(chosen.serving) if chosen.is_separate else RoundRobin()
    events = Simulation(engines, router).run(workload, workload.duration_s)
    return serving_report(events, slo, start_s=0.0, end_s=workload.duration_s)
