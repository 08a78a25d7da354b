"""Sources of finetuning data, their rows and limits, and frames of examples between processes.

    a path, or a list of paths                        files
    a dataset of `datasets`, any iterable             its rows
    a frame of pandas or polars, a table of pyarrow   its rows
    a dict of columns                                 its rows
    a DatasetDict                                     `train` to learn, `validation` to evaluate

The libraries are recognised by the interfaces of their objects, without imports. Other sources are
refused, as they may iterate over something other than rows, such as a dict over its keys. Files are
those of `pcg.runtime.data.files`. Rows in memory are dicts and strings. Limits protect other jobs'
memory and time.

Frames carry examples as bytes from the tokenizing process to the training process:

    frame   a line of JSON, and the announced bytes
    batch   {"places": […], "lengths": […], "weights": […], "desirable": […]}, then the ids and the
            labels of all examples, int64
    end     {"format": …, "truncated": …, "dropped": …}
    error   {"error": name of a class of `pcg.errors`, "message": …}

Frames are not pickled, as the tokenizing process runs chat templates, which are untrusted programs.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from pcg.errors import DataError
from pcg.files import expanded, is_file, is_there, shown_path
from pcg.runtime.data.example import Example
from pcg.runtime.data.files import (
    ARROW,
    SUFFIXES,
    TEXT,
    dataset_of,
    decoded,
    files_of,
    is_dataset,
    rows_of_file,
    suffix_of,
    text_of_file,
)
from pcg.runtime.data.formats import FORMATS, READ_KEYS
from pcg.runtime.text.chat import kind_of
from pcg.units import counted, shown


@dataclass(frozen=True)
class DataLimits:
    """Limits of a job's data, and of jobs under preparation.

    Training and evaluation data are counted separately.

    Attributes:
        rows: maximum number of rows.
        row_bytes: maximum bytes of a row: of its line in a file, or of all its texts in memory. A
            plain text file is not a row, and limited only by `total_bytes`.
        total_bytes: maximum bytes of all rows together.
        tokens: maximum number of tokens of a row, before truncation.
        at_once: maximum number of concurrent tokenizing processes, one per job; other jobs wait.
        waiting: maximum number of jobs in preparation or waiting for it; more are refused.
    Raises:
        DataError: a limit is less than 1.
    """

    rows: int = 1_000_000
    row_bytes: int = 16 * 2**20
    total_bytes: int = 512 * 2**20
    tokens: int = 2**20
    at_once: int = 2
    waiting: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise DataError(
                    f"{field.name}={shown(value)} of DataLimits; use an int of at least 1"
                )


UNLIMITED = DataLimits(*(sys.maxsize for _ in fields(DataLimits)))
"""No limits, for data that its owner reads."""


class RowMeter:
    """Counts rows and their bytes, and refuses data beyond the limits."""

    def __init__(self, limits: DataLimits) -> None:
        self.limits = limits
        self._rows = 0
        self._bytes = 0

    def add(self, size_bytes: int, where: str, is_document: bool = False) -> None:
        """Count a row. DataError: the row is too large, or one row too many; `where` names it."""
        limits = self.limits
        self._rows += 1
        self._bytes += size_bytes
        if self._rows > limits.rows:
            raise DataError(
                f"{where} is row {self._rows:,}, and a job here takes {limits.rows:,} rows; give "
                "fewer, or have the engine's DataLimits(rows=…) raised"
            )
        if size_bytes > limits.row_bytes and not is_document:
            raise DataError(
                f"{where} has more than {limits.row_bytes:,} bytes, the most of a row here; split "
                "it, or have the engine's DataLimits(row_bytes=…) raised"
            )
        if self._bytes > limits.total_bytes:
            raise DataError(
                f"with {where} the data has more than {limits.total_bytes:,} bytes, the most of a "
                "job here; give less, or have the engine's DataLimits(total_bytes=…) raised"
            )


def check_tokens(count: int, where: str, limits: DataLimits) -> None:
    """Refuse a row with too many tokens. DataError: names it."""
    if count > limits.tokens:
        raise DataError(
            f"{where} has {count:,} tokens, and a row here may have {limits.tokens:,}; split it, "
            "or have the engine's DataLimits(tokens=…) raised"
        )


_ITEM_BYTES = 8
"""Counted bytes of a value other than text, so that every row counts."""


def bytes_of(row: object, most: int = sys.maxsize) -> int:
    """Return the bytes of texts and values of a row in memory, counting up to about `most`."""
    total, left = 0, [row]
    while left and total <= most:
        value = left.pop()
        total += _ITEM_BYTES
        if isinstance(value, str):
            total += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return total


@dataclass(frozen=True)
class Row:
    """A row of the data.

    Attributes:
        where: "train.jsonl line 7", or "data[6]" in memory.
        value: a dict or a string, otherwise unchecked.
    """

    where: str
    value: Any


def holds_documents(data: Gathered) -> bool:
    """Return True for plain text files, each of which is a document.

    Raises:
        DataError: plain text files are mixed with other files.
    """
    if isinstance(data, list):
        return False
    texts = [path for path in data if suffix_of(path) in TEXT]
    if texts and len(texts) < len(data):
        raise DataError(
            f"{texts[0]} is plain text, which is one document, and {len(data) - len(texts)} of "
            f"{len(data)} files are not; give one kind"
        )
    return bool(texts)


def read_rows(data: Gathered, limits: DataLimits = UNLIMITED) -> Iterator[Row]:
    """Yield the rows of files or in memory, in order; blank lines are skipped.

    Raises:
        DataError: a file is missing or has an unknown suffix, a line is not UTF-8 or JSON, or the
            data exceeds the limits.
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
    rows: Iterator[tuple[str, int, Any]]
    if is_dataset(path):
        rows = ((f"{path} row {n}", 0, row) for n, row in enumerate(dataset_of(path), start=1))
    elif not is_file(path):
        raise DataError(f"no data file {shown_path(path)}")
    elif suffix_of(path) in TEXT:
        text = text_of_file(path)
        meter.add(len(text), str(path), is_document=True)
        yield Row(str(path), decoded(text, str(path)))
        return
    else:
        rows = rows_of_file(path, meter.limits.row_bytes)
    is_table = is_dataset(path) or suffix_of(path) in ARROW
    for where, line_bytes, read in rows:
        value = _row_of_table(read) if is_table else read
        meter.add(line_bytes or bytes_of(value, meter.limits.row_bytes), where)
        yield Row(where, value)


