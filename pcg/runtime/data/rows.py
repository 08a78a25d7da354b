"""Rows of finetuning data, each with its place for messages.

A file is JSON lines (.jsonl, .ndjson, .json), a row a line, or plain text (.txt), which is one
document. Rows in memory are dicts and strings.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcg.errors import DataError
from pcg.runtime.data.sources import JSON_LINES, TEXT, Gathered


@dataclass(frozen=True)
class Row:
    """One row as it was read.

    Attributes:
        where: "train.jsonl line 7", or "data[6]" in memory.
        value: a dict or a string, not yet checked further.
    """

    where: str
    value: Any


def holds_documents(data: Gathered) -> bool:
    """Return True for plain text files, each to be read as one document.

    Raises:
        DataError: there are plain text files among others.
    """
    if isinstance(data, list):
        return False
    texts = [path for path in data if path.suffix.lower() in TEXT]
    if texts and len(texts) < len(data):
        raise DataError(
            f"{texts[0]} is plain text, which is one document, and {len(data) - len(texts)} of "
            f"{len(data)} files are not; give one kind"
        )
    return bool(texts)


def read_rows(data: Gathered) -> Iterator[Row]:
    """Yield the rows of files or those in memory, in order; a blank line is no row.

    Raises:
        DataError: there is no such file, it has an unknown suffix, or a line is not UTF-8 or JSON.
    """
    if isinstance(data, list):
        for index, value in enumerate(data):
            yield Row(f"data[{index}]", value)
        return
    for path in data:
        yield from _read_file(path)


def _read_file(path: Path) -> Iterator[Row]:
    if not path.is_file():
        hint = "; it is a directory, give its files" if path.is_dir() else ""
        raise DataError(f"no data file {path}{hint}")
    suffix = path.suffix.lower()
    if suffix not in (*JSON_LINES, *TEXT):
        raise DataError(
            f"{path} ends in {suffix or 'nothing'}; use JSON lines ({', '.join(JSON_LINES)}) or "
            f"plain text ({', '.join(TEXT)})"
        )
    if suffix in TEXT:
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
