"""Rows of finetuning data, each with its place for messages.

A source is a file of JSON lines (.jsonl, .ndjson, .json), a plain text file (.txt, one document),
or rows in memory: dicts and strings.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcg.errors import DataError

Source = str | Path | Iterable[Mapping[str, Any] | str]

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt",)


@dataclass(frozen=True)
class Row:
    """One row as it was read.

    Attributes:
        where: "train.jsonl line 7", or "data[6]" in memory.
        value: a dict or a string, not yet checked further.
    """

    where: str
    value: Any


def is_document(source: Source) -> bool:
    """Return whether the source is a plain text file, to be read as one document."""
    return isinstance(source, str | Path) and Path(source).suffix.lower() in _TEXT


def read_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a source, in order; a blank line is no row.

    Raises:
        DataError: there is no such file, it has an unknown suffix, or a line is not UTF-8 or JSON.
    """
    if isinstance(source, str | Path):
        yield from _read_file(Path(source))
        return
    if isinstance(source, Mapping):
        raise DataError("data is one dict; give a list of rows, [row], or a path")
    for index, value in enumerate(source):
        yield Row(f"data[{index}]", value)


def _read_file(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise DataError(f"no data file {path}")
    suffix = path.suffix.lower()
    if suffix not in (*_JSON_LINES, *_TEXT):
        raise DataError(
            f"{path} ends in {suffix or 'nothing'}; use JSON lines ({', '.join(_JSON_LINES)}) or "
            f"plain text ({', '.join(_TEXT)})"
        )
    if suffix in _TEXT:
        yield Row(str(path), _decode(path.read_bytes(), str(path)))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            text = _decode(line, where)
            if text.strip():
                yield Row(where, _parse(text, where))


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} is not UTF-8 (0x{data[error.start]:02x}); "
            "save the file as UTF-8"
        ) from error


def _parse(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        hint = ""
        if text.strip() in ("[", "{"):
            hint = "; the file seems to be one JSON value over many lines: write one row a line"
        raise DataError(f"{where}, column {error.colno}: not JSON: {error.msg}{hint}") from error
    if isinstance(value, list):
        raise DataError(f"{where}: a JSON array; write one row a line, as in `jq -c '.[]'`")
    return value
