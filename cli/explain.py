"""`pcg explain`: what a model needs under a recipe, without its weights."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import Alpha, Dtype, Json, Model, Peft, Rank, Targets, TensorParallel, peft_of
from .console import busy, print_json


def explain_command(
    model: Model,
    peft: Peft = "lora",
    rank: Rank = None,
    alpha: Alpha = None,
    targets: Targets = None,
    tp: TensorParallel = 1,
    batch: Annotated[int, typer.Option(help="Sequences of a finetuning step.", metavar="B")] = 1,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.", metavar="S")] = 1024,
    dtype: Dtype = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor that is kept for backward.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the memory that a model and a recipe need, and why.

    Weights are not needed.
    """
    if json and tensors:
        raise typer.BadParameter("--json lists every tensor anyway", param_hint="--tensors")
    from pcg.source import resolve

    source = resolve(model)
    recipe = peft_of(peft, rank, alpha, targets)
    with busy(f"tracing {source.name}"):
        from pcg import compiler

        report = compiler.explain(model, recipe, tp=tp, batch=batch, seq=seq, dtype=dtype)
    if json:
        print_json(report.to_json())
    else:
        print(report.to_text(tensors=tensors))
