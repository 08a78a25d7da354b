"""Tables of docs/results.md and README.md show numbers of the files that they link."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LINKED = re.compile(r"results/([\w-]+\.json)\)")
NUMBER = re.compile(r"(?<![\w.,×/-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?![\w×])")
NOT_MEASURED = re.compile(r"[≥≤] [\d.]+|\(\d[\d.]*\)")  # targets
SCALES = (1, 100, 1e3, 1e-3, 1e6, 1e-6, 1e-9, 2.0**-20)
"""Factors of a file's unit to a table's: per cent, ms, µs, GB, MiB."""


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "targets":  # which repeat numbers, and have bounds
                continue
            yield from _numbers(key)
            yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, str):
        yield from (float(text.replace(",", "")) for text in NUMBER.findall(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _rows(document: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield rows of measurements with their files: their own links, else the closest ones above."""
    files: tuple[str, ...] = ()
    paragraph: list[str] = []
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        links = LINKED.findall(line)
        if line.startswith("|"):
            files = tuple(links) or files
            if not line.startswith("|---") and not following.startswith("|---"):
                yield line, files
            paragraph = []
        elif links:
            paragraph += links
            files = tuple(paragraph)
        elif line.startswith("#"):
            paragraph, files = [], ()


def _is_in(text: str, values: list[float]) -> bool:
    mantissa, _, exponent = text.replace(",", "").partition("e")
    step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    shown = float(text.replace(",", ""))
    return any(
        abs(abs(value) * scale - shown) <= 0.501 * step for value in values for scale in SCALES
    )


def _shown(row: str) -> list[str]:
    """Return the measured numbers of a row: those behind its first cell that are no targets."""
    cells = LINKED.sub("", row).strip("|").split("|")[1:]
    return [text for cell in cells for text in NUMBER.findall(NOT_MEASURED.sub("", cell))]


DOCUMENTS = ("docs/results.md", "README.md")
ROWS = [pytest.param(*row, id=row[0][:60]) for document in DOCUMENTS for row in _rows(document)]


@pytest.mark.parametrize(("row", "files"), ROWS)
def test_rows_show_numbers_of_their_files(row: str, files: tuple[str, ...]) -> None:
    assert files, "link the file that has the numbers"
    values = [
        number
        for name in files
        for number in _numbers(json.loads((RESULTS / name).read_text(encoding="utf-8")))
    ]
    assert [text for text in _shown(row) if not _is_in(text, values)] == []


def _environments(result: object) -> Iterator[dict[str, str]]:
    """Yield the descriptions of machine and command in a result, also of its parts."""
    if isinstance(result, dict):
        if "environment" in result:
            yield result["environment"]
        for part in result.values():
            yield from _environments(part)


def test_linked_files_have_their_machine_and_command() -> None:
    linked = {name for row in ROWS for name in row.values[1]}
    for name in linked:
        result = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        if "experiment" not in result:  # simulated: the same on each machine
            environments = list(_environments(result))
            assert environments, name
            assert all({"machine", "command"} <= one.keys() for one in environments), name
