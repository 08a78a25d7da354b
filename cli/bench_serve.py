"""`pcg bench serve`: serve a workload, with or without finetuning, and report the results.

Options that `vllm bench serve` and `vllm serve` also have keep vLLM's names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from pcg.options import CompileOptions
from pcg.units import counted

from .options.console import busy, check_page, err, out, print_json, print_table, table
from .options.executors import PlaceOptions, degree_of, on_ranks, open_executor
from .options.fields import Given, Json, Model, Only, flags_of

if TYPE_CHECKING:
    from rich.table import Table

    from pcg.peft.lora import LoraConfig
    from pcg.runtime.admission.limits import Limits
    from pcg.runtime.engine.engine import Engine
    from pcg.runtime.engine.scheduling.work import Sharing
    from pcg.runtime.executor import Executor
    from pcg.runtime.metrics.report import ServingReport
    from pcg.simulate.distributions import Arrivals, Lengths, Popularity
    from pcg.simulate.workload import Workload


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options of the served adapters.

    Attributes:
        adapters: the number of fresh LoRA adapters; 0 serves only the base. A trace's adapters keep
            their names.
        ranks: the ranks of the adapters, in turn, for example 8,16.
        targets: the modules to adapt, separated by commas; all linear modules by default.
        popularity: the distribution of requests over adapters: S-LoRA's power law (zipf), or one of
            Punica's four.
        zipf_alpha: the exponent of zipf and s-lora.
        tenants: the number of tenants that own the adapters; 0 for none.
    """

    title: ClassVar[str] = "Adapters"

    adapters: int = 8
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    targets: Sequence[str] | str = "all-linear"
    popularity: Literal["zipf", "distinct", "uniform", "skewed", "identical"] = "zipf"
    zipf_alpha: float = 1.0
    tenants: int = 0

    def recipe(self, index: int) -> LoraConfig:
        """Return the configuration of an adapter."""
        from pcg.peft.lora import LoraConfig

        rank = self.ranks[index % len(self.ranks)]
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=self.targets)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(AdapterOptions):
    """Options of the requests.

    Attributes:
        request_rate: requests a second; inf sends all requests at time 0. 1 by default; a trace
            keeps its own rate.
        burstiness: shape of the Gamma distribution of intervals, 1/cv²; 1 is Poisson, less is
            burstier.
        arrivals: the arrival process: bursty varies the rate, s-lora has a process for each
            adapter.
        num_prompts: the number of requests; 100 without `duration`.
        duration: seconds of requests, instead of `num_prompts`.
        input_len: tokens of a prompt: a number, a range such as 8-512, or sharegpt.
        random_prefix_len: tokens of a common prefix of all prompts, in addition to `input_len`.
        output_len: generated tokens: a number, a range such as 8-512, or sharegpt.
        trace: a file to replay instead: JSON lines, or the CSV of Azure's and BurstGPT's traces.
            Its times, lengths and adapters are kept.
        seed: the seed of the workload, prompts and random weights.
    """

    title: ClassVar[str] = "Workload"

    request_rate: float | None = None
    burstiness: float = 1.0
    arrivals: Literal["gamma", "constant", "bursty", "s-lora"] = "gamma"
    num_prompts: int | None = None
    duration: float | None = None
    input_len: str = "8-64"
    random_prefix_len: int = 0
    output_len: str = "8-64"
    trace: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("adapters", self.adapters, 0)
        at_least("tenants", self.tenants, 0)
        at_least("random_prefix_len", self.random_prefix_len, 0)
        at_least("ranks", min(self.ranks), 1)
        if self.num_prompts is not None:
            at_least("num_prompts", self.num_prompts, 1)

    def workload(self, most_positions: int | None) -> Workload:
        """Return the requests.

        Args:
            most_positions: the model's positions; ShareGPT's lengths are cut off at half of them.
        Raises:
            typer.BadParameter: an invalid option, or incompatible options.
            BenchmarkError: numbers out of range, or an unusable trace.
        """
        workload = self._read() if self.trace is not None else self._made(most_positions)
        if self.tenants:
            from pcg.simulate.synthetic import assign_tenants

            workload = assign_tenants(
                workload, [f"tenant-{index}" for index in range(self.tenants)]
            )
        return workload

    # ------------------------------------------------------------------------------- a trace

    def _read(self) -> Workload:
        from pcg.simulate.workload import Workload, read_public_trace

        assert self.trace is not None
        is_csv = self.trace.suffix.lower() == ".csv"
        workload = read_public_trace(self.trace) if is_csv else Workload.load(self.trace)
        if self.duration is not None:
            workload = workload.part(0.0, self.duration)
        if self.num_prompts is not None:
            workload = Workload(workload.requests[: self.num_prompts])
        if self.request_rate is not None:
            is_finite = math.isfinite(self.request_rate)
            workload = workload.at_rate(self.request_rate) if is_finite else _at_once(workload)
        return workload if workload.adapters else self._spread(workload)

    # ------------------------------------------------------------------------------- synthetic

    def _made(self, most_positions: int | None) -> Workload:
        from pcg.simulate.distributions import PowerLaw
        from pcg.simulate.synthetic import s_lora, synthetic

        prompts = _lengths("--input-len", self.input_len, most_positions)
        outputs = _lengths("--output-len", self.output_len, most_positions)
        rate = 1.0 if self.request_rate is None else self.request_rate
        requests = 100 if self.num_prompts is None and self.duration is None else self.num_prompts
        if self.arrivals == "s-lora":
            if self.duration is None or requests is not None or not self.adapters:
                raise typer.BadParameter(
                    "s-lora has a process for each adapter; give --duration, --adapters and no "
                    "--num-prompts",
                    param_hint="--arrivals",
                )
            law = PowerLaw(self.adapters, self.zipf_alpha)
            return s_lora(
                law, rate, self._cv, prompts, outputs, seed=self.seed, duration_s=self.duration
            )
        if requests is not None and self.duration is not None:
            raise typer.BadParameter("it does not go with --num-prompts", param_hint="--duration")
        if math.isinf(rate) and requests is None:
            raise typer.BadParameter(
                "at an infinite rate it has no end; give --num-prompts", param_hint="--duration"
            )
        arrivals = self._arrivals(1.0 if math.isinf(rate) else rate)
        workload = synthetic(
            arrivals, prompts, outputs, seed=self.seed, requests=requests, duration_s=self.duration
        )
        return self._spread(_at_once(workload) if math.isinf(rate) else workload)

    @property
    def _cv(self) -> float:
        if not 0 < self.burstiness < math.inf:
            raise typer.BadParameter(
                f"{self.burstiness:g}; use a finite number above 0", param_hint="--burstiness"
            )
        return 1 / math.sqrt(self.burstiness)

    def _arrivals(self, rate_per_s: float) -> Arrivals:
        from pcg.simulate.distributions import Bursty, Constant, Gamma

        if self.arrivals == "constant":
            return Constant(rate_per_s)
        return (Bursty if self.arrivals == "bursty" else Gamma)(rate_per_s, self._cv)

    def _spread(self, workload: Workload) -> Workload:
        if not self.adapters:
            return workload
        from pcg.simulate.synthetic import assign_adapters

        names = [f"adapter-{index}" for index in range(self.adapters)]
        return assign_adapters(workload, self._popularity(), seed=self.seed, adapters=names)

    def _popularity(self) -> Popularity:
        from pcg.simulate import distributions

        known: dict[str, Popularity] = {
            "zipf": distributions.PowerLaw(self.adapters, self.zipf_alpha),
            "distinct": distributions.Distinct(),
            "uniform": distributions.Uniform(self.adapters),
            "skewed": distributions.Skewed(),
            "identical": distributions.Identical(),
        }
        return known[self.popularity]


