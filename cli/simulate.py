"""`pcg simulate`: the papers' serving experiments on simulated machines."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import Json
from .console import busy, out, print_json, table

if TYPE_CHECKING:
    from pcg.paper_runs import ClusterMinute


class Experiment(StrEnum):
    """What to simulate."""

    FLEXLLM = "flexllm"
    S_LORA = "s-lora"
    PUNICA = "punica"


Duration = Annotated[
    float | None,
    typer.Option(
        help="Seconds that requests come; the paper's own by default: 1200, 300 and 3600.",
        show_default=False,
        metavar="SECONDS",
        min=1.0,
    ),
]
Rate = Annotated[
    list[float] | None,
    typer.Option(
        help="Requests a second of all pipelines or GPUs; flexllm has 4, 8, 12, 16 and 20 by "
        "default, s-lora those of its table 2, punica 30. Repeatable with flexllm.",
        show_default=False,
        metavar="RATE",
        min=0.01,
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Only this one of the experiment's models: Llama-3.1-8B, Qwen2.5-14B, Qwen2.5-32B; "
        "S1, S2, S4. Repeatable.",
        show_default=False,
        metavar="NAME",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the workload.", metavar="N")]


def simulate_command(
    experiment: Annotated[Experiment, typer.Argument(show_default=False)],
    model: Setting = None,
    rate: Rate = None,
    duration: Duration = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Simulate a paper's serving experiment.

    The engine's own scheduler, pool and policies run by a clock; steps take what the data sheets of
    the paper's GPUs say. flexllm: finetuning beside inference. s-lora: throughput over numbers of
    adapters. punica: an hour of a cluster, consolidated.
    """
    if experiment is Experiment.FLEXLLM:
        _flexllm(model, rate, duration or 1200.0, seed, json)
    elif experiment is Experiment.S_LORA:
        _s_lora(model, _one(rate), duration or 300.0, seed, json)
    else:
        if model:
            raise typer.BadParameter("punica has one model", param_hint="--model")
        _punica(_one(rate) or PUNICA_RATE_PER_S, duration or 3600.0, seed, json)


PUNICA_RATE_PER_S = 30.0
"""Mean of the hour; the paper's curve has no numbers. The peak is twice as much."""


def _one(rates: list[float] | None) -> float | None:
    if rates and len(rates) > 1:
        raise typer.BadParameter("this experiment takes one rate", param_hint="--rate")
    return rates[0] if rates else None


def _chosen(names: list[str] | None, known: list[str]) -> list[str]:
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(
                f"{name!r}; there are {', '.join(known)}", param_hint="--model"
            )
    return names or known


def _flexllm(
    names: list[str] | None, rates: list[float] | None, duration: float, seed: int, json: bool
) -> None:
    from pcg import paper_runs

    settings = {setting.name: setting for setting in paper_runs.FLEXLLM_MODELS}
    rows: list[dict[str, Any]] = []
    for name in _chosen(names, list(settings)):
        setting = settings[name]
        with busy(f"compiling {name}"):
            program = paper_runs.co_serving_program(setting)
        for rate in rates or paper_runs.FLEXLLM_RATES:
            with busy(f"{name} at {rate:g} requests/s"):
                report = paper_runs.co_serving(
                    program, setting, rate, seed=seed, duration_s=duration
                )
            first = next((row for row in rows if row["model"] == name), None)
            tokens = report.finetuning_throughput
            rows.append(
                {
                    "model": name,
                    "tp": setting.tp,
                    "rate_per_s": rate,
                    "finetuning_tokens_per_s": tokens,
                    "of_first_rate": tokens / first["finetuning_tokens_per_s"] if first else 1.0,
                    "paper_finetuning_tokens_per_s": setting.paper.get(rate),
                    "slo_attainment": report.slo_attainment,
                    "report": report.to_json(),
                }
            )
    if json:
        print_json({"experiment": "flexllm", "duration_s": duration, "seed": seed, "rows": rows})
        return
    heads = ("req/s", "finetuning tok/s", "kept", "paper", "SLOs met", "output tok/s")
    made = table("model", "tp", *heads, right=("tp", *heads))
    for row in rows:
        paper = row["paper_finetuning_tokens_per_s"]
        made.add_row(
            row["model"],
            str(row["tp"]),
            f"{row['rate_per_s']:g}",
            f"{row['finetuning_tokens_per_s']:,.0f}",
            f"{row['of_first_rate']:.1%}",
            "–" if paper is None else f"{paper:,.0f}",
            f"{row['slo_attainment']:.1%}",
            f"{row['report']['output_throughput']:,.0f}",
        )
    out().print(made)


def _s_lora(
    names: list[str] | None, rate: float | None, duration: float, seed: int, json: bool
) -> None:
    from pcg import paper_runs

    rows: list[dict[str, Any]] = []
    for name in _chosen(names, list(paper_runs.S_LORA_MODELS)):
        with busy(f"compiling {name}"):
            program = paper_runs.many_adapters_program(name)
        for adapters, paper in paper_runs.S_LORA_MODELS[name].paper.items():
            with busy(f"{name} with {adapters} adapters"):
                report = paper_runs.many_adapters(
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
    made = table("setting", *heads, right=heads)
    for row in rows:
        found = row["report"]
        made.add_row(
            row["setting"],
            f"{row['adapters']:,}",
            f"{found['request_throughput']:.2f}",
            f"{row['paper_request_throughput']:.2f}",
            f"{found['output_throughput']:,.0f}",
            f"{found['mean_ttft_ms'] / 1e3:.2f}",
            f"{found['ttft_attainment']:.1%}",
        )
    out().print(made)


def _punica(rate: float, duration: float, seed: int, json: bool) -> None:
    from pcg import paper_runs

    with busy("compiling Llama-2-7B"):
        program = paper_runs.cluster_program()
    with busy(f"{duration:g} s at {rate:g} requests/s"):
        minutes, first_s = paper_runs.cluster_hour(program, rate, seed=seed, duration_s=duration)
    if json:
        print_json(
            {
                "experiment": "punica",
                "duration_s": duration,
                "rate_per_s": rate,
                "seed": seed,
                "mean_ttft_ms": first_s * 1e3,
                "minutes": [
                    {
                        "minute": one.minute,
                        "requests_per_s": one.requests_per_s,
                        "output_tokens_per_s": one.output_tokens_per_s,
                        "busy": list(one.busy),
                        "batch": list(one.batch),
                    }
                    for one in minutes
                ],
            }
        )
        return
    _print_cluster(minutes, first_s)


def _print_cluster(minutes: tuple[ClusterMinute, ...], first_s: float) -> None:
    heads = ("minute", "req/s", "output tok/s", "GPUs in use", "their batch", "their time used")
    made = table(*heads, right=heads)
    every = max(1, len(minutes) // 20)
    for one in minutes[::every]:
        used = [place for place, busy in enumerate(one.busy) if busy > 0.0]
        count = max(1, len(used))
        made.add_row(
            str(one.minute),
            f"{one.requests_per_s:.1f}",
            f"{one.output_tokens_per_s:,.0f}",
            str(len(used)),
            f"{sum(one.batch[place] for place in used) / count:.1f}",
            f"{sum(one.busy[place] for place in used) / count:.0%}",
        )
    out().print(made)
    out().print(f"\nfirst token after {first_s:.2f} s on average")
