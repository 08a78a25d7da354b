"""FlexLLM v2 §8.1 and §8.2, figures 10 and 11: finetuning and inference on four pipelines.

co-serving     FlexLLM's own rule                                             both figures
temporal-n     n serving steps, then one mini-batch (§8.2)                    figure 11
spatial-p      p % of the time for finetuning (§8.2)                          figure 11
separate-p     p % of the pipelines serve, the others train (§8.1)            figure 10

Sharing rules for comparison with co-serving (FlexLLM v2 §2 and §8.2, figure 11):

    TemporalSharing   no finetuning for n steps, then a whole mini-batch and no requests
    SpatialSharing    a fixed share of the time for finetuning, regardless of the SLOs
    InferenceOnly     no finetuning

Without requests, the first two train. In the paper's spatial sharing, inference and finetuning run
concurrently on parts of a GPU; here a share of each step's time represents a part of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from types import MappingProxyType

from pcg.errors import BenchmarkError, FinetuneError
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.scheduling.co_serving import CoServing
from pcg.runtime.engine.scheduling.work import Sharing, Work
from pcg.runtime.metrics.report import ServingReport, Slo, serving_report
from pcg.runtime.requests.step import Load
from pcg.runtime.training.work_units import Forward, Phase
from pcg.simulate.distributions import (
    SHAREGPT_FIRST_OUTPUTS,
    SHAREGPT_FIRST_PROMPTS,
    Bursty,
    Lengths,
)
from pcg.simulate.simulated_program import SimulatedProgram, simulated_program
from pcg.simulate.simulation import RoundRobin, Simulation
from pcg.simulate.synthetic import synthetic
from pcg.simulate.workload import Workload


class TemporalSharing(Sharing):
    """Alternates serving steps with steps that run a whole mini-batch, forward and backward.

    `frequency` serving steps separate two training steps; FlexLLM v2 figure 11 has 64 to 512.
    """

    def __init__(self, frequency: int = 128) -> None:
        if frequency < 1:
            raise FinetuneError(f"frequency={frequency}; use at least 1 step that serves")
        self.frequency = frequency
        self._served = 0

    def serves(self, has_work: bool) -> bool:
        return not has_work or self._served < self.frequency

    def begin(self, work: Work) -> None:
        self._served = self._served + 1 if work.is_served else 0

    def forward(self, work: Work, unit: Forward) -> int:
        return 0 if work.is_served or work.load.windows else unit.remaining

    def fits(
        self, work: Work, phase: Phase, load: Load, ahead_s: float, *, is_due: bool = False
    ) -> bool:
        return not work.is_served


class SpatialSharing(CoServing):
    """Gives finetuning a fixed share of the time of serving steps, regardless of the SLOs."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise FinetuneError(f"share={share:g}; use a part above 0 and below 1")
        self.share = share

    def _share(self, work: Work) -> float | None:
        return self.share if work.is_served else None


class InferenceOnly(Sharing):
    """Runs no finetuning: jobs wait."""

    trains = False

    def forward(self, work: Work, unit: Forward) -> int:
        return 0

    def fits(
        self, work: Work, phase: Phase, load: Load, ahead_s: float, *, is_due: bool = False
    ) -> bool:
        return False


PIPELINES = 4
RATES = (4.0, 8.0, 12.0, 16.0, 20.0)
TRAINED_TOKENS = 8192
"""The length to which sequences of the reasoning data set are cut; here all are that long."""

TTFT_SLO_S = 5.0
TPOT_SLO_S: Mapping[str, float] = MappingProxyType(
    {"Llama-3.1-8B": 0.050, "Qwen2.5-14B": 0.075, "Qwen2.5-32B": 0.075}
)
"""The SLOs of §8 by model, seconds."""


@dataclass(frozen=True)
class CoServed:
    """A model of FlexLLM v2 §8.

    Attributes:
        tp: the number of a pipeline's GPUs, A100s of 80 GB.
        paper: finetuning tokens a second of all pipelines, by arrangement and requests a second,
            from the text of §8.1.
    """

    model: str
    tp: int
    paper: Mapping[tuple[str, float], float]

    @property
    def name(self) -> str:
        """The model's name without its owner."""
        return self.model.partition("/")[2]


def _paper(light: float, heavy: float, separate: float) -> Mapping[tuple[str, float], float]:
    rows = {("co-serving", 4.0): light, ("co-serving", 20.0): heavy}
    return MappingProxyType({**rows, ("separate-75", 20.0): separate})


MODELS = (
    CoServed("meta-llama/Llama-3.1-8B", 1, _paper(9400.0, 7200.0, 3800.0)),
    CoServed("Qwen/Qwen2.5-14B", 2, _paper(3700.0, 2200.0, 1000.0)),
    CoServed("Qwen/Qwen2.5-32B", 4, _paper(3200.0, 2200.0, 500.0)),
)


