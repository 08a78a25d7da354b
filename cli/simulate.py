"""`pcg simulate`: the papers' serving experiments on simulated machines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_serve import at_least
from .options.console import busy, out, print_json, print_table, table
from .options.fields import Json

if TYPE_CHECKING:
    from pcg.runtime.metrics.report import ServingReport
    from pcg.simulate.flexllm import CoServed


class Experiment(StrEnum):
    """The experiment to simulate."""

    FLEXLLM = "flexllm"
    S_LORA = "s-lora"
    PUNICA = "punica"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of a simulated experiment.

    Attributes:
        model: simulate only this model of the experiment: Llama-3.1-8B, Qwen2.5-14B, Qwen2.5-32B;
            S1, S2, S4. Repeatable.
        rate: requests a second of all pipelines or GPUs; flexllm has 4, 8, 12, 16 and 20 by
            default, s-lora those of its table 2, punica 30. Repeatable with flexllm.
        duration: seconds of arrivals; by default as in the paper: 1200, 300 and 3600.
        seed: the seed of the workload.
        seeds: with flexllm, the number of workloads, each with the next seed; means and spread.
        sharing: with flexllm, how finetuning and inference share the GPUs: co-serving, the default;
            temporal-64, -128 or -512; spatial-25 or -50; separate-25, -50 or -75; inference-only.
            Repeatable.
        fit: with flexllm, let GPUs reach the share of their peak at which 4 requests/s leave the
            paper's finetuning throughput, instead of the cost model's share.
        migration: with punica, move running requests between GPUs, so that some GPUs can be
            released.
    """

    model: Sequence[str] = ()
    rate: Sequence[float] = ()
    duration: float | None = None
    seed: int = 0
    seeds: int = 1
    sharing: Sequence[str] = ()
    fit: bool = False
    migration: bool = True

    def __post_init__(self) -> None:
        for rate in self.rate:
            at_least("rate", rate, 0.01)
        at_least("seeds", self.seeds, 1)
        if self.duration is not None:
            at_least("duration", self.duration, 1)


def simulate_command(
    experiment: Annotated[Experiment, typer.Argument(show_default=False)],
    options: SimulateOptions,
    json: Json = False,
) -> None:
    """Simulate a paper's serving experiment.

    The engine's own scheduler, pool and policies run on a simulated clock; step times follow from
    the data sheets of the paper's GPUs. flexllm: finetuning and inference on shared GPUs. s-lora:
    throughput for numbers of adapters. punica: an hour of a cluster with consolidation.
    """
    if experiment is Experiment.FLEXLLM:
        _flexllm(options, json)
        return
    if options.sharing or options.fit or options.seeds > 1:
        raise typer.BadParameter(f"{experiment} has none", param_hint="--sharing, --seeds, --fit")
    if len(options.rate) > 1:
        raise typer.BadParameter("this experiment takes one rate", param_hint="--rate")
    if experiment is Experiment.S_LORA:
        _s_lora(options, json)
    elif options.model:
        raise typer.BadParameter("punica has one model", param_hint="--model")
    else:
        _punica(options, json)


PUNICA_RATE_PER_S = 30.0
"""Mean rate of the hour; the paper's curve has no numbers. The peak is twice the mean."""


def _chosen(names: Sequence[str], known: Sequence[str], option: str = "--model") -> Sequence[str]:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r}; there are {', '.join(known)}", param_hint=option)
    return names or known


# ------------------------------------------------------------------------------------ FlexLLM


def _flexllm(options: SimulateOptions, json: bool) -> None:
    from pcg.parallel.costs.accelerators import ASSUMED
    from pcg.simulate import flexllm

    settings = {setting.name: setting for setting in flexllm.MODELS}
    seeds = range(options.seed, options.seed + options.seeds)
    duration = options.duration or 1200.0
    _chosen(options.sharing, list(flexllm.ARRANGEMENTS), "--sharing")
    rows: list[dict[str, Any]] = []
    for name in _chosen(options.model, list(settings)):
        setting = settings[name]
        share = ASSUMED.product
        if options.fit:
            with busy(f"fitting {name}"):
                share = flexllm.fitted_share(setting)
        with busy(f"compiling {name}"):
            program = flexllm.co_serving_program(setting, share)
        for arrangement in options.sharing or ["co-serving"]:
            for rate in options.rate or flexllm.RATES:
                with busy(f"{name}, {arrangement}, at {rate:g} requests/s"):
                    reports = [
                        flexllm.co_serving(
                            program,
                            setting,
                            rate,
                            arrangement=arrangement,
                            seed=seed,
                            duration_s=duration,
                        )
                        for seed in seeds
                    ]
                row = _flexllm_row(rows, setting, arrangement, rate, reports)
                rows.append({**row, "product_share": share})
    if json:
        asked = {"experiment": "flexllm", "duration_s": duration, "seeds": list(seeds)}
        print_json({**asked, "rows": rows})
        return
    compared = ("kept", "of co-serving", "paper")
    numbers = ("req/s", "finetuning tok/s", *compared, "SLOs met", "gaps within", "output")
    shown = table("model", "tp", "sharing", *numbers, right=("tp", *numbers))
    for row in rows:
        paper, beside = row["paper_finetuning_tokens_per_s"], row["of_co_serving"]
        spread = row["finetuning_tokens_per_s_std"]
        shown.add_row(
            row["model"],
            str(row["tp"]),
            row["sharing"],
            f"{row['rate_per_s']:g}",
            f"{row['finetuning_tokens_per_s']:,.0f}" + (f" ± {spread:,.0f}" if spread else ""),
            "–" if row["of_first_rate"] is None else f"{row['of_first_rate']:.1%}",
            "–" if beside is None else f"{beside:.1%}",
            "–" if paper is None else f"{paper:,.0f}",
            f"{row['slo_attainment']:.1%}",
            f"{row['gap_attainment']:.1%}",
            f"{row['output_tokens_per_s']:,.0f}",
        )
    print_table(shown)


