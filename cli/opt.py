"""`pcg opt`: passes over graphs in text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def opt_command(
    file: Annotated[
        str | None,
        typer.Argument(help="Graphs as text IR: a file, or - for standard input.", metavar="FILE"),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(
            help="Passes to run, in order: raise,fuse_linears,localize{degree=4}.", metavar="PASSES"
        ),
    ] = None,
    list_passes: Annotated[
        bool, typer.Option("--list", help="List the passes and their options.")
    ] = False,
) -> None:
    """Run passes over graphs in text, and print the graphs.

    The verifier looks at the graphs of the file, and at what each pass makes of them.
    """
    if list_passes:
        _list()
        return
    if file is None:
        raise typer.BadParameter("give a file, or - for standard input", param_hint="FILE")
    from pcg.errors import ParseError
    from pcg.passes.registry import run_text

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ParseError(f"{file} is no text in UTF-8: {error.reason}") from error
    except OSError as error:
        raise ParseError(f"{file} cannot be read: {error.strerror}") from error
    try:
        print(run_text(text, passes), end="")
    except ParseError as error:
        raise ParseError(f"{file}: {error}") from error


def _list() -> None:
    from pcg.passes.registry import PASSES, options_of

    for one in PASSES:
        options = ",".join(f"{name}=…" for name in options_of(one))
        usage = f"{one.name}{{{options}}}" if options else one.name
        print(f"{usage:<40} {(one.__doc__ or '').partition(chr(10))[0]}")
