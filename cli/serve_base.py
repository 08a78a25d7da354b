"""`pcg serve-base`: the frozen base of a model, for clients that keep their adapters."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from pcg.options import CompileOptions
from pcg.split.base.options import BaseOptions

from .console import err
from .executors import PlaceOptions, files_of, open_executor, ranks_of
from .options.arguments import Runnable
from .options.fields import Given, Only

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
