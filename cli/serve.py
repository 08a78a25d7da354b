"""`pcg serve`: OpenAI's API; `pcg serve-base`: a base executor; `pcg data check`: a data folder."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Annotated, Any

import typer

from pcg.ir.program.manifest import is_program_folder
from pcg.options import CompileOptions
from pcg.serve.engine.options import ServeOptions
from pcg.split.base.options import BaseOptions
from pcg.units import counted

from .options.console import err
from .options.executors import (
    SPLIT,
    PlaceOptions,
    check_alone,
    degree_of,
    files_of,
    on_ranks,
    open_executor,
)
from .options.fields import Given, Only, Runnable
from .run import SERVING


def serve_command(
    model: Runnable,
    options: ServeOptions,
    compiling: Annotated[Given[CompileOptions], Only(SERVING)],
    place: PlaceOptions,
) -> None:
    """Serve a model and its adapters by OpenAI's API, until SIGTERM or Ctrl-C.

    The product of --tp, --pp and --cp is the number of ranks of this machine that serve the model.
    """
    check_alone("pcg serve")
    degree = degree_of(model, compiling.values, place)
    ranks = degree * place.groups
    if options.split_port is not None and model.startswith(SPLIT):
        raise typer.BadParameter(
            f"the weights of {model} are at a base executor; split clients connect there",
            param_hint="--split-port",
        )
    if options.split_port is not None and ranks > 1:
        raise typer.BadParameter(
            f"the {ranks} ranks of a server have no split clients; use one rank, or pcg "
            f"serve-base --tp {degree}",
            param_hint="--split-port",
        )
    from pcg.serve.listening import Listener

    listener = Listener(options)  # answers while the modules below are imported
    gc.disable()  # the imports create no garbage; `serve` enables collection
    from pcg.serve.engine.process import process_client
    from pcg.serve.server import serve

    load = partial(open_executor, model, None, {**compiling.values, "tp": degree}, place)

    def say(text: str) -> None:
        err().print(text, soft_wrap=True)

    files = partial(files_of, model, place)
    engine = partial(process_client, load, degree=ranks)
    restarts = options.restart and ranks > 1
    if not serve(options, engine, say, files=files, listener=listener, restarts=restarts):
        raise typer.Exit(1)


BASE = ("tp", "dtype", "quantization")
"""Compile options of a base executor."""


def serve_base_command(
    model: Runnable,
    options: BaseOptions,
    compiling: Annotated[Given[CompileOptions], Only(BASE)],
    place: PlaceOptions,
) -> None:
    """Run the base's products for clients (pcg.connect), until SIGTERM or Ctrl-C.

    With --tp each rank holds a part of every weight, on its own GPU if the machine has GPUs.
    """
    if model.startswith(SPLIT):
        raise typer.BadParameter(
            f"{model} is a base executor already; give the model that it has", param_hint="MODEL"
        )
    if place.pp > 1:
        raise typer.BadParameter(
            "a base's layers may be at several base executors (--layers); use --pp 1",
            param_hint="--pp",
        )
    if place.cp > 1:
        raise typer.BadParameter(
            "a base runs the rows of all clients on each rank; use --tp", param_hint="--cp"
        )
    degree = degree_of(model, compiling.values, place)
    if options.layers is not None and (degree > 1 or is_program_folder(model)):
        raise typer.BadParameter("it is for a model on one rank", param_hint="--layers")
    if degree > 1 and compiling.values.get("quantization"):
        raise typer.BadParameter(
            "a base executor over ranks holds float weights; use --tp 1",
            param_hint="--quantization",
        )
    if degree == 1:
        serve_alone(model, options, place, compiling.values)
        return
    if is_program_folder(model):
        raise typer.BadParameter(
            f"{model} was compiled for {degree} ranks, in parts that clients do not know; give the "
            f"model itself, with --tp {degree}"
        )
    act = partial(serve_as_rank, model, options, place, compiling.values.get("dtype"), degree)
    on_ranks(degree, act, stops=(SIGINT, SIGTERM))


def serve_alone(
    model: str, options: BaseOptions, place: PlaceOptions, compiling: Mapping[str, Any]
) -> None:
    """Serve a base in this process."""
    from pcg.split.base.base_executor import BaseExecutor, tokenizer_files
    from pcg.split.base.serve_base import serve_base

    values = {**compiling, "backend": "torch", "packed_weights": False}

    def load() -> BaseExecutor:
        if options.layers is not None:
            from pcg.split.base.serve_base import layers_executor

            named = {name: compiling.get(name) for name in ("dtype", "quantization")}
            base = BaseExecutor(layers_executor(model, options.layers, place.device, **named))
            base.leave_absent()
            return base
        return BaseExecutor(open_executor(model, None, values, place))

    serve_base(options, load, _say, tokenizer_files(files_of(model, place)))


def serve_as_rank(
    model: str, options: BaseOptions, place: PlaceOptions, dtype: str | None, degree: int
) -> None:
    """Serve a base as a rank of its group."""
    from pcg.split.base.base_executor import tokenizer_files
    from pcg.split.base.serve_base import serve_over_ranks

    files = tokenizer_files(files_of(model, place))
    serve_over_ranks(model, dtype, place.device, degree, options, files, _say)
    sys.stderr.flush()
    os._exit(0)  # the stopped launcher never reads the result that a rank would deliver


def _say(text: str) -> None:
    err().print(text, soft_wrap=True, markup=False, highlight=False)


# --------------------------------------------------------------------------------------------- data


def check_command(
    directory: Annotated[Path, typer.Argument(help="The folder of `pcg serve --data-dir`.")],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move damaged or unknown paths to quarantine, and restore quarantined paths "
            "that the database names.",
        ),
    ] = False,
) -> None:
    """Compare a server's data folder with its database and checksums, and repair it.

    Each line names a missing, damaged or unknown path. Exits with 1 if a problem remains.
    """
    from pcg.serve.store.check import check_folder

    lines = 0

    def say(line: str) -> None:
        nonlocal lines
        lines += 1
        print(line)

    wrong = check_folder(directory, say, repairs=repair)
    if wrong:
        err().print(f"{counted(wrong, 'problem')}; --repair mends them, see docs/serving.md")
        raise typer.Exit(1)
    if not lines:
        print(f"{directory} is whole")
