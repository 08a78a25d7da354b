"""`pcg explain`: what a model needs under a recipe, without its weights."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pcg.errors import PcgError
from pcg.explain.text import comparison

from .arguments import (
    Accumulation,
    Alpha,
    Batch,
    Budget,
    Costs,
    Dtype,
    Json,
    Model,
    OptimizerName,
    OptimizerOptions,
    Peft,
    Rank,
    Seq,
    SequenceParallel,
    Targets,
    TensorParallel,
    TpPlan,
    optimizer_options_of,
    peft_of,
)
from .console import busy, print_json, size_text


def explain_command(
    model: Model,
    peft: Peft = "lora",
    rank: Rank = None,
    alpha: Alpha = None,
    targets: Targets = None,
    tp: TensorParallel = 1,
    costs: Costs = None,
    tp_plan: TpPlan = None,
    sequence_parallel: SequenceParallel = False,
    gradient_accumulation_steps: Accumulation = 1,
    batch: Batch = 1,
    seq: Seq = 1024,
    memory_budget: Budget = None,
    optimizer: OptimizerName = "adamw",
    optimizer_options: OptimizerOptions = None,
    dtype: Dtype = None,
    tensors: Annotated[
        bool,
        typer.Option(
            "--tensors",
            help="Say what becomes of every tensor, and why; over ranks, list all candidates.",
        ),
    ] = False,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="Say what fits this GPU, as H200, A100-80 or L40S. Repeatable.",
            show_default=False,
            metavar="NAME",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Compare methods side by side: words of --peft, parted by commas.",
            show_default=False,
            metavar="METHOD,…",
        ),
    ] = None,
    formula: Annotated[
        bool,
        typer.Option(
            "--formula", help="Print the bytes as formulas, and where the plan stays the optimum."
        ),
    ] = False,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Say what torch's partitioner keeps, too; takes seconds."),
    ] = False,
    json: Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write the report, with figures, as one HTML page.",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Show the memory that a model and a recipe need, and why.

    Weights are not needed.
    """
    if json and tensors:
        raise typer.BadParameter("--json lists every tensor anyway", param_hint="--tensors")
    if html is not None:
        _check_place(html)
    from pcg.source import resolve

    source = resolve(model)
    recipe = peft_of(peft, rank, alpha, targets)
    options: dict[str, Any] = {
        "tp": tp,
        "costs": costs,
        "tp_plan": tp_plan,
        "sequence_parallel": sequence_parallel,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "batch": batch,
        "seq": seq,
        "dtype": dtype,
        "memory_budget": memory_budget,
        "optimizer": optimizer,
        "optimizer_options": optimizer_options_of(optimizer_options),
        "gpus": gpu or (),
        "find_region": formula,
    }
    if compare is not None:
        if tensors or peers or html is not None:
            raise typer.BadParameter(
                "it goes with none of --tensors, --peers and --html", param_hint="--compare"
            )
        methods = {
            name.strip(): peft_of(name.strip(), option="--compare") for name in compare.split(",")
        }
        with busy(f"tracing {source.name}"):
            from pcg.explain import explain as explaining

            reports = explaining.compare(model, methods, **options)
        if json:
            print_json({name: report.to_json() for name, report in reports.items()})
        else:
            print(comparison(reports))
        return
    with busy(f"tracing {source.name}"):
        from pcg.explain import explain as explaining

        report = explaining.explain(model, recipe, peers=peers, **options)
    if json:
        print_json(report.to_json())
    else:
        print(report.to_text(tensors=tensors, formulas=formula))
    if html is not None:
        size = _write_page(html, report.to_html())
        # With --json the one object is alone on standard output.
        print(f"wrote {html} ({size_text(size)})", file=sys.stderr if json else sys.stdout)


def _check_place(path: Path) -> None:
    """Refuse what no page can be written to, before the work."""
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise PcgError(f"--html {path}: it is {kind}; name a file, as report.html")
    if not path.parent.is_dir():
        raise PcgError(
            f"--html {path}: there is no directory {path.parent}; make it first, or name a file "
            "elsewhere"
        )


def _write_page(path: Path, page: str) -> int:
    """Write a page as a whole or not at all; returns its bytes."""
    target = path.resolve()
    beside = target.with_name(f".{secrets.token_hex(4)}.html")
    data = page.encode()
    try:
        beside.write_bytes(data)
        beside.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PcgError(
            f"--html {path}: it cannot be written: {reason}; name a file elsewhere"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    return len(data)