Header = dict[str, Any]
Placed = tuple[Example, str]
"""An example and its place."""


def write_frame(stream: IO[bytes], header: Header, *parts: bytes) -> None:
    """Write a frame."""
    stream.write(json.dumps(header).encode() + b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def write_batch(stream: IO[bytes], placed: Sequence[Placed], **facts: int) -> None:
    """Write a frame of examples, and of facts for its header."""
    ids, labels = array("q"), array("q")
    for example, _ in placed:
        ids.extend(example.ids)
        labels.extend(example.labels)
    lengths = [len(example.ids) for example, _ in placed]
    weights = [example.weight for example, _ in placed]
    header = {"places": [place for _, place in placed], "lengths": lengths, "weights": weights}
    header["desirable"] = [example.is_desirable for example, _ in placed]
    write_frame(stream, {**header, **facts}, ids.tobytes(), labels.tobytes())


def read_header(stream: IO[bytes]) -> Header | None:
    """Read the JSON of the next frame; None at the end of the stream."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    header: Header = json.loads(line)
    return header


def read_batch(stream: IO[bytes], header: Header) -> list[Placed]:
    """Read the examples that a header announces.

    Raises:
        EOFError: the stream ends before them.
    """
    lengths: list[int] = header["lengths"]
    ids, labels = _read_ints(stream, sum(lengths)), _read_ints(stream, sum(lengths))
    placed, start = [], 0
    columns = lengths, header["weights"], header["desirable"], header["places"]
    for length, weight, is_desirable, place in zip(*columns, strict=True):
        end = start + length
        example = Example(
            ids[start:end], labels[start:end], weight=weight, is_desirable=is_desirable
        )
        placed.append((example, place))
        start = end
    return placed


def _read_ints(stream: IO[bytes], count: int) -> array[int]:
    ints = array("q")
    ints.fromfile(stream, count)
    return ints


_LONGEST_NAME = 4096


class Table(Protocol):
    """A frame of pandas or polars, or a table of pyarrow."""

    @property
    def columns(self) -> Any: ...


Source = (
    str
    | Path
    | Table
    | Iterable[str | Path]
    | Iterable[Mapping[str, Any] | str]
    | Mapping[str, Iterable[Any]]
)

Gathered = tuple[Path, ...] | list[Any]
"""The files of a source, or its rows in memory."""


Take = Callable[[Iterator[Any]], list[Any]]
"""A function that collects the values of an iterator in a list."""


def gather(source: object, take: Take = list, columns: Mapping[str, str] | None = None) -> Gathered:
    """Return the files or the rows of a source.

    Args:
        take: collects the values of an iterator, which may run the caller's code.
        columns: the data's name of a column, by the name that a format reads.
    Raises:
        DataError: the source has an unknown kind, or mixes two kinds.
    """
    if isinstance(source, str | Path):
        return tuple(files_of(expanded(source)))
    if has_splits(source):
        raise DataError(f"data has the splits {_names(source)}; give one of them")
    values = _table_rows(source)
    if values is None and isinstance(source, Mapping):
        values = _column_rows(source, columns or {})
    if values is None:
        values = take(_iterated(source))
    named = [value for value in values if _names_file(value)]
    if named and len(named) == len(values):
        return tuple(file for path in named for file in files_of(expanded(path)))
    with_rows = any(isinstance(value, Mapping) for value in values)
    if any(with_rows or isinstance(value, Path) or is_file(Path(value)) for value in named):
        raise DataError(
            f"data has {len(named)} paths, as {shown(str(named[0]))}, among {len(values)} values; "
            "give paths alone, or rows alone"
        )
    return values


def _names_file(value: object) -> bool:
    """True for a path, or a single word that is a file or has a suffix of data files."""
    if not isinstance(value, str):
        return isinstance(value, Path)
    if len(value) > _LONGEST_NAME or len(value.split()) != 1:
        return False
    path = Path(value)
    return suffix_of(path) in SUFFIXES or (path.suffix != "" and is_file(path))


def _iterated(source: Any) -> Iterator[Any]:
    if hasattr(source, "read"):
        raise DataError("data is an open file; give its path")
    if isinstance(source, bytes | bytearray | Set):
        raise DataError(f"data is {kind_of(source)}; give a list of rows, or a path")
    if hasattr(source, "__iter__"):
        is_table = hasattr(source, "column_names")
        return map(_row_of_table, source) if is_table else iter(source)
    # By Python's old protocol, a map-style dataset would end where an index is an error.
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return (source[index] for index in range(len(source)))
    raise DataError(
        f"data is {kind_of(source)}; give paths, a list of rows, a dataset, a frame, or a dict of "
        "columns"
    )


def _table_rows(source: Any) -> list[Any] | None:
    if hasattr(source, "to_pylist") and hasattr(source, "column_names"):  # pyarrow
        _check_columns(source.column_names)
        return list(map(_row_of_table, source.to_pylist()))
    if hasattr(source, "to_dicts"):  # polars
        return list(map(_row_of_table, source.to_dicts()))
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # pandas
        _check_columns(source.columns)
        return [_row_of_table(_plain(row)) for row in source.to_dict("records")]
    return None


def _check_columns(names: Iterable[Any]) -> None:
    """Refuse columns of one name, of which rows would keep one. DataError: names them."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"data has several columns {_names(repeated)}; rename or drop all but one of a name"
        )


