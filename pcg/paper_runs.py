"""The papers' serving experiments, on simulated machines.

co_serving      FlexLLM v2 §8.1, figure 10: finetuning beside inference, four pipelines
many_adapters   S-LoRA §7.2, table 3: throughput over the number of adapters
cluster_hour    Punica §7.3, figure 13: sixteen GPUs, requests consolidated on the fullest
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from types import MappingProxyType

from pcg.errors import BenchmarkError
from pcg.runtime.engine.events import Event, EventLog, Kind
from pcg.runtime.engine.metrics import ServingReport, serving_report
from pcg.runtime.engine.scheduler import Limits
from pcg.runtime.engine.simulated_engine import SimulatedEngine
from pcg.runtime.engine.simulation import Fullest, Simulation, TakingTurns
from pcg.runtime.engine.timelines import Slo
from pcg.runtime.workloads.lengths import (
    SHAREGPT_FIRST_OUTPUTS,
    SHAREGPT_FIRST_PROMPTS,
    Lengths,
)
from pcg.runtime.workloads.popularity import PowerLaw
from pcg.runtime.workloads.presets import (
    FLEXLLM_TPOT_SLO_S,
    FLEXLLM_TTFT_SLO_S,
    S_LORA_LENGTHS,
    S_LORA_TTFT_SLO_S,
    flexllm,
    punica_hour,
)
from pcg.runtime.workloads.synthetic import s_lora
from pcg.simulating import SimulatedProgram, simulated_program

# ---------------------------------------------------------------------------------- FlexLLM v2


@dataclass(frozen=True)
class CoServing:
    """A model of FlexLLM v2 §8.

    Attributes:
        model: its id.
        tp: GPUs of a pipeline, A100s of 80 GB.
        paper: finetuning tokens a second of all pipelines by requests a second, as the text of §8.1
            has them.
    """

    model: str
    tp: int
    paper: Mapping[float, float]

    @property
    def name(self) -> str:
        """Without its owner."""
        return self.model.partition("/")[2]


FLEXLLM_MODELS = (
    CoServing("meta-llama/Llama-3.1-8B", 1, MappingProxyType({4.0: 9400.0, 20.0: 7200.0})),
    CoServing("Qwen/Qwen2.5-14B", 2, MappingProxyType({4.0: 3700.0, 20.0: 2200.0})),
    CoServing("Qwen/Qwen2.5-32B", 4, MappingProxyType({4.0: 3200.0, 20.0: 2200.0})),
)
FLEXLLM_RATES = (4.0, 8.0, 12.0, 16.0, 20.0)
FLEXLLM_ATTAINMENT = 0.9
"""At least, at 20 requests a second (§8.1)."""
PIPELINES = 4
TRAINED_TOKENS = 8192
"""Where sequences of the reasoning data set are cut; all are taken to be so long."""


def co_serving_program(setting: CoServing) -> SimulatedProgram:
    """The model of a setting, with LoRA of rank 16 at its down projections."""
    return simulated_program(
        setting.model,
        "A100-80",
        tp=setting.tp,
        targets=("down_proj",),
        finetuning_tokens=TRAINED_TOKENS,
    )


def co_serving(
    program: SimulatedProgram,
    setting: CoServing,
    rate_per_s: float,
    *,
    seed: int = 0,
    duration_s: float = 1200.0,
    cv: float = 0.5,
    trains: bool = True,
    prompts: Lengths = SHAREGPT_FIRST_PROMPTS,
    outputs: Lengths = SHAREGPT_FIRST_OUTPUTS,
) -> ServingReport:
    """Serve the base model and train an adapter on each of four pipelines.

    Args:
        program: of the setting.
        setting: model and machine.
        rate_per_s: of all pipelines.
        seed: of the workload.
        duration_s: of it; twenty minutes in the paper.
        cv: of the arrivals' rate, which is not in the paper.
        trains: whether there is finetuning.
        prompts: lengths.
        outputs: likewise.
    """
    slo = Slo(FLEXLLM_TTFT_SLO_S, FLEXLLM_TPOT_SLO_S[setting.name])
    limits = Limits(ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    engines = [program.engine(limits) for _ in range(PIPELINES)]
    if trains:
        for engine in engines:
            engine.finetune("finetuning", repeat((TRAINED_TOKENS,)))
    workload = flexllm(
        rate_per_s, cv, seed=seed, duration_s=duration_s, prompts=prompts, outputs=outputs
    )
    events = Simulation(engines, TakingTurns()).run(workload, duration_s)
    return serving_report(events, slo, start_s=0.0, end_s=duration_s)


# ------------------------------------------------------------------------------------- S-LoRA


@dataclass(frozen=True)
class ManyAdapters:
    """A row of S-LoRA's table 1, and its requests a second in table 3.

    Attributes:
        model: its id.
        ranks: of the adapters, in turn.
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
"""Table 2, on an A100 of 80 GB."""