def at_least(name: str, value: float, least: float) -> None:
    """Refuse an option's value below its minimum."""
    if value < least:
        raise typer.BadParameter(f"{value}; use at least {least}", param_hint=flags_of(name)[0])


def _at_once(workload: Workload) -> Workload:
    from pcg.simulate.workload import Workload

    return Workload(tuple(dataclasses.replace(request, time_s=0.0) for request in workload))


def _lengths(option: str, value: str, most_positions: int | None) -> Lengths:
    from pcg.simulate import distributions

    if value == "sharegpt":
        is_input = option == "--input-len"
        whole = distributions.SHAREGPT_PROMPTS if is_input else distributions.SHAREGPT_OUTPUTS
        most = None if most_positions is None else most_positions // 2
        return dataclasses.replace(whole, most=most)
    least, dash, most_text = value.partition("-")
    try:
        return (
            distributions.Between(int(least), int(most_text))
            if dash
            else distributions.Fixed(int(least))
        )
    except ValueError as error:
        raise typer.BadParameter(
            f"{value!r}; use a number, a range as 8-512, or sharegpt", param_hint=option
        ) from error


JOB = "finetuned"
"""Name of the trained adapter."""

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "queueing": "queueing",
}


@dataclass(frozen=True, kw_only=True)
class FinetuningOptions:
    """Options of the finetuning job that runs with the requests.

    Attributes:
        finetune: also train an adapter, on a .jsonl or .txt file, or on random tokens (random).
        finetune_len: tokens of a random example.
        finetune_batch_size: examples a step.
        finetune_rank: LoRA's rank.
        sharing: how finetuning and inference share the device, or the only one that runs.
        inference_frequency: with temporal sharing, inference steps between two training steps.
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
        from pcg.simulate.flexllm import InferenceOnly, SpatialSharing, TemporalSharing

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
        policy: the order in which requests are admitted; MODULE:CLASS of a subclass of
            `pcg.runtime.admission.policy.Policy` is another policy.
        max_num_seqs: the maximum number of concurrent requests.
        max_num_batched_tokens: the maximum number of tokens in a step.
        gpu_memory_utilization: the engine's share of a GPU's memory, above 0 and at most 1.
        kv_cache_gib: memory of the KV cache and the adapters in it, GiB; replaces the memory
            derived from `gpu_memory_utilization`. 4 by default without a GPU.
        enable_prefix_caching: share the KV blocks of common prompt prefixes.
    """

    title: ClassVar[str] = "Engine"

    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    policy: str = "fair-share"
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
    """Options of the measurement and its plot.

    Attributes:
        load_format: dummy gives the model random weights, so that a configuration suffices.
        plot: an SVG file to plot latencies in, over time and as a distribution.
        device: the device, as torch names it; by default a GPU if available, else the CPU.
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
    """Serve a workload, with or without finetuning, and report the results.

    Prompts are random tokens; every output has the length that the workload requires. With --tp
    several ranks of this machine serve the workload together.
    """
    if how.plot is not None:
        check_page(how.plot, "--plot")
    degree = degree_of(model, compiling.values, PlaceOptions(device=how.device))
    compiled = {**compiling.values, "tp": degree}
    on_ranks(degree, partial(measure, model, requests, training, serving, how, compiled, json))


def measure(
    model: str,
    requests: WorkloadOptions,
    training: FinetuningOptions,
    serving: ServingOptions,
    how: BenchOptions,
    compiling: Mapping[str, Any],
    json: bool,
) -> None:
    """Serve the workload on this rank; the first rank reports."""
    from pcg.runtime.admission.backlog import UNLIMITED
    from pcg.runtime.admission.policies import policy_named

    policy = policy_named(serving.policy)
    executor = _executor(model, how, compiling, requests.seed)
    workload = requests.workload(executor.max_positions)
    names = workload.adapters
    fresh = tuple(f"adapter-{index}" for index in range(requests.adapters))
    if requests.trace is None or not set(names) - set(fresh):
        names = fresh
    with busy(f"making {counted(len(names), 'adapter')}"):
        for index, name in enumerate(names):
            executor.add_adapter(name, requests.recipe(index), seed=requests.seed + index)
    size_gib = serving.kv_cache_gib
    with busy("measuring how long steps take"):
        engine = executor.engine(
            serving.limits,
            kv_cache_bytes=None if size_gib is None else int(size_gib * 2**30),
            gpu_memory_utilization=serving.gpu_memory_utilization,
            policy=policy(),
            sharing=training.rule,
            prefix_caching=serving.enable_prefix_caching,
            queue=UNLIMITED,  # all requests are measured
        )
    if training.finetune is not None:
        if serving.ttft_slo_ms is None and serving.tpot_slo_ms is None:
            engine.calibrate()  # without SLOs a job's budget follows from the time of an idle step
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
    """Serve the workload with its job, if any; or only train for the workload's duration."""
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
    print_table(outcome_table(report), console)
    console.print()
    print_table(latency_table(report), console)
    if plot is not None:
        err().print(f"plot: {plot}", style="dim", soft_wrap=True)


