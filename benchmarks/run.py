"""Run subjects of benchmarks, and print the table of targets and results.

    python benchmarks/run.py                        the committed results; nothing runs
    python benchmarks/run.py generation serving     run subjects, and print their rows
    python benchmarks/run.py http/scrapes           run a case
    python benchmarks/run.py --all                  run all subjects, which takes hours
    python benchmarks/run.py --quick --all          the smallest sizes; writes nothing

A row is a number of a case with its target, and its change since the result that is committed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT
from rich.console import Console
from rich.table import Table


def subjects() -> list[str]:
    """Return the files that have cases."""
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    return [file.stem for file in files if "\n@bench.case(" in file.read_text()]


def committed(file: Path) -> dict[str, Any]:
    """Return the result as the last commit has it; empty for a new one."""
    name = file.relative_to(ROOT).as_posix()
    shown = subprocess.run(
        ["git", "show", f"HEAD:{name}"], cwd=ROOT, capture_output=True, check=False
    )
    return json.loads(shown.stdout) if shown.returncode == 0 else {}


def rows(only: list[str]) -> Iterator[list[str]]:
    results = [(json.loads(file.read_text()), file) for file in sorted(RESULTS.glob("*.json"))]
    for result, file in sorted(results, key=lambda pair: str(pair[0].get("subject"))):
        subject = result.get("subject", "")
        if only and not {subject, f"{subject}/{file.stem}"} & {*only}:
            continue
        before = {one["name"]: one["value"] for one in committed(file).get("targets", ())}
        for one in result.get("targets", ()):
            yield [subject, file.stem, one["name"], *cells(one, before.get(one["name"]))]


def cells(one: Mapping[str, Any], before: float | None) -> Iterator[str]:
    """Yield the target, the result, whether it is met, and the change."""
    value, least, most = one["value"], one.get("at_least"), one.get("at_most")
    missed = (least is not None and value < least) or (most is not None and value > most)
    yield f"≥ {least:g}" if least is not None else f"≤ {most:g}" if most is not None else ""
    yield f"[red]{value:g}[/red]" if missed else f"{value:g}"
    is_new = before is not None and before != value and bool(before)
    yield f"{value / before - 1:+.1%}" if is_new else ""


def main() -> int:
    """Run what is asked for, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT[/CASE]", help=", ".join(subjects()))
    parser.add_argument("--all", action="store_true", help="run all subjects")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes; writes nothing")
    given = parser.parse_args()
    unknown = {one.partition("/")[0] for one in given.subjects} - {*subjects()}
    if unknown:
        parser.error(f"no subject {', '.join(sorted(unknown))}; use {', '.join(subjects())}")
    failed = []
    for one in subjects() if given.all else given.subjects:
        subject, _, case = one.partition("/")
        line = [sys.executable, str(ROOT / "benchmarks" / f"{subject}.py"), *[case] * bool(case)]
        print(f"== {one}", file=sys.stderr, flush=True)
        quiet = subprocess.DEVNULL
        if subprocess.run(
            [*line, *["--quick"] * given.quick], stdout=quiet, check=False
        ).returncode:
            failed.append(one)
    if not given.quick:
        table = Table("subject", "case", "number", "target", "result", "change")
        last = ""
        for row in rows(given.subjects):
            if row[0] != last:
                table.add_section()
            table.add_row(*row)
            last = row[0]
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    if not (given.subjects or given.all):
        print("to measure: make bench ARGS=SUBJECT, or ARGS=--all, which takes hours")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
