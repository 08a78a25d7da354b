"""Output of the commands: results on standard output, everything else on standard error.

Consoles are created on first use, as rich is slow to import and tests replace the streams. The path
of a file is checked before the work; a page is written atomically.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pcg.errors import PcgError
from pcg.files import check_writable, is_directory, is_file, is_there
from pcg.units import size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_WIDEST = 10_000


def out() -> Console:
    """Return a console for results, on standard output."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def err() -> Console:
    """Return a console for progress and messages, on standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def fail(message: str) -> None:
    """Print the reason for a failure as plain text, so that users can copy and search it."""
    sys.stdout.flush()
    print(message, file=sys.stderr)


def print_json(value: object) -> None:
    """Print the JSON object of a command with --json."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a spinner for a slow operation if standard error is a terminal."""
    console = err()
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} …"):
        yield


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table with these columns; the columns in `right` hold numbers.

    `print_table` wraps text, and never cuts a number.
    """
    from rich.table import Table

    rows = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_number = name in right
        justify: Literal["left", "right"] = "right" if is_number else "left"
        rows.add_column(name, justify=justify, no_wrap=is_number, overflow="fold")
    return rows


def print_table(rows: Table, console: Console | None = None) -> None:
    """Print a table: a line for each row, or wrapped text on a terminal.

    A table whose numbers and words need more columns than the terminal has is wider.
    """
    from rich.measure import Measurement

    console = console or out()
    size = Measurement.get(console, console.options.update(max_width=_WIDEST), rows)
    width = max(console.width, size.minimum) if console.is_terminal else size.maximum
    console.print(rows, width=width, crop=False)


def plain_text(text: str) -> str:
    """Return a help text without rich's markup."""
    return re.sub(r"(?<!\\)\[/?[a-z ]*\]", "", text).replace("\\[", "[")


def plain(value: Any) -> str:
    """Return a table cell's text; a dash for None."""
    return "–" if value is None else str(value)


# -------------------------------------------------------------------------------------------- pages


def check_page(path: Path, option: str = "--html") -> None:
    """Refuse a file that cannot be written, before the work."""
    if is_there(path) and not is_file(path):
        kind = "a directory" if is_directory(path) else "not a regular file"
        raise PcgError(f"{option} {path}: it is {kind}; name a file")
    if not is_directory(path.parent):
        raise PcgError(
            f"{option} {path}: there is no directory {path.parent}; make it first, or name a "
            "file elsewhere"
        )
    check_writable(path.parent, f"{option} {path.name}", PcgError)


def show_report(value: Any, text: str, html: Path | None, json: bool) -> None:
    """Print a report as text or JSON, and write its HTML page."""
    if json:
        print_json(value.to_json())
    else:
        print(text)
    if html is not None:
        write_page(html, value.to_html(), json)


def write_page(path: Path, page: str, json: bool) -> None:
    """Write a page atomically and report its size; with --json on standard error."""
    target = path.resolve()
    beside = target.with_name(f".{secrets.token_hex(4)}.html")
    data = page.encode()
    try:
        beside.write_bytes(data)
        beside.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PcgError(
            f"--html {path}: it cannot be written: {reason}; name a file elsewhere"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    # With --json standard output holds only the JSON object.
    print(f"wrote {path} ({size_text(len(data))})", file=sys.stderr if json else sys.stdout)