# ------------------------------------------------------------------------------------------ tables


def latency_table(report: ServingReport) -> Table:
    """Return the latencies of finished requests, in milliseconds; dashes without samples."""
    heads = ("mean", "median", "p90", "p99")
    rows = table("ms", "samples", *heads, right=("samples", *heads))
    for name, latency in report.latencies.items():
        if latency is None:
            rows.add_row(_TITLES[name], "0", *("–" for _ in heads))
            continue
        numbers = (latency.mean_s, latency.median_s, latency.p90_s, latency.p99_s)
        rows.add_row(_TITLES[name], f"{latency.count:,}", *(f"{s * 1e3:,.1f}" for s in numbers))
    return rows


def outcome_table(report: ServingReport) -> Table:
    """Return the outcomes of requests, tokens, SLOs, jobs and tenants; zero rows are omitted."""
    numbers = report.to_json()
    rows = table("serving", "", right=("",))
    rows.add_row("duration", f"{report.duration_s:,.1f} s")
    rows.add_row("requests", f"{len(report.requests):,}")
    for outcome in ("completed", "refused", "cancelled", "timed_out", "failed", "unfinished"):
        if outcome == "completed" or numbers[outcome]:
            rows.add_row(f"  {outcome.replace('_', ' ')}", f"{numbers[outcome]:,}")
    if numbers["preempted"]:
        rows.add_row("  preempted", f"{numbers['preempted']:,}, {numbers['preemptions']:,} times")
    rows.add_row("throughput", f"{report.request_throughput:,.2f} requests/s")
    if report.request_goodput is not None:
        rows.add_row("goodput", f"{report.request_goodput:,.2f} requests/s")
    rows.add_row("output", f"{report.output_throughput:,.1f} tokens/s")
    rows.add_row("prompts and output", f"{report.total_token_throughput:,.1f} tokens/s")
    if report.cached_tokens:
        rate = f"{report.prefix_cache_hit_rate:.1%} of prompts"
        rows.add_row("prefix cache", f"{report.cached_tokens:,} tokens, {rate}")
    for title, share in (
        ("SLO attainment", report.slo_attainment),
        ("  first token", report.ttft_attainment),
        ("  further tokens, mean", report.tpot_attainment),
        ("  gaps between tokens", report.gap_attainment),
        ("user satisfaction", report.user_satisfaction),
    ):
        if share is not None:
            rows.add_row(title, f"{share:.1%}")
    if report.finetuning_steps:
        steps = f"{report.finetuning_steps:,} steps"
        rows.add_row("finetuning", f"{report.finetuning_throughput:,.1f} tokens/s, {steps}")
    fairness = report.fairness
    if fairness is not None and len(fairness.service) > 1:
        ratio = fairness.max_min_ratio
        rows.add_row("most served tenant / least", "–" if ratio is None else f"{ratio:,.2f}")
        rows.add_row("Jain index of tenants", f"{fairness.jain_index:.3f}")
    return rows
