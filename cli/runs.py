"""`pcg runs`: list, compare and report the recorded runs below a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pcg.errors import RecordError
from pcg.units import duration_text

from .options.console import (
    check_page,
    err,
    plain,
    print_json,
    print_table,
    table,
    write_page,
)
from .options.fields import Json

if TYPE_CHECKING:
    from pcg.records.run import Run

Folder = Annotated[
    Path,
    typer.Argument(help="Folder to search for runs, with its subfolders.", metavar="FOLDER"),
]
Runs = Annotated[
    list[Path],
    typer.Argument(help="Folders of records, or outputs of pcg finetune.", metavar="RUN…"),
]
OneRun = Annotated[
    Path,
    typer.Argument(help="Folder of a record, or an output of pcg train.", metavar="RUN"),
]
_NUMBERS = ("steps", "loss", "eval loss", "best", "tokens/s", "time")


@dataclass(frozen=True, kw_only=True)
class ComparisonPage:
    """Options of a comparison's presentation.

    Attributes:
        html: a file to write the comparison to, with overlaid curves, as one HTML page.
    """

    html: Path | None = None


def list_command(folder: Folder = Path(), json: Json = False) -> None:
    """List the runs below a folder: their losses, evaluations and speed."""
    from pcg.records.run import find_runs, read_run

    runs: list[Run] = []
    damaged: list[str] = []
    for place in find_runs(folder):
        try:
            runs.append(read_run(place))
        except RecordError as error:
            damaged.append(str(error))
    runs.sort(key=lambda run: run.facts.begun_s)
    if json:
        print_json({"runs": [_summary(run) for run in runs]})
    else:
        rows = table("run", "kind", "status", *_NUMBERS, right=_NUMBERS)
        for run in runs:
            rows.add_row(*_cells(run, folder))
        if runs:
            print_table(rows)
        else:
            print(f"no runs below {folder}")
    for reason in damaged:
        err().print(_printable(reason), soft_wrap=True)


def compare_command(runs: Runs, page: ComparisonPage, json: Json = False) -> None:
    """Compare runs: the options that differ, their losses, evaluations and speed."""
    if page.html is not None:
        check_page(page.html)
    from pcg.records.run import compare, text_of

    compared = compare([_read(run) for run in runs])
    if json:
        print_json(compared.json)
    else:
        names = [_printable(name) for name in compared.names]
        rows = table("", *names, right=tuple(names))
        for kind in (compared.results, compared.differing):
            for name, values in kind.items():
                rows.add_row(_printable(name), *(_printable(text_of(value)) for value in values))
        print_table(rows)
    if page.html is not None:
        from pcg.records.page import comparison_page

        write_page(page.html, comparison_page(compared), json)


def report_command(run: OneRun) -> None:
    """Write a run's page into its folder; the run may be active or killed."""
    from pcg.records.page import write_report

    print(write_report(_read(run).folder))


def _read(path: Path) -> Run:
    """Read a run from the folder of its record, or from its output folder."""
    from pcg.records.run import read_run
    from pcg.records.run_files import has_run
    from pcg.train.config_file import RECORD

    within = path / RECORD
    return read_run(within if has_run(within) and not has_run(path) else path)


def _summary(run: Run) -> dict[str, Any]:
    least = run.least("eval_loss")
    return {
        "folder": str(run.folder),
        "name": run.facts.name,
        "kind": run.facts.kind,
        "status": str(run.status),
        "begun_s": run.facts.begun_s,
        "seconds": run.seconds,
        "steps": run.last_step,
        "loss": run.last("loss"),
        "eval_loss": run.last("eval_loss"),
        "best_eval_loss": None if least is None else least[1],
        "best_step": None if least is None else least[0],
        "tokens_per_second": run.last("tokens_per_second"),
        "error": run.facts.error,
    }


def _cells(run: Run, folder: Path) -> list[str]:
    summary = _summary(run)
    place = str(run.folder.relative_to(folder)) if run.folder.is_relative_to(folder) else ""
    losses = [summary[name] for name in ("loss", "eval_loss", "best_eval_loss")]
    speed = summary["tokens_per_second"]
    return [
        _printable(place if place not in ("", ".") else str(run.folder)),
        _printable(run.facts.kind),
        str(run.status),
        f"{run.last_step:,}",
        *(plain(None if loss is None else f"{loss:.4f}") for loss in losses),
        plain(None if speed is None else f"{speed:,.0f}"),
        duration_text(run.seconds),
    ]


def _printable(text: str) -> str:
    """Replace characters that would control a terminal."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
