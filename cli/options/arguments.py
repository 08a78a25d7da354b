"""The arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_model(incomplete: str) -> list[str]:
    """The models that ship with pcg, for shells."""
    from pcg.source import shipped

    return [name for name in shipped() if name.lower().startswith(incomplete.lower())]


Model = Annotated[
    str,
    typer.Argument(
        help="Directory with a config.json, hub id, or a model of [cyan]pcg models[/].",
        autocompletion=complete_model,
        show_default=False,
        metavar="MODEL",
    ),
]
Runnable = Annotated[
    str,
    typer.Argument(
        help="Compiled program, a directory or hub id of a model with weights, or a base executor "
        "as split://HOST:PORT.",
        autocompletion=complete_model,
        show_default=False,
        metavar="DIR_OR_MODEL",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]
