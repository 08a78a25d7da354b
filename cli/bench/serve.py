"""`pcg bench serve`: serve a workload, beside finetuning or not, and report how it went.

The options have the names of `vllm bench serve` and `vllm serve` where these have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from pcg.options import CompileOptions, PolicyName
from pcg.units import counted

from ..options.arguments import Json, Model
from ..options.console import busy, err, out, print_json, table
from ..options.executors import PlaceOptions, degree_of, on_ranks, open_executor
from ..options.fields import Given, Only
from .workload import WorkloadOptions, at_least

if TYPE_CHECKING:
    from rich.table import Table

    from pcg.runtime.admission.limits import Limits
    from pcg.runtime.engine.engine import Engine
    from pcg.runtime.engine.scheduling.work import Sharing
    from pcg.runtime.executor import Executor
    from pcg.runtime.metrics.report import ServingReport
    from pcg.simulate.workloads.workload import Workload

JOB = "finetuned"
"""Name of the adapter that is trained."""

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "queueing": "queueing",
}


@dataclass(frozen=True, kw_only=True)
class FinetuningOptions:
    """Options of the finetuning beside requests.

    Attributes:
        finetune: train an adapter meanwhile: a .jsonl or .txt file, or random for random tokens.
        finetune_len: tokens of a random example.
        finetune_batch_size: examples a step.
        finetune_rank: LoRA's rank.
        sharing: how finetuning goes beside requests, or which of the two runs alone.
        inference_frequency: with temporal sharing, steps that serve between two that train.
        finetuning_share: with spatial sharing, finetuning's part of the time.
    """

    title: ClassVar[str] = "Finetuning"

    finetune: str | None = None
    finetune_len: int = 128
    finetune_batch_size: int = 2
    finetune_rank: int = 16
    sharing: Literal["co-serving", "temporal", "spatial", "inference-only", "finetuning-only"] = (
        "co-serving"
    )
    inference_frequency: int = 128
    finetuning_share: float = 0.5

    def __post_init__(self) -> None:
        at_least("finetune_len", self.finetune_len, 2)
        at_least("finetune_batch_size", self.finetune_batch_size, 1)
        at_least("finetune_rank", self.finetune_rank, 1)
        if self.sharing == "finetuning-only" and self.finetune is None:
            raise typer.BadParameter(
                "there is nothing to train; give --finetune", param_hint="--sharing"
            )
        if self.sharing == "inference-only" and self.finetune is not None:
            raise typer.BadParameter("it does not go with --finetune", param_hint="--sharing")

    @property
    def rule(self) -> Sharing:
        """The rule by which the engine shares its time."""
        from pcg.runtime.engine.scheduling.co_serving import CoServing
        from pcg.simulate.papers.sharing_rules import InferenceOnly, SpatialSharing, TemporalSharing

        if self.sharing == "temporal":
            return TemporalSharing(self.inference_frequency)
        if self.sharing == "spatial":
            return SpatialSharing(self.finetuning_share)
        return InferenceOnly() if self.sharing == "inference-only" else CoServing()


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of the engine.

    Attributes:
        ttft_slo_ms: SLO of the time to the first token, ms.
        tpot_slo_ms: SLO of each gap between two output tokens, ms.
        policy: the order in which requests are admitted.
        max_num_seqs: the most requests at once.
        max_num_batched_tokens: the most tokens of a step.
        gpu_memory_utilization: the share of a GPU's memory for the engine, from above 0 to 1.
        kv_cache_gib: memory of the KV cache and the adapters in it, GiB, in place of what
            `gpu_memory_utilization` leaves; 4 by default where there is no GPU.
        enable_prefix_caching: share the KV blocks of prompts that begin alike.
    """

    title: ClassVar[str] = "Engine"

    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    policy: PolicyName = "fair-share"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    enable_prefix_caching: bool = True

    @property
    def limits(self) -> Limits:
        """The limits of a step, and the SLOs."""
        from pcg.runtime.admission.limits import Limits

        return Limits(
            running=self.max_num_seqs,
            tokens=self.max_num_batched_tokens,
            ttft_slo_s=None if self.ttft_slo_ms is None else self.ttft_slo_ms / 1e3,
            tpot_slo_s=None if self.tpot_slo_ms is None else self.tpot_slo_ms / 1e3,
        )


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of what is measured, and drawn.

    Attributes:
        load_format: dummy gives the model random weights: a configuration is enough.
        plot: a file to draw latencies in, over time, and their distribution, as FILE.svg.
        device: the device, as torch names it; a GPU where there is one, else the CPU.
    """

    load_format: Literal["auto", "dummy"] = "auto"
    plot: Path | None = None
    device: str | None = None


def serve_command(
    model: Model,
    requests: WorkloadOptions,
    training: FinetuningOptions,
    serving: ServingOptions,
    how: BenchOptions,
    compiling: Annotated[
        Given[CompileOptions], Only(("tp", "dtype", "backend", "adapter_copies", "attention"))
    ],
    json: Json = False,
) -> None:
    """Serve a workload, beside finetuning or not, and report how it went.

    Prompts are random tokens, and every output has the length that the workload asks for. With --tp
    so many ranks of this machine serve it together.
    """
    degree = degree_of(model, compiling.values, PlaceOptions(device=how.device))
    arguments = {
        "model": model,
        "requests": requests,
        "training": training,
        "serving": serving,
        "how": how,
        "compiling": {**compiling.values, "tp": degree},
        "json": json,
    }
    on_ranks(degree, measure, arguments)


def measure(
    model: str,
    requests: WorkloadOptions,
    training: FinetuningOptions,
    serving: ServingOptions,
    how: BenchOptions,
    compiling: Mapping[str, Any],
    json: bool,
) -> None:
    """Serve the workload and report; over ranks each of them does, and the first one reports."""
    from pcg.runtime.admission.backlog import UNLIMITED
    from pcg.runtime.admission.policies import POLICIES

    executor = _executor(model, how, compiling, requests.seed)
    workload = requests.workload(executor.max_positions)
    names = workload.adapters
    own = tuple(f"adapter-{index}" for index in range(requests.adapters))
    if requests.trace is None or not set(names) - set(own):
        names = own
    with busy(f"making {counted(len(names), 'adapter')}"):
        for index, name in enumerate(names):
            executor.add_adapter(name, requests.recipe(index), seed=requests.seed + index)
    size_gib = serving.kv_cache_gib
    with busy("measuring how long steps take"):
        engine = executor.engine(
            serving.limits,
            kv_cache_bytes=None if size_gib is None else int(size_gib * 2**30),
            gpu_memory_utilization=serving.gpu_memory_utilization,
            policy=POLICIES[serving.policy](),
            sharing=training.rule,
            prefix_caching=serving.enable_prefix_caching,
            queue=UNLIMITED,  # all requests are measured
        )
    if training.finetune is not None:
        if serving.ttft_slo_ms is None and serving.tpot_slo_ms is None:
            engine.calibrate()  # without SLOs jobs go by the time of an idle step
        with busy("compiling the finetuning job"):
            _finetune(engine, training.finetune, training, requests.seed)
    report = _run(engine, workload, requests, serves=training.sharing != "finetuning-only")
    if executor.ranks.rank:
        return
    if how.plot is not None:
        from pcg.simulate.latency_plot import serving_svg

        title = f"{executor.program.name}, {training.sharing}"
        how.plot.write_text(serving_svg(report, title), "utf-8")
    if json:
        print_json(
            {
                "model": executor.program.name,
                "sharing": training.sharing,
                "policy": serving.policy,
                "tp": executor.ranks.size,
                "adapters": len(names),
                "seed": requests.seed,
                "ttft_slo_ms": serving.ttft_slo_ms,
                "tpot_slo_ms": serving.tpot_slo_ms,
                **report.to_json(),
            }
        )
        return
    _print(report, how.plot)


def _executor(model: str, how: BenchOptions, compiling: Any, seed: int) -> Executor:
    if how.load_format == "auto":
        return open_executor(model, None, compiling, PlaceOptions(device=how.device))
    with busy(f"compiling {model}"):
        from pcg import compiler

        return compiler.compile_random(model, device=how.device, seed=seed, **compiling)


def _finetune(engine: Engine, source: str, training: FinetuningOptions, seed: int) -> None:
    """Give the engine a job that does not end by itself."""
    from random import Random

    from pcg.peft.lora import LoraConfig
    from pcg.runtime.data.example import Example

    data: Any = Path(source)
    size, rank = training.finetune_batch_size, training.finetune_rank
    if source == "random":
        random, vocabulary = Random(f"{seed} examples"), engine.state.program.base.vocabulary
        length = training.finetune_len
        rows = [random.choices(range(vocabulary), k=length) for _ in range(16 * size)]
        data = [Example(row, row) for row in rows]
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    engine.finetune(data, JOB, peft=lora, batch_size=size, max_steps=10**9)


def _run(
    engine: Engine, workload: Workload, options: WorkloadOptions, *, serves: bool
) -> ServingReport:
    """Serve, beside the job if there is one; or train for as long as the requests would come."""
    from pcg.simulate.replay import replay, train

    state = engine.state
    try:
        if not serves:
            with busy("finetuning"):
                return train(engine, max(workload.duration_s, 1.0))
        with busy(f"serving {counted(len(workload), 'request')}"):
            return replay(
                engine,
                workload,
                state.adapters,
                state.program.base.vocabulary,
                seed=options.seed,
                prefix_tokens=options.random_prefix_len,
                most_positions=state.max_positions,
            )
    finally:
        for job in list(engine.jobs):
            engine.cancel_job(job.name)


def _print(report: ServingReport, plot: Path | None) -> None:
    console = out()
    console.print(outcome_table(report))
    console.print()
    console.print(latency_table(report))
    if plot is not None:
        err().print(f"plot: {plot}", style="dim", soft_wrap=True)


# ------------------------------------------------------------------------------------------ tables


def latency_table(report: ServingReport) -> Table:
    """Latencies of finished requests, in milliseconds; dashes where there is no sample."""
    heads = ("mean", "median", "p90", "p99")
    made = table("ms", "samples", *heads, right=("samples", *heads))
    for name, one in report.latencies.items():
        if one is None:
            made.add_row(_TITLES[name], "0", *("–" for _ in heads))
            continue
        numbers = (one.mean_s, one.median_s, one.p90_s, one.p99_s)
        made.add_row(_TITLES[name], f"{one.count:,}", *(f"{s * 1e3:,.1f}" for s in numbers))
    return made


def outcome_table(report: ServingReport) -> Table:
    """Outcomes of requests, tokens, SLOs, jobs and tenants; lines of nothing are left out."""
    found = report.to_json()
    made = table("serving", "", right=("",))
    made.add_row("duration", f"{report.duration_s:,.1f} s")
    made.add_row("requests", f"{len(report.requests):,}")
    for outcome in ("completed", "refused", "cancelled", "timed_out", "failed", "unfinished"):
        if outcome == "completed" or found[outcome]:
            made.add_row(f"  {outcome.replace('_', ' ')}", f"{found[outcome]:,}")
    if found["preempted"]:
        made.add_row("  preempted", f"{found['preempted']:,}, {found['preemptions']:,} times")
    made.add_row("throughput", f"{report.request_throughput:,.2f} requests/s")
    if report.request_goodput is not None:
        made.add_row("goodput", f"{report.request_goodput:,.2f} requests/s")
    made.add_row("output", f"{report.output_throughput:,.1f} tokens/s")
    made.add_row("prompts and output", f"{report.total_token_throughput:,.1f} tokens/s")
    if report.cached_tokens:
        rate = f"{report.prefix_cache_hit_rate:.1%} of prompts"
        made.add_row("prefix cache", f"{report.cached_tokens:,} tokens, {rate}")
    for title, share in (
        ("SLO attainment", report.slo_attainment),
        ("  first token", report.ttft_attainment),
        ("  further tokens, mean", report.tpot_attainment),
        ("  gaps between tokens", report.gap_attainment),
        ("user satisfaction", report.user_satisfaction),
    ):
        if share is not None:
            made.add_row(title, f"{share:.1%}")
    if report.finetuning_steps:
        steps = f"{report.finetuning_steps:,} steps"
        made.add_row("finetuning", f"{report.finetuning_throughput:,.1f} tokens/s, {steps}")
    fairness = report.fairness
    if fairness is not None and len(fairness.service) > 1:
        ratio = fairness.max_min_ratio
        made.add_row("most served tenant / least", "–" if ratio is None else f"{ratio:,.2f}")
        made.add_row("Jain index of tenants", f"{fairness.jain_index:.3f}")
    return made
