"""`pcg serve`: OpenAI's API over a model, with adapters as models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pcg.options import CompileOptions
from pcg.serve.options import ServeOptions

from .console import err
from .executors import PlaceOptions, files_of, open_executor, ranks_of
from .options.arguments import Runnable
from .options.fields import Given, Only
from .run import SERVING

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor


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
    from pcg.serve.server import serve

    def load() -> Executor:
        return open_executor(model, None, compiling.values, place)

    def say(text: str) -> None:
        err().print(text, soft_wrap=True)

    def files() -> Path | None:
        return files_of(model, place)

    if not serve(options, load, say, files=files):
        raise typer.Exit(1)
