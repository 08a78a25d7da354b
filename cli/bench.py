"""`pcg bench serve`: serve a workload, beside finetuning or not, and report how it went.

The options are those of `vllm bench serve` and `vllm serve` where these have them.

Long because half of it are the options and what they say of themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import Device, Dtype, Json, Model, ModelBackend, Targets
from .bench_workload import ARRIVALS, POPULARITIES, WorkloadOptions
from .console import busy, count_text, err, out, print_json
from .executors import open_executor

if TYPE_CHECKING:
    from pcg.runtime.engine.engine import Engine
    from pcg.runtime.engine.policies import Policy
    from pcg.runtime.engine.sharing import Sharing
    from pcg.runtime.executor import Executor
    from pcg.runtime.metrics.metrics import ServingReport
    from pcg.simulate.workloads.workload import Workload

WORKLOAD = "Workload"
ADAPTERS = "Adapters"
FINETUNING = "Finetuning"
ENGINE = "Engine"

POLICIES = ("fcfs", "adapter-clustering", "early-abort", "fair-share")
SHARINGS = ("co-serving", "temporal", "spatial", "inference-only", "finetuning-only")
JOB = "finetuned"
"""Name of the adapter that is trained."""


def serve_command(
    model: Model,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second; inf for all at once. 1 by default, of a trace its own.",
            show_default=False,
            rich_help_panel=WORKLOAD,
            metavar="R",
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the Gamma intervals; 1 is Poisson, less is burstier.",
            rich_help_panel=WORKLOAD,
            metavar="X",
        ),
    ] = 1.0,
    arrivals: Annotated[
        str,
        typer.Option(
            help="gamma, constant, bursty (a rate that changes), s-lora (one for each adapter).",
            rich_help_panel=WORKLOAD,
            metavar="|".join(ARRIVALS),
        ),
    ] = "gamma",
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Requests. 100 without --duration.",
            show_default=False,
            rich_help_panel=WORKLOAD,
            metavar="N",
            min=1,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds of requests, instead of --num-prompts.",
            show_default=False,
            rich_help_panel=WORKLOAD,
            metavar="S",
        ),
    ] = None,
    input_len: Annotated[
        str,
        typer.Option(
            help="Tokens of a prompt: a number, a range as 8-512, or sharegpt.",
            rich_help_panel=WORKLOAD,
            metavar="N|A-B|sharegpt",
        ),
    ] = "8-64",
    random_prefix_len: Annotated[
        int,
        typer.Option(
            help="Tokens that all prompts begin with, before those of --input-len.",
            rich_help_panel=WORKLOAD,
            metavar="N",
            min=0,
        ),
    ] = 0,
    output_len: Annotated[
        str,
        typer.Option(
            help="Tokens that are generated, likewise.",
            rich_help_panel=WORKLOAD,
            metavar="N|A-B|sharegpt",
        ),
    ] = "8-64",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay this instead: JSON lines, or the CSV of Azure's and BurstGPT's traces.",
            rich_help_panel=WORKLOAD,
            metavar="FILE",
        ),
    ] = None,
    tenants: Annotated[
        int,
        typer.Option(
            help="Tenants that own the adapters.", rich_help_panel=WORKLOAD, metavar="N", min=0
        ),
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            help="Of the workload, prompts and random weights.",
            rich_help_panel=WORKLOAD,
            metavar="N",
        ),
    ] = 0,
    adapters: Annotated[
        int,
        typer.Option(
            help="Fresh LoRA adapters; 0 serves the base alone. Those of a trace have its names.",
            rich_help_panel=ADAPTERS,
            metavar="N",
            min=0,
        ),
    ] = 8,
    ranks: Annotated[
        str,
        typer.Option(help="Of the adapters, in turn.", rich_help_panel=ADAPTERS, metavar="R,…"),
    ] = "8,16,32,64",
    targets: Targets = None,
    popularity: Annotated[
        str,
        typer.Option(
            help="How requests fall to adapters: S-LoRA's power law, or Punica's four.",
            rich_help_panel=ADAPTERS,
            metavar="|".join(POPULARITIES),
        ),
    ] = "zipf",
    zipf_alpha: Annotated[
        float, typer.Option(help="Of zipf and s-lora.", rich_help_panel=ADAPTERS, metavar="X")
    ] = 1.0,
    finetune: Annotated[
        str | None,
        typer.Option(
            help="Train an adapter meanwhile: a .jsonl or .txt file, or random for random tokens.",
            show_default=False,
            rich_help_panel=FINETUNING,
            metavar="FILE|random",
        ),
    ] = None,
    finetune_len: Annotated[
        int,
        typer.Option(
            help="Tokens of a random example.", rich_help_panel=FINETUNING, metavar="N", min=2
        ),
    ] = 128,
    finetune_batch_size: Annotated[
        int, typer.Option(help="Examples a step.", rich_help_panel=FINETUNING, metavar="N", min=1)
    ] = 2,
    finetune_rank: Annotated[
        int, typer.Option(help="LoRA rank.", rich_help_panel=FINETUNING, metavar="R", min=1)
    ] = 16,
    sharing: Annotated[
        str,
        typer.Option(
            help="How finetuning goes beside requests, or which of the two runs alone.",
            rich_help_panel=FINETUNING,
            metavar="|".join(SHARINGS),
        ),
    ] = "co-serving",
    inference_frequency: Annotated[
        int,
        typer.Option(
            help="Of temporal: steps that serve between two that train.",
            rich_help_panel=FINETUNING,
            metavar="N",
        ),
    ] = 128,
    finetuning_share: Annotated[
        float,
        typer.Option(
            help="Of spatial: finetuning's part of the time.",
            rich_help_panel=FINETUNING,
            metavar="X",
        ),
    ] = 0.5,
    ttft_slo_ms: Annotated[
        float | None,
        typer.Option(
            help="Promise for first tokens.",
            show_default=False,
            rich_help_panel=ENGINE,
            metavar="MS",
        ),
    ] = None,
    tpot_slo_ms: Annotated[
        float | None,
        typer.Option(
            help="Promise for the mean time of an output token after the first.",
            show_default=False,
            rich_help_panel=ENGINE,
            metavar="MS",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="In which order requests are admitted.",
            rich_help_panel=ENGINE,
            metavar="|".join(POLICIES),
        ),
    ] = "fcfs",
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests at once.", rich_help_panel=ENGINE, metavar="N")
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens of a step.", rich_help_panel=ENGINE, metavar="N")
    ] = 4096,
    kv_cache_gib: Annotated[
        float,
        typer.Option(
            "--kv-cache-gib",
            help="Memory of the KV cache and the adapters in it.",
            rich_help_panel=ENGINE,
            metavar="GIB",
        ),
    ] = 4.0,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share the KV blocks of prompts that begin alike.",
            rich_help_panel=ENGINE,
        ),
    ] = True,
    load_format: Annotated[
        str,
        typer.Option(
            help="dummy gives the model random weights: a configuration is enough.",
            metavar="auto|dummy",
        ),
    ] = "auto",
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw latencies over time, and their distribution.", metavar="FILE.svg"),
    ] = None,
    json: Json = False,
    dtype: Dtype = None,
    backend: ModelBackend = None,
    device: Device = None,
) -> None:
    """Serve a workload, beside finetuning or not, and report how it went.

    Prompts are random tokens, and every output has the length that the workload asks for.
    """
    _one_of("--load-format", load_format, ("auto", "dummy"))
    _one_of("--policy", policy, POLICIES)
    _one_of("--sharing", sharing, SHARINGS)
    if sharing == "finetuning-only" and finetune is None:
        raise typer.BadParameter(
            "there is nothing to train; give --finetune", param_hint="--sharing"
        )
    if sharing == "inference-only" and finetune is not None:
        raise typer.BadParameter("it does not go with --finetune", param_hint="--sharing")
    options = WorkloadOptions(
        request_rate,
        burstiness,
        arrivals,
        num_prompts,
        duration,
        input_len,
        output_len,
        adapters,
        popularity,
        zipf_alpha,
        tenants,
        seed,
        trace,
    )
    rank_list = _ranks(ranks)
    executor = _executor(model, load_format, dtype, backend, device, seed)
    workload = options.workload(executor.max_positions)
    names = workload.adapters
    if trace is None or not set(names) - {f"adapter-{i}" for i in range(adapters)}:
        names = tuple(f"adapter-{index}" for index in range(adapters))
    with busy(f"making {count_text(len(names), 'adapter')}"):
        _add_adapters(executor, names, rank_list, targets, seed)
    engine = _engine(
        executor,
        _policy(policy),
        _sharing(sharing, inference_frequency, finetuning_share),
        {
            "running": max_num_seqs,
            "tokens": max_num_batched_tokens,
            "ttft_slo_s": None if ttft_slo_ms is None else ttft_slo_ms / 1e3,
            "tpot_slo_s": None if tpot_slo_ms is None else tpot_slo_ms / 1e3,
        },
        kv_cache_gib,
        prefix_caching,
    )
    if finetune is not None:
        if ttft_slo_ms is None and tpot_slo_ms is None:
            engine.calibrate()  # without promises jobs go by the time of an idle step
        with busy("compiling the finetuning job"):
            _finetune(engine, finetune, finetune_len, finetune_batch_size, finetune_rank, seed)
    served = None if sharing == "finetuning-only" else workload
    report = _run(engine, served, workload, random_prefix_len, seed)
    if plot is not None:
        from pcg.simulate.latency_plot import serving_svg

        plot.write_text(serving_svg(report, f"{executor.program.name}, {sharing}"), "utf-8")
    if json:
        print_json(
            {
                "model": executor.program.name,
                "sharing": sharing,
                "policy": policy,
                "adapters": len(names),
                "seed": seed,
                "ttft_slo_ms": ttft_slo_ms,
                "tpot_slo_ms": tpot_slo_ms,
                **report.to_json(),
            }
        )
        return
    _print(report, plot)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}", param_hint=option)


def _ranks(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r}; use ranks as 8,16,32", param_hint="--ranks")
    return found


def _executor(
    model: str,
    load_format: str,
    dtype: str | None,
    backend: Any,
    device: str | None,
    seed: int,
) -> Executor:
    if load_format == "auto":
        return open_executor(
            model,
            {},
            weights=None,
            dtype=dtype,
            backend=backend,
            device=device,
            trust_edits=False,
        )
    with busy(f"compiling {model}"):
        from pcg import compiler

        return compiler.compile_random(
            model, backend=backend or "torch", dtype=dtype, device=device, seed=seed
        )


def _add_adapters(
    executor: Executor, names: tuple[str, ...], ranks: list[int], targets: str | None, seed: int
) -> None:
    from .arguments import lora_of

    for index, name in enumerate(names):
        recipe = lora_of(ranks[index % len(ranks)], None, targets)
        executor.add_adapter(name, recipe, seed=seed + index)


def _policy(name: str) -> Policy:
    from pcg.runtime.engine.policies import AdapterClustering, EarlyAbort, FairShare, Fcfs

    known: dict[str, type[Policy]] = {
        "fcfs": Fcfs,
        "adapter-clustering": AdapterClustering,
        "early-abort": EarlyAbort,
        "fair-share": FairShare,
    }
    return known[name]()


def _sharing(name: str, frequency: int, share: float) -> Sharing:
    from pcg.runtime.engine.sharing import (
        CoServing,
        InferenceOnly,
        SpatialSharing,
        TemporalSharing,
    )

    if name == "temporal":
        return TemporalSharing(frequency)
    if name == "spatial":
        return SpatialSharing(share)
    return InferenceOnly() if name == "inference-only" else CoServing()


def _engine(
    executor: Executor,
    policy: Policy,
    sharing: Sharing,
    limits: dict[str, Any],
    kv_cache_gib: float,
    prefix_caching: bool,
) -> Engine:
    from pcg.runtime.engine.limits import Limits

    with busy("measuring how long steps take"):
        return executor.engine(
            Limits(**limits),
            kv_cache_bytes=int(kv_cache_gib * 2**30),
            policy=policy,
            sharing=sharing,
            prefix_caching=prefix_caching,
        )


def _finetune(
    engine: Engine, source: str, length: int, batch_size: int, rank: int, seed: int
) -> None:
    """Give the engine a job that does not end by itself."""
    from random import Random

    from pcg.runtime.data.example import Example
    from pcg.runtime.training.training_data import vocabulary_size

    from .arguments import lora_of

    data: Any = Path(source)
    if source == "random":
        random, vocabulary = Random(f"{seed} examples"), vocabulary_size(engine.state.program)
        rows = [random.choices(range(vocabulary), k=length) for _ in range(16 * batch_size)]
        data = [Example(row, row) for row in rows]
    engine.finetune(
        data, JOB, peft=lora_of(rank, None, None), batch_size=batch_size, max_steps=10**9
    )


def _run(
    engine: Engine,
    served: Workload | None,
    workload: Workload,
    prefix_tokens: int,
    seed: int,
) -> ServingReport:
    """Serve, beside the job if there is one; without requests train for as long as they take."""
    from pcg.runtime.training.training_data import vocabulary_size
    from pcg.simulate.replay import replay, train

    state = engine.state
    try:
        if served is None:
            with busy("finetuning"):
                return train(engine, max(workload.duration_s, 1.0))
        with busy(f"serving {count_text(len(served), 'request')}"):
            return replay(
                engine,
                served,
                state.adapters,
                vocabulary_size(state.program),
                seed=seed,
                prefix_tokens=prefix_tokens,
                most_positions=state.max_positions,
            )
    finally:
        for job in list(engine.jobs):
            engine.cancel_job(job.name)


def _print(report: ServingReport, plot: Path | None) -> None:
    from .serving_tables import latency_table, outcome_table

    console = out()
    console.print(outcome_table(report))
    console.print()
    console.print(latency_table(report))
    if plot is not None:
        err().print(f"plot: {plot}", style="dim", soft_wrap=True)
