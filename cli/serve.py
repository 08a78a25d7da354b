"""`pcg serve`: OpenAI's API over a model, with adapters as models."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from pcg.options import CompileOptions
from pcg.serve.options import ServeOptions

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
