"""`pcg serve`: OpenAI's API over a model; `pcg serve-base`: its weights alone, for clients."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from pcg.options import CompileOptions
from pcg.serve.options import ServeOptions
from pcg.split.base.options import BaseOptions

from .console import err
from .executors import PlaceOptions, files_of, open_executor, ranks_of
from .options.arguments import Runnable
from .options.fields import Given, Only
from .run import SERVING


def serve_command(
    model: Runnable,
    options: ServeOptions,
    compiling: Annotated[Given[CompileOptions], Only(SERVING)],
    place: PlaceOptions,
) -> None:
    """Serve a model and its adapters by OpenAI's API, until SIGTERM or Ctrl-C."""
    degree = ranks_of(model, compiling.values, place)
    if degree > 1:
        raise typer.BadParameter(
            f"a server runs on one rank, not on {degree}; leave it out", param_hint="--tp"
        )
    from pcg.serve.engine.process import process_client
    from pcg.serve.server import serve

    load = partial(open_executor, model, None, compiling.values, place)

    def say(text: str) -> None:
        err().print(text, soft_wrap=True)

    files = partial(files_of, model, place)
    if not serve(options, partial(process_client, load), say, files=files):
        raise typer.Exit(1)


BASE = ("dtype",)
"""Options of compiling that a base has."""


def serve_base_command(
    model: Runnable,
    options: BaseOptions,
    compiling: Annotated[Given[CompileOptions], Only(BASE)],
    place: PlaceOptions,
) -> None:
    """Run the base's products for clients (pcg.connect), until SIGTERM or Ctrl-C."""
    degree = ranks_of(model, compiling.values, place)
    if degree > 1:
        raise typer.BadParameter(
            f"{model} was compiled for {degree} ranks, and a base executor runs on one"
        )
    from pcg.split.base.base_executor import tokenizer_files
    from pcg.split.base.serve_base import serve_base

    def say(text: str) -> None:
        err().print(text, soft_wrap=True, markup=False, highlight=False)

    values = {**compiling.values, "backend": "torch", "packed_weights": False}
    load = partial(open_executor, model, None, values, place)
    serve_base(options, load, say, tokenizer_files(files_of(model, place)))
