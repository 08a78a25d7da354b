"""Printing of the commands: results on standard output, all else on standard error.

Consoles are made when they are needed: rich takes a while to import, and tests change the streams.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def out() -> Console:
    """The console of results."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def err() -> Console:
    """The console of progress and messages."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def fail(message: str) -> None:
    """Print why a command ends; as it is, so that a message can be copied and searched for."""
    sys.stdout.flush()
    print(message, file=sys.stderr)


def print_json(value: object) -> None:
    """Print the one object of a command with --json."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show that something takes a while, on a terminal."""
    console = err()
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} …"):
        yield


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table with these heads; the columns in `right` hold numbers."""
    from rich.table import Table

    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return made


def plain(value: Any) -> str:
    """A value of a table; a dash for none."""
    return "–" if value is None else str(value)
