"""Finetuning data that does not fit into memory: rows of JSON lines, read when a batch needs them.

    index      one scan of the files: the offset of each row, 8 bytes; checksum; duplicates
    order      an epoch's permutation of the rows, 4 bytes a row
    read       processes tokenize the next rows of the order, one for each core

A batch is a function of seed, epoch and index, so that a run resumes anywhere. The number of tokens
of a row is known when it is read, so that batches are bounded by rows, and rows by `max_length`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from pcg.errors import DataError
from pcg.files import is_file, shown_path
from pcg.runtime.data.dataset import Dataset, ExampleReader, ReadOptions, converted
from pcg.runtime.data.example import Example, ModelSizes
from pcg.runtime.data.files import parsed_line
from pcg.runtime.data.formats import detect
from pcg.runtime.data.order import Batch, Batches, Mixture
from pcg.runtime.data.sources import Gathered, Row, read_batch, read_header
from pcg.runtime.data.tokenizing import error_of, lost, start_worker
from pcg.runtime.data.tokenizing_worker import Task, examples_of
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.units import counted

STREAMED = (".jsonl", ".ndjson")
"""Suffixes of files whose rows are read by their offset."""
_ROWS = 32
"""Rows per request to a process."""
_REQUESTS = 2
"""Requests that wait at a process while it works."""


def cores() -> int:
    """Return the number of processes that tokenize, one for each core of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LineIndex:
    """The rows of files of JSON lines.

    Attributes:
        starts: the offset of each row in its file, int64.
        firsts: the number of the first row of each file.
        blanks: the number of the row behind each blank line.
        blanks_before: the number of blank lines before each file.
        checksum: of the bytes of all rows.
        duplicates: the number of rows that are equal to an earlier row.
    """

    files: tuple[Path, ...]
    starts: array[int]
    firsts: tuple[int, ...]
    blanks: array[int]
    blanks_before: tuple[int, ...]
    checksum: int
    duplicates: int

    @classmethod
    def of(cls, files: Sequence[Path]) -> LineIndex:
        """Scan files. DataError: a file is missing, has another suffix, or cannot be read."""
        starts, hashes, blanks = array("q"), array("q"), array("q")
        firsts, blanks_before, checksum = [], [], 0
        for path in files:
            if path.suffix.lower() not in STREAMED:
                raise DataError(
                    f"{shown_path(path)} cannot be streamed; give files of {', '.join(STREAMED)}, "
                    "as datasets' to_json writes, or leave streaming out"
                )
            if not is_file(path):
                raise DataError(f"no data file {shown_path(path)}")
            firsts.append(len(starts))
            blanks_before.append(len(blanks))
            begin = 0
            try:
                with path.open("rb", buffering=2**20) as file:
                    for line in file:
                        if line.isspace():
                            blanks.append(len(starts))
                        else:
                            starts.append(begin)
                            hashes.append(hash(line.strip()))
                            checksum = zlib.crc32(line, checksum)
                        begin += len(line)
            except OSError as error:
                raise DataError(f"{shown_path(path)} cannot be read: {error.strerror}") from error
        ordered = np.frombuffer(hashes, dtype=np.int64) if hashes else np.empty(0, np.int64)
        ordered = np.sort(ordered)
        duplicates = int((ordered[1:] == ordered[:-1]).sum())
        whole = tuple(files), starts, tuple(firsts), blanks, tuple(blanks_before)
        return cls(*whole, checksum, duplicates)

    def __len__(self) -> int:
        return len(self.starts)

    def file_of(self, row: int) -> int:
        """Return the number of the file that has a row."""
        return bisect_right(self.firsts, row) - 1

    def where(self, row: int) -> str:
        """Return the place of a row."""
        number = self.file_of(row)
        first = self.firsts[number]
        skipped = bisect_right(self.blanks, row) - self.blanks_before[number]
        return f"{self.files[number]} line {row - first + skipped + 1}"

    def read(self, row: int) -> Row:
        """Read a row. DataError: it is not JSON, or the file is gone."""
        path, where = self.files[self.file_of(row)], self.where(row)
        try:
            with path.open("rb") as file:
                file.seek(self.starts[row])
                return Row(where, parsed_line(file.readline(), where))
        except OSError as error:
            raise DataError(f"{shown_path(path)} cannot be read: {error.strerror}") from error


class _Places(Sequence[str]):
    """The place of each row."""

    def __init__(self, index: LineIndex) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...
    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        if isinstance(row, slice):
            return [self._index.where(each) for each in range(len(self))[row]]
        return self._index.where(range(len(self))[row])


Item = Callable[[int, Sequence[Example]], Example]
"""A function from the number of a row and its examples to the example of a batch."""