def _flexllm_row(
    before: Sequence[dict[str, Any]],
    setting: CoServed,
    arrangement: str,
    rate: float,
    reports: Sequence[ServingReport],
) -> dict[str, Any]:
    """Return the means over the seeds, and their ratios to earlier rows."""
    tokens = [report.finetuning_throughput for report in reports]
    mean = statistics.fmean(tokens)
    attained = [report.slo_attainment or 0.0 for report in reports]
    gaps = [1.0 if report.gap_attainment is None else report.gap_attainment for report in reports]

    def of(name: str, at: float | None) -> float | None:
        for row in before:
            known = (row["model"], row["sharing"]) == (setting.name, name)
            if known and at in (None, row["rate_per_s"]):
                base = row["finetuning_tokens_per_s"]
                return mean / base if base else None
        return 1.0 if name == arrangement and mean else None

    return {
        "model": setting.name,
        "tp": setting.tp,
        "sharing": arrangement,
        "rate_per_s": rate,
        "came_per_s": statistics.fmean(
            len(report.requests) / report.duration_s for report in reports
        ),
        "finetuning_tokens_per_s": mean,
        "finetuning_tokens_per_s_std": statistics.stdev(tokens) if len(tokens) > 1 else 0.0,
        "of_first_rate": of(arrangement, None),
        "of_co_serving": of("co-serving", rate),
        "paper_finetuning_tokens_per_s": setting.paper.get((arrangement, rate)),
        "slo_attainment": statistics.fmean(attained),
        "slo_attainment_least": min(attained),
        "gap_attainment": statistics.fmean(gaps),
        "output_tokens_per_s": statistics.fmean(report.output_throughput for report in reports),
        "reports": [report.to_json() for report in reports],
    }


# ------------------------------------------------------------------------------------- S-LoRA


def _s_lora(options: SimulateOptions, json: bool) -> None:
    from pcg.simulate import s_lora

    rate, seed, duration = next(iter(options.rate), None), options.seed, options.duration or 300.0
    rows: list[dict[str, Any]] = []
    for name in _chosen(options.model, list(s_lora.S_LORA_MODELS)):
        with busy(f"compiling {name}"):
            program = s_lora.many_adapters_program(name)
        for adapters, paper in s_lora.S_LORA_MODELS[name].paper.items():
            with busy(f"{name} with {adapters} adapters"):
                report = s_lora.many_adapters(
                    program, name, adapters, rate_per_s=rate, seed=seed, duration_s=duration
                )
            rows.append(
                {
                    "setting": name,
                    "adapters": adapters,
                    "paper_request_throughput": paper,
                    "report": report.to_json(),
                }
            )
    if json:
        print_json({"experiment": "s-lora", "duration_s": duration, "seed": seed, "rows": rows})
        return
    heads = ("adapters", "req/s", "paper", "output tok/s", "first token, mean s", "SLO met")
    shown = table("setting", *heads, right=heads)
    for row in rows:
        numbers = row["report"]
        shown.add_row(
            row["setting"],
            f"{row['adapters']:,}",
            f"{numbers['request_throughput']:.2f}",
            f"{row['paper_request_throughput']:.2f}",
            f"{numbers['output_throughput']:,.0f}",
            f"{numbers['mean_ttft_ms'] / 1e3:.2f}",
            f"{numbers['ttft_attainment']:.1%}",
        )
    print_table(shown)


# ------------------------------------------------------------------------------------- Punica


def _punica(options: SimulateOptions, json: bool) -> None:
    from pcg.simulate import punica

    rate, duration = next(iter(options.rate), PUNICA_RATE_PER_S), options.duration or 3600.0
    with busy("compiling Llama-2-7B"):
        program = punica.cluster_program()
    with busy(f"{duration:g} s at {rate:g} requests/s"):
        minutes, first_s = punica.cluster_hour(
            program, rate, seed=options.seed, duration_s=duration, migrates=options.migration
        )
    if json:
        print_json(
            {
                "experiment": "punica",
                "duration_s": duration,
                "rate_per_s": rate,
                "seed": options.seed,
                "migration": options.migration,
                "mean_ttft_ms": first_s * 1e3,
                "minutes": [
                    {**dataclasses.asdict(minute), "used": minute.used} for minute in minutes
                ],
            }
        )
        return
    heads = ("minute", "req/s", "output tok/s", "GPUs in use", "their batch", "moved", "freed")
    shown = table(*heads, right=heads)
    every = max(1, len(minutes) // 20)
    for minute in minutes[::every]:
        used = [place for place, busy in enumerate(minute.busy) if busy > 0.0]
        # Weight a GPU by the part of the minute in which it was in use.
        requests = sum(minute.batch[place] * minute.busy[place] for place in used)
        shown.add_row(
            str(minute.minute),
            f"{minute.requests_per_s:.1f}",
            f"{minute.output_tokens_per_s:,.0f}",
            f"{minute.used:.1f}",
            f"{requests / max(minute.used, 1e-9):.1f}",
            str(minute.moved),
            str(minute.freed),
        )
    print_table(shown)
    used_s = 60 * sum(minute.used for minute in minutes)
    out().print(f"\nfirst token after {first_s:.2f} s on average; {used_s:,.0f} s of GPUs in use")