def _row_of_table(row: Any) -> Any:
    """Return a row without nulls within its cells.

    In a column of objects, each object has the keys of all objects, so that a tool call has the
    arguments of all other tools as nulls, which would be learned.
    """
    return {name: _whole(cell) for name, cell in row.items()} if isinstance(row, Mapping) else row


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        return [_whole(item) for item in value]
    return value


def _column_rows(columns: Mapping[str, Any], names: Mapping[str, str]) -> list[Any]:
    one_row = any(
        isinstance(value, Sequence) and len(value) and isinstance(value[0], Mapping)
        for keys in _COLUMNS
        for value in map(columns.get, keys)
    )
    if not columns or one_row or not all(map(_is_column, columns.values())):
        raise DataError(
            "data is one dict, and not of columns; give a list of rows, [row], or a path"
        )
    known = {*columns, *(ours for ours, theirs in names.items() if theirs in columns)}
    if not any(known.issuperset(keys) for keys in _COLUMNS):
        raise DataError(
            f"data is a dict of {_names(columns)}, which are the columns of no known format; give "
            "a list of rows, or one of its values"
        )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        have = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise DataError(f"the columns of data have different numbers of rows: {have}")
    rows = zip(*columns.values(), strict=True)
    return [_plain(dict(zip(columns, row, strict=True))) for row in rows]


_COLUMNS = (*(format.keys for format in FORMATS.values()), ("chosen", "rejected"), ("prompt",))
"""The columns of rows of each format, of preferences and of GRPO."""


def _is_column(value: object) -> bool:
    if isinstance(value, str | bytes | Mapping | Set):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__iter__")


def _plain(value: Any) -> Any:
    """Return a cell with lists for arrays, and None for missing values of pandas."""
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_nan = isinstance(value, float) and value != value
    return None if is_nan or type(value).__name__ in ("NAType", "NaTType") else value


@dataclass(frozen=True)
class Splits:
    """The sources of training and evaluation data, after splits were chosen.

    Attributes:
        train: the sources of the training data; several for a mixture.
        evaluation: the source of the evaluation data; None without.
        chosen: description of the chosen splits; empty without a choice.
    """

    train: Sequence[Any]
    evaluation: Any
    chosen: str = ""