def many_adapters_program(name: str) -> SimulatedProgram:
    """A model of table 3 on one A100 of 80 GB, with adapters at q, k, v and o.

    Raises:
        BenchmarkError: there is no such setting.
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
    """Serve requests for so many adapters, all of them to the end.

    Args:
        program: of the setting.
        name: of the setting.
        adapters: how many.
        rate_per_s: of the requests; table 2's by default.
        seed: of the workload.
        duration_s: of it; five minutes in the paper.
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
    simulation = Simulation([program.engine(Limits())], TakingTurns(), held)
    events = simulation.run(workload)
    return serving_report(events, Slo(S_LORA_TTFT_SLO_S), start_s=0.0)


# ------------------------------------------------------------------------------------- Punica

PUNICA_GPUS = 16
PUNICA_BATCH = 32
"""Requests of a GPU at most (§5.1)."""


@dataclass(frozen=True)
class ClusterMinute:
    """A minute of the cluster.

    Attributes:
        minute: from 0.
        requests_per_s: that came.
        output_tokens_per_s: that came out.
        busy: share of the minute that each GPU computed.
        batch: mean requests of a step of each GPU; 0 where it had none.
    """

    minute: int
    requests_per_s: float
    output_tokens_per_s: float
    busy: tuple[float, ...]
    batch: tuple[float, ...]


def cluster_program() -> SimulatedProgram:
    """Llama-2-7B on an A100 of 40 GB, with adapters at all dense projections."""
    return simulated_program("meta-llama/Llama-2-7b-hf", "A100-40")


def cluster_hour(
    program: SimulatedProgram,
    rate_per_s: float,
    *,
    seed: int = 0,
    duration_s: float = 3600.0,
    prompts: Lengths = SHAREGPT_FIRST_PROMPTS,
    outputs: Lengths = SHAREGPT_FIRST_OUTPUTS,
) -> tuple[tuple[ClusterMinute, ...], float]:
    """Serve Punica's hour: each request goes to the fullest GPU that has room.

    Args:
        program: of each GPU.
        rate_per_s: mean of the hour.
        seed: of the workload.
        duration_s: of it.
        prompts: lengths.
        outputs: likewise.
    Returns:
        The minutes, and the mean time to the first token in seconds.
    """
    workload = punica_hour(
        rate_per_s, seed=seed, duration_s=duration_s, prompts=prompts, outputs=outputs
    )
    adapters = {name: program.adapter(name, 16) for name in workload.adapters}
    limits = Limits(running=PUNICA_BATCH)
    # An hour has tens of millions of tokens: they are counted, and not kept.
    engines = [program.engine(limits, log=EventLog(0)) for _ in range(PUNICA_GPUS)]
    tally = _Tally(engines)
    Simulation(engines, Fullest(PUNICA_BATCH), adapters, tally.stepped).run(workload)
    came = Counter(int(one.time_s // 60) for one in workload)
    return tally.minutes(came), tally.first_s / len(workload)


class _Tally:
    """What engines do, by minute.

    Attributes:
        first_s: times to the first token of all requests, summed.
    """

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self.first_s = 0.0
        self._engines = engines
        self._busy_before = [0.0] * len(engines)
        self._busy: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._steps: Counter[tuple[int, int]] = Counter()
        self._batch: Counter[tuple[int, int]] = Counter()
        self._tokens: Counter[int] = Counter()
        for place, engine in enumerate(engines):
            engine.log.listen(partial(self._hear, place))
        self._submitted_s: dict[tuple[int, str], float] = {}

    def stepped(self, place: int) -> None:
        """Count a step."""
        engine = self._engines[place]
        where = int(engine.clock.now_s() // 60), place
        self._steps[where] += 1
        self._batch[where] += len(engine.scheduler.running)
        self._busy[where] += engine.device.busy_s - self._busy_before[place]
        self._busy_before[place] = engine.device.busy_s

    def minutes(self, came: Mapping[int, int]) -> tuple[ClusterMinute, ...]:
        """All minutes up to the last token."""
        places = range(len(self._engines))
        return tuple(
            ClusterMinute(
                minute,
                came.get(minute, 0) / 60,
                self._tokens[minute] / 60,
                tuple(self._busy[minute, place] / 60 for place in places),
                tuple(
                    self._batch[minute, place] / max(self._steps[minute, place], 1)
                    for place in places
                ),
            )
            for minute in range(1 + max(self._tokens, default=0))
        )

    def _hear(self, place: int, event: Event) -> None:
        key = place, event.subject
        if event.kind is Kind.SUBMITTED:
            self._submitted_s[key] = event.time_s
        elif event.kind is Kind.TOKEN:
            self._tokens[int(event.time_s // 60)] += 1
            submitted_s = self._submitted_s.pop(key, None)
            if submitted_s is not None:
                self.first_s += event.time_s - submitted_s
