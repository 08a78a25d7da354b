"""Tables of docs/results.md show numbers of the files that they link."""

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


def _rows() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield rows of measurements with their files: their own links, else the closest ones above."""
    files: tuple[str, ...] = ()
    paragraph: list[str] = []
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
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
    return any(abs(value * scale - shown) <= 0.501 * step for value in values for scale in SCALES)


@pytest.mark.parametrize(("row", "files"), [pytest.param(*row, id=row[0][:60]) for row in _rows()])
def test_rows_show_numbers_of_their_files(row: str, files: tuple[str, ...]) -> None:
    assert files, "link the file that has the numbers"
    values = [
        number
        for name in files
        for number in _numbers(json.loads((RESULTS / name).read_text(encoding="utf-8")))
    ]
    cells = row.strip("|").split("|")[1:]
    shown = [text for cell in cells for text in NUMBER.findall(NOT_MEASURED.sub("", cell))]
    assert [text for text in shown if not _is_in(text, values)] == []
