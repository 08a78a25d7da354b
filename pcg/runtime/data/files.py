"""Files of finetuning data: JSON lines and arrays, tables, plain text, and datasets on disk.

    .jsonl, .ndjson, .json     a row a line; a .json file may be one array of rows
    .csv, .tsv                 a row a record, with the columns of the header
    .parquet, .arrow           a row a record, in batches (pyarrow)
    .txt                       a document a file
    a folder, a glob           its files, sorted
    a folder of save_to_disk   the rows of its split `train`, or its only one (datasets)
    a hub id                   the same of the hub, or of its local cache (datasets)

The suffix .gz may follow each.
"""

from __future__ import annotations

import csv
import glob
import gzip
import importlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from pcg.errors import DataError
from pcg.files import is_directory, is_file, is_there, shown_path

JSON_LINES = (".jsonl", ".ndjson", ".json")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
ARROW = (".parquet", ".arrow")
TEXT = (".txt",)
SUFFIXES = (*JSON_LINES, *SEPARATORS, *ARROW, *TEXT)
SAVED = ("dataset_info.json", "dataset_dict.json")
"""The files by which `save_to_disk` marks a dataset, and its splits."""
_HUB_ID = r"[\w.-]+/[\w.-]+"


def suffix_of(path: Path) -> str:
    """Return a file's suffix in lower case, without .gz."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return plain.suffix.lower()


def files_of(path: Path) -> list[Path]:
    """Return the files of a folder or a glob, sorted; other paths are returned as they are.

    Raises:
        DataError: a folder without data files, or a glob that matches none.
    """
    if is_directory(path) and not _is_saved(path):
        files = [each for each in sorted(path.iterdir()) if suffix_of(each) in SUFFIXES]
        if not files:
            raise DataError(
                f"{shown_path(path)} has no data files; pcg reads {', '.join(SUFFIXES)}"
            )
        return files
    if glob.has_magic(str(path)) and not is_there(path):
        files = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not files:
            raise DataError(f"no file matches {shown_path(path)}")
        return files
    return [path]


def is_dataset(path: Path) -> bool:
    """Return whether a path is a dataset that `datasets` reads: saved, or a hub id."""
    return _is_saved(path) or (
        not is_there(path)
        and suffix_of(path) not in SUFFIXES
        and re.fullmatch(_HUB_ID, path.as_posix()) is not None
    )


def _is_saved(path: Path) -> bool:
    return any(is_file(path / name) for name in SAVED)


def dataset_of(path: Path) -> Any:
    """Return the split `train`, or the only split, of a dataset on disk or of the hub.

    Raises:
        DataError: datasets is not installed, or there is no such dataset or split.
    """
    datasets = _library("datasets", f"the dataset {shown_path(path)}")
    try:
        source = datasets.load_from_disk if _is_saved(path) else datasets.load_dataset
        loaded = source(path.as_posix())
    except Exception as error:  # of any of its libraries
        reason = str(error).partition("\n")[0]
        raise DataError(f"the dataset {shown_path(path)} cannot be loaded: {reason}") from error
    if not hasattr(loaded, "keys"):
        return loaded
    names = list(loaded.keys())
    if "train" not in names and len(names) > 1:
        raise DataError(f"{shown_path(path)} has the splits {', '.join(names)}, and none is train")
    return loaded["train" if "train" in names else names[0]]


def rows_of_file(path: Path, most_bytes: int) -> Iterator[tuple[str, int, Any]]:
    """Yield the rows of a file: place, bytes in the file (0 for parsed tables), and value.

    Args:
        most_bytes: a longer line is yielded cut, as its bytes, for the caller to refuse.
    Raises:
        DataError: the suffix is unknown, or the content is damaged.
        OSError: the file cannot be read.
    """
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path} ends in {path.suffix or 'nothing'}; use one of {', '.join(SUFFIXES)}"
        )
    if suffix in ARROW:
        yield from _arrow_rows(path, suffix)
        return
    with _opened(path) as file:
        try:
            if suffix in SEPARATORS:
                yield from _csv_rows(path, file, SEPARATORS[suffix], most_bytes)
            elif suffix == ".json" and _is_array(file):
                yield from _array_rows(path, file)
            else:
                yield from _json_rows(path, file, most_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is not whole gzip data: {error}") from error


def text_of_file(path: Path) -> bytes:
    """Return the bytes of a plain text file."""
    with _opened(path) as file:
        return file.read()


def _opened(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # a reader of bytes
    return path.open("rb")


def _json_rows(path: Path, file: IO[bytes], most_bytes: int) -> Iterator[tuple[str, int, Any]]:
    # Read a line only up to its limit.
    most = min(most_bytes, sys.maxsize - 1) + 1
    for number, line in enumerate(iter(partial(file.readline, most), b""), start=1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        size = len(line.rstrip(b"\r\n"))
        if size > most_bytes:
            yield where, size, None
        if decoded(line, where).strip():
            yield where, size, parsed_line(line, where)


def _is_array(file: IO[bytes]) -> bool:
    """Return whether a file begins a JSON array over several lines; leave it at its start."""
    begin = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    first, _, rest = begin.partition(b"\n")
    return begin.startswith(b"[") and (not rest.strip() or not first.rstrip().endswith(b"]"))


def _array_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[str, int, Any]]:
    text = decoded(file.read(), str(path))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path} line {error.lineno}, column {error.colno}"
        raise DataError(f"{where}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{path}: JSON nested too deeply; write flat rows") from error
    for index, row in enumerate(rows):
        yield f"{path} row {index + 1}", 0, row


def _csv_rows(
    path: Path, file: IO[bytes], separator: str, most_bytes: int
) -> Iterator[tuple[str, int, Any]]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    before = csv.field_size_limit(min(most_bytes, 2**31 - 1))
    number = 1
    try:
        reader = csv.reader(text, delimiter=separator, strict=True)
        header = next(reader, [])
        if not any(header) or len({*header}) < len(header):
            raise DataError(f"{path} line 1: a header names each column once, not {header}")
        for cells in reader:
            number, where = reader.line_num, f"{path} line {reader.line_num}"
            if not any(cells):
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{where} has {len(cells)} cells, and the header has {len(header)}: "
                    f"{', '.join(header)}; quote a cell that has the separator"
                )
            yield where, 0, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path} line {number + 1}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, after line {number}: {error.reason} (0x{error.object[error.start]:02x}); "
            "save the file as UTF-8"
        ) from error
    finally:
        csv.field_size_limit(before)
        text.detach()  # the caller closes the file


def _arrow_rows(path: Path, suffix: str) -> Iterator[tuple[str, int, Any]]:
    _library("pyarrow", str(path))
    arrow: Any = importlib.import_module("pyarrow")
    number = 0
    try:
        if suffix == ".parquet":
            parquet: Any = importlib.import_module("pyarrow.parquet")
            batches = parquet.ParquetFile(path).iter_batches(1024)
        else:
            batches = iter(_arrow_batches(arrow, path))
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", 0, row
    except arrow.ArrowException as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read: {reason}") from error


def _arrow_batches(arrow: Any, path: Path) -> Iterator[Any]:
    with arrow.memory_map(str(path)) as file:
        try:
            reader = arrow.ipc.open_stream(file)
        except arrow.ArrowInvalid:
            file.seek(0)
            reader = arrow.ipc.open_file(file)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
            return
        yield from reader


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{what} needs {name}: pip install 'pcg[data]'") from error


def decoded(data: bytes, where: str) -> str:
    """Decode UTF-8. DataError: names the byte that is not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} is not UTF-8 (0x{data[error.start]:02x}); "
            "save the file as UTF-8"
        ) from error


def parsed_line(line: bytes, where: str) -> Any:
    """Return the JSON value of a line. DataError: it is not UTF-8, no JSON, or an array."""
    text = decoded(line, where)
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