def has_splits(source: object) -> bool:
    """True for a DatasetDict: a dict of datasets by the names of their splits."""
    is_dict = isinstance(source, Mapping) and bool(source)
    return is_dict and all(hasattr(each, "column_names") for each in source.values())  # type: ignore[attr-defined]


def has_validation(source: object) -> bool:
    """True for a DatasetDict with a split `validation`."""
    return has_splits(source) and "validation" in source  # type: ignore[operator]


class NamedSources(dict[str, Any]):
    """Sources of evaluation data by the names of their metrics."""


_NAME = re.compile(r"[\w.-]+")


def named_sources(source: Any) -> NamedSources | None:
    """Return the named sources of a mapping, or of a text "NAME=FILE,…"; None for other sources.

    Raises:
        DataError: a name cannot be part of a metric's name.
    """
    if isinstance(source, str) and "=" in source and not is_there(expanded(source)):
        pairs = [part.partition("=") for part in source.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise DataError(f"eval_data has the name {shown(repeated[0])} twice; use other names")
        source = {name.strip(): path.strip() for name, _, path in pairs}
    elif (
        not isinstance(source, Mapping)
        or not source
        or not READ_KEYS.isdisjoint(source)
        or not all(map(_is_source, source.values()))
    ):
        return None
    for name in source:
        if isinstance(source[name], list | tuple) and not source[name]:
            raise DataError(f"eval_data has no examples for {shown(name)}; leave it out")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not source[name]:
            raise DataError(
                f"eval_data has the name {shown(name)}; use NAME=FILE with names of letters, "
                "digits, '_', '.' and '-'"
            )
    return NamedSources(source)


def _is_source(value: object) -> bool:
    """Return True for a path, rows or a data set, unlike a column of values."""
    if isinstance(value, list | tuple):
        return all(isinstance(row, Mapping | Example) or _names_file(row) for row in value)
    return isinstance(value, str | Path) or hasattr(value, "column_names")


def choose_splits(
    data: Any, eval_data: Any, most_rows: int | None = None, sources: int | None = None
) -> Splits:
    """Choose `train` and `validation` of data with splits.

    Args:
        data: the source of the training data; its `validation` evaluates unless `eval_data` does.
        eval_data: the source of the evaluation data, or None.
        most_rows: the number of rows to read from training data without a length, which may be
            endless; None for all.
        sources: the number of sources in `data` that are mixed; None for a single source.
    Raises:
        DataError: a split or a source is missing.
    """
    words = []
    if sources is not None:
        if not isinstance(data, list | tuple) or len(data) != sources:
            have = counted(len(data), "source") if isinstance(data, list | tuple) else kind_of(data)
            raise DataError(
                f"probabilities has {sources} numbers, and data is {have}; give {sources} files "
                "or datasets"
            )
        chosen = [choose_splits(each, (), most_rows) for each in data]
        others = choose_splits((), eval_data)
        words = [each.chosen for each in (*chosen, others) if each.chosen]
        return Splits([each.train[0] for each in chosen], others.evaluation, "; ".join(words))
    train, evaluation = data, eval_data
    if has_splits(data):
        train = _split(data, "train", "data")
        words.append(f"'train' ({_size(train)}) is learned")
        if eval_data is None and "validation" in data:
            evaluation = data["validation"]
            words.append(f"'validation' ({_size(evaluation)}) evaluates")
        used = ("train", "validation") if eval_data is None else ("train",)
        if unused := [repr(name) for name in data if name not in used]:
            words.append(f"{', '.join(unused)} not used")
    has_training = has_splits(eval_data) and not {"train", "validation"}.isdisjoint(eval_data)
    if not has_training and (named := named_sources(eval_data)) is not None:
        evaluation = named
    elif has_splits(eval_data):
        evaluation = _split(eval_data, "validation", "eval_data")
        words.append(f"'validation' ({_size(evaluation)}) of eval_data evaluates")
    if most_rows is not None and hasattr(train, "__iter__") and not hasattr(train, "__len__"):
        train = islice(_iterated(train), most_rows)
    return Splits([train], evaluation, "; ".join(words))


def _split(splits: Mapping[str, Any], name: str, argument: str) -> Any:
    if name not in splits:
        raise DataError(
            f"{argument} has the splits {_names(splits)}, no {name!r}; give one of them"
        )
    return splits[name]


def _names(values: Any) -> str:
    return ", ".join(map(repr, values))


def _size(dataset: Any) -> str:
    return counted(len(dataset), "row") if hasattr(dataset, "__len__") else "streamed"