class StreamedRows(Sequence[Example]):
    """The examples of indexed rows; an example without tokens stands for a dropped row.

    Attributes:
        lines: the rows.
        item: makes the example of a batch from those of a row; by default a row has one.
        read: number of the rows that were read in orders of batches, once for each epoch.
        truncated, dropped: numbers of these rows, as of `Dataset`.
    """

    def __init__(
        self,
        lines: LineIndex,
        tokenizer: Tokenizer,
        options: Sequence[ReadOptions],
        sizes: ModelSizes,
    ) -> None:
        """Take the index of the rows.

        Args:
            options: the options of each file.
        """
        self.lines, self._tokenizer, self._options, self._sizes = lines, tokenizer, options, sizes
        self.item: Item = lambda _, examples: examples[0]
        self.read = self.truncated = self.dropped = 0
        self._readers = [ExampleReader((), tokenizer, each) for each in options]

    @property
    def max_length(self) -> int:
        most = self._options[0].max_length
        assert most is not None
        return most + bool(self._options[0].labels)

    @property
    def checksum(self) -> int:
        """A checksum of the rows, and of all that their tokens depend on."""
        facts: list[Any] = [
            (each.max_length, each.format, each.append_eos, each.empty, each.variables)
            for each in self._options
        ]
        facts += [each.template and each.template.sources for each in self._options]
        facts += [each.columns for each in self._options]
        text = f"{facts!r} {self._tokenizer.backend.to_str()}"
        return zlib.crc32(text.encode(), self.lines.checksum)

    def counts(self) -> str:
        """Return the numbers of rows that were read, truncated and dropped."""
        return (
            f"{counted(self.read, 'row')} read, {self.truncated:,} truncated, {self.dropped:,} "
            "dropped"
        )

    def __len__(self) -> int:
        return len(self.lines)

    @overload
    def __getitem__(self, row: int) -> Example: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Example]: ...
    def __getitem__(self, row: int | slice) -> Example | Sequence[Example]:
        if isinstance(row, slice):
            return [self[each] for each in range(len(self))[row]]
        row = range(len(self))[row]  # which raises the IndexError that ends an iteration
        reader = self._readers[self.lines.file_of(row)]
        return self.item(row, examples_of(reader, self.lines.read(row), self._sizes))

    def read_ahead(self, order: Any, workers: int) -> Iterator[Example]:
        """Yield the examples of rows in an order; processes tokenize the rows behind them.

        Args:
            order: numbers of rows, an array.
            workers: the number of processes; 0 to tokenize in this process, as rows that a
                `formatting_func` converts are.
        """
        if not workers or self._options[0].formatting_func is not None:
            for row in order:
                before = sum(reader.truncated for reader in self._readers)
                example = self[int(row)]
                truncated = sum(reader.truncated for reader in self._readers) - before
                self._count([example], truncated)
                yield example
            return
        lots = (order[begin : begin + _ROWS] for begin in range(0, len(order), _ROWS))
        pool = [_Worker(self._task()) for _ in range(min(workers, -(-len(order) // _ROWS)))]
        each = self._options[0].examples_each
        try:
            working: deque[tuple[_Worker, Any]] = deque()
            for worker in pool * _REQUESTS:
                if (lot := next(lots, None)) is not None:
                    worker.request(self._lines(lot))
                    working.append((worker, lot))
            while working:
                worker, rows = working.popleft()
                header, examples = worker.reply()
                items = [
                    self.item(row, examples[at * each : (at + 1) * each])
                    for at, row in enumerate(rows.tolist())
                ]
                self._count(items, header["truncated"])
                if (lot := next(lots, None)) is not None:
                    worker.request(self._lines(lot))
                    working.append((worker, lot))
                yield from items
        finally:
            for worker in pool:
                worker.end()

    def _count(self, examples: Sequence[Example], truncated: int) -> None:
        self.read += len(examples)
        self.truncated += truncated
        self.dropped += sum(not example.ids for example in examples)

    def _task(self) -> Task:
        files = tuple(path.absolute() for path in self.lines.files)
        tokenizer = pickle.dumps(self._tokenizer)
        return Task(tokenizer, tuple(self._options), self._sizes, files)

    def _lines(self, lot: Any) -> list[tuple[int, int, str]]:
        """Return the file, the offset and the place of rows."""
        lines = self.lines
        return [(lines.file_of(row), lines.starts[row], lines.where(row)) for row in lot.tolist()]


class _Worker:
    """A process that tokenizes rows on request."""

    def __init__(self, task: Task) -> None:
        self._process = start_worker(subprocess.PIPE)
        self._send(task)

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(value, self._process.stdin)
            self._process.stdin.flush()
        except OSError as error:
            raise lost(self._process.wait()) from error

    def request(self, lines: list[tuple[int, int, str]]) -> None:
        self._send(lines)

    def reply(self) -> tuple[dict[str, Any], list[Example]]:
        """Return the header and the examples of the earliest request."""
        assert self._process.stdout is not None
        header = read_header(self._process.stdout)
        if header is None:
            raise lost(self._process.wait())
        if "error" in header:
            raise error_of(header)
        placed = read_batch(self._process.stdout, header)
        return header, [example for example, _ in placed]

    def end(self) -> None:
        self._process.kill()
        with self._process:
            pass


def streamed(
    sources: Sequence[Gathered],
    tokenizer: Tokenizer,
    options: ReadOptions,
    sizes: ModelSizes,
) -> Dataset:
    """Return the examples of files without reading them, by a scan of the rows.

    Args:
        sources: the files of each source; the first row of a source sets its format.
    Raises:
        DataError: a source is no file of JSON lines, or the first row is of no known format.
    """
    files = [path for each in sources for path in each if isinstance(path, Path)]
    if not files or len(files) < sum(map(len, sources)):
        raise DataError("streaming reads files; give paths, or leave streaming out")
    index = LineIndex.of(files)
    firsts = [*index.firsts, len(index)]
    by_file, parts, at = [], [], 0
    for source in sources:
        begin, end = firsts[at], firsts[at + len(source)]
        if begin == end:
            raise DataError(f"no examples in {', '.join(map(str, source))}")
        of_rows = options
        if options.format == "auto" and options.rows != "pairs" and not options.labels:
            row = index.read(begin)
            value = converted(row.value, row.where, options.columns, options.formatting_func)
            of_rows = replace(options, format=detect(value, row.where).name)
        by_file += [of_rows] * len(source)
        parts.append(end - begin)
        at += len(source)
    rows = StreamedRows(index, tokenizer, by_file, sizes)
    names = ["preference"] if options.rows == "pairs" else [each.format for each in by_file]
    names = ["label"] if options.labels else names
    formats = ", ".join(dict.fromkeys(names))
    return Dataset(
        rows,
        formats,
        places=_Places(index),
        checked=sizes,
        parts=tuple(parts) if len(parts) > 1 else (),
        duplicates=index.duplicates,
    )


class _Plan(Sequence[list[int]]):
    """The batches of an epoch, as parts of its order."""

    def __init__(self, order: Any, size: int) -> None:
        self.order, self._size = order, size

    def __len__(self) -> int:
        return -(-len(self.order) // self._size)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | Sequence[list[int]]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        index = range(len(self))[index]
        rows: list[int] = self.order[index * self._size : (index + 1) * self._size].tolist()
        return rows


class StreamedBatches(Batches):
    """Batches of streamed rows; a dropped row leaves its batch smaller.

    Args:
        workers: the number of processes that tokenize; 0 to tokenize in this process.
    """

    def __init__(
        self,
        rows: StreamedRows,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        mixture: Mixture | None = None,
        workers: int | None = None,
    ) -> None:
        self._examples, self._rows, self._mixture = rows, rows, mixture
        self._size = batch_size
        self._settings = {
            "batch_size": batch_size,
            "max_tokens": None,
            "seed": seed,
            "shuffle": shuffle,
        }
        self._lengths = [rows.max_length] * min(batch_size, len(rows))
        self._fingerprint = rows.checksum
        self._workers = cores() if workers is None else workers
        self._reading: Iterator[Example] | None = None
        self._at = (-1, -1)
        self.epoch = self.index = 0
        self._plan: _Plan = self.plan(0)

    def plan(self, epoch: int) -> _Plan:
        """Return the rows of each batch of an epoch."""
        seed, shuffle = self._settings["seed"] or 0, bool(self._settings["shuffle"])
        if self._mixture is not None:
            return _Plan(self._mixture.order(seed, epoch, shuffle), self._size)
        order = np.arange(len(self._rows), dtype=np.uint32)
        if shuffle:
            np.random.default_rng((abs(seed), epoch)).shuffle(order)
        return _Plan(order, self._size)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the remaining batches of the epoch, or of the next if all are dropped.

        Raises:
            DataError: a row cannot be read, or all rows of an epoch are dropped.
        """
        begin, is_first = self.epoch, True
        while self.epoch == begin or is_first:
            if self.epoch > begin + 1:
                raise DataError("no row of the streamed data has a token to learn")
            batch = self._next()
            if batch:
                is_first = False
                yield batch

    def _next(self) -> Batch:
        if self._reading is None or self._at != (self.epoch, self.index):
            self.close()
            order = self._plan.order[self.index * self._size :]
            self._reading = self._rows.read_ahead(order, self._workers)
        rows = self._plan[self.index]
        examples = [*islice(self._reading, len(rows))]
        self._advance()
        self._at = (self.epoch, self.index)
        if not self.index:
            self.close()
        kept = [(row, each) for row, each in zip(rows, examples, strict=True) if each.ids]
        return Batch([each for _, each in kept], [row for row, _ in kept])

    def close(self) -> None:
        """End the processes that tokenize; the next batch starts them again."""
        close: Callable[[], None] | None = getattr(self._reading, "close", None)
        if close is not None:
            close()
        self._reading = None
