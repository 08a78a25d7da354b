"""`pcg data check`: whether the data folder of a server is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcg.units import counted

from .options.console import err


def check_command(
    directory: Annotated[Path, typer.Argument(help="The folder of `pcg serve --data-dir`.")],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move what is damaged or unknown to quarantine, and bring back from there what "
            "the database names.",
        ),
    ] = False,
) -> None:
    """Compare a server's data folder with its database and checksums, and repair it.

    Each line names a path that is missing, damaged or unknown. Exits 1 if any is left.
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
