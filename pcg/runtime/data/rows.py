"""Rows of finetuning data, each with its place for messages.

A file is JSON lines (.jsonl, .ndjson, .json), a row a line, or plain text (.txt), which is one
document. Rows in memory are dicts and strings.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pcg.errors import DataError
from pcg.files import shown_path
from pcg.runtime.data.limits import UNLIMITED, DataLimits, RowMeter, bytes_of
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


def read_rows(data: Gathered, limits: DataLimits = UNLIMITED) -> Iterator[Row]:
    """Yield the rows of files or those in memory, in order; a blank line is no row.

    Raises:
        DataError: there is no such file, it has an unknown suffix, a line is not UTF-8 or JSON, or
            there is more than the limits allow.
    """
    meter = RowMeter(limits)
    if isinstance(data, list):
        for index, value in enumerate(data):
            where = f"data[{index}]"
            meter.add(bytes_of(value, limits.row_bytes), where)
            yield Row(where, value)
        return
    for path in data:
        try:
            yield from _read_file(path, meter)
        except OSError as error:
            raise DataError(f"{shown_path(path)} cannot be read: {error.strerror}") from error


def _read_file(path: Path, meter: RowMeter) -> Iterator[Row]:
    if not path.is_file():
        hint = "; it is a directory, give its files" if path.is_dir() else ""
        raise DataError(f"no data file {shown_path(path)}{hint}")
    suffix = path.suffix.lower()
    if suffix not in (*JSON_LINES, *TEXT):
        raise DataError(
            f"{path} ends in {suffix or 'nothing'}; use JSON lines ({', '.join(JSON_LINES)}) or "
            f"plain text ({', '.join(TEXT)})"
        )
    if suffix in TEXT:
        meter.add(path.stat().st_size, str(path), is_document=True)
        yield Row(str(path), _decode(path.read_bytes(), str(path)))
        return
    # A line is read no further than it may go.
    most = min(meter.limits.row_bytes, sys.maxsize - 1) + 1
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, most), b""), start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            meter.add(len(line.rstrip(b"\r\n")), where)
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
    except ValueError as error:  # an int of more than 4,300 digits
        raise DataError(f"{where}: a number has too many digits; write it as a text") from error
    except RecursionError as error:
        raise DataError(f"{where}: JSON nested too deeply; write a flat row") from error
    if isinstance(value, list):
        raise DataError(f"{where}: a JSON array; write one row a line, as in `jq -c '.[]'`")
    return value