@dataclass(frozen=True)
class Arrangement:
    """The rule by which pipelines share serving and finetuning.

    Attributes:
        sharing: the rule of a pipeline that serves and trains.
        serving: the number of serving pipelines; if fewer than all, only the others train.
    """

    sharing: Callable[[], Sharing] = CoServing
    serving: int = PIPELINES

    @property
    def is_separate(self) -> bool:
        """True if no pipeline both serves and trains."""
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
"""The arrangements by name. The paper does not state the shares of spatial sharing."""


def co_serving_program(setting: CoServed, product_share: float | None = None) -> SimulatedProgram:
    """Return the model of a setting, with LoRA of rank 16 at its down projections.

    Args:
        product_share: the share of the peak that products reach, as for `simulated_program`.
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
    """Return the share of the peak at which co-serving trains as in the paper at its lowest rate.

    The fit uses a single number of the paper; all other rates and arrangements remain comparable.
    Throughput is nearly proportional to the share, so a few corrections suffice.

    Returns:
        A share with a throughput within 2 % of the paper's, or within a mini-batch of each
        pipeline, as throughput counts whole mini-batches.
    Raises:
        BenchmarkError: no share is found.
    """
    wanted, share = setting.paper["co-serving", RATES[0]], 0.5
    near = max(0.02 * wanted, PIPELINES * TRAINED_TOKENS / duration_s)
    for _ in range(8):
        program = co_serving_program(setting, share)
        report = co_serving(program, setting, RATES[0], seed=seed, duration_s=duration_s)
        tokens_per_s = report.finetuning_throughput
        if abs(tokens_per_s - wanted) <= near:
            return share
        share = min(share * wanted / max(tokens_per_s, 0.1 * wanted), 1.0)
    raise BenchmarkError(
        f"{setting.name} trains on {tokens_per_s:.0f} tokens/s at a share of {share:.3f}, and no "
        f"share brings it to {wanted:.0f}; simulate a longer duration"
    )


def bursty_workload(
    rate_per_s: float,
    cv: float = 0.5,
    *,
    seed: int,
    duration_s: float = 1200.0,
    prompts: Lengths = SHAREGPT_FIRST_PROMPTS,
    outputs: Lengths = SHAREGPT_FIRST_OUTPUTS,
) -> Workload:
    """Return bursty arrivals in place of the parts of BurstGPT that the paper replays.

    `read_public_trace(…).part(…).at_rate(…)` replays BurstGPT's own file. The paper does not give
    `cv`, the coefficient of variation of the rate.
    """
    arrivals = Bursty(rate_per_s, cv)
    return synthetic(arrivals, prompts, outputs, seed=seed, duration_s=duration_s)


def co_serving(
    program: SimulatedProgram,
    setting: CoServed,
    rate_per_s: float,
    *,
    arrangement: str = "co-serving",
    seed: int = 0,
    duration_s: float = 1200.0,
    prompts: Lengths = SHAREGPT_FIRST_PROMPTS,
    outputs: Lengths = SHAREGPT_FIRST_OUTPUTS,
) -> ServingReport:
    """Serve the base model and train an adapter on each of four pipelines.

    Args:
        rate_per_s: the rate of all pipelines, to which arrivals are scaled, as in the paper.
        arrangement: a name of `ARRANGEMENTS`.
        duration_s: the duration of the arrivals before scaling; twenty minutes in the paper.
    Returns:
        The report up to the last arrival, where finetuning ends; requests run to their end.
    Raises:
        BenchmarkError: no arrangement has the name.
    """
    if arrangement not in ARRANGEMENTS:
        raise BenchmarkError(f"no arrangement {arrangement!r}; use {', '.join(ARRANGEMENTS)}")
    chosen = ARRANGEMENTS[arrangement]
    slo = Slo(TTFT_SLO_S, TPOT_SLO_S[setting.name])
    limits = Limits(ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    # A training-only pipeline runs whole mini-batches, as no request waits.
    apart = TemporalSharing if chosen.is_separate else chosen.sharing
    engines = [program.engine(limits, sharing=apart()) for _ in range(PIPELINES)]
    for place, engine in enumerate(engines):
        if not chosen.is_separate or place >= chosen.serving:
            engine.finetune("finetuning", repeat((TRAINED_TOKENS,)))
    workload = bursty_workload(
        rate_per_s, seed=seed, duration_s=duration_s, prompts=prompts, outputs=outputs
    ).at_rate(rate_per_s)
    events = Simulation(engines, RoundRobin(chosen.serving)).run(workload, workload.duration_s)
    return serving_report(events, slo, start_s=0.0, end_s=workload.duration_s)
