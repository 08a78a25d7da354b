"""The process that tokenizes: `python -m pcg.runtime.data.tokenizing_worker`.

Its argument is the id of its parent process, with which it ends. Its standard input is a file with
the pickled `Task`, and then pickled lists of rows if the task names no files. Its standard output
has frames. It runs with low priority, concurrently with steps.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pcg.errors import DataError, PcgError
from pcg.parent_process import end_with_parent
from pcg.runtime.data.dataset import ExampleReader, ReadOptions
from pcg.runtime.data.example import Example, ModelSizes, check_example
from pcg.runtime.data.files import parsed_line
from pcg.runtime.data.sources import Row, write_batch, write_frame
from pcg.runtime.text.tokenizer import Tokenizer

NICENESS = 10
"""The nice value of this process, below the priority of the engine's threads."""


@dataclass(frozen=True)
class Task:
    """The work of the process.

    Attributes:
        tokenizer: the pickled `Tokenizer`.
        options: how to read rows. Of streamed files, the options of each file; requests for rows
            follow.
        files: the files to read; None if rows follow.
        sizes: the model sizes that examples have to fit.
        share, shares: the process reads each `shares`-th block of rows, from number `share`.
    """

    tokenizer: bytes
    options: ReadOptions | tuple[ReadOptions, ...]
    sizes: ModelSizes
    files: tuple[Path, ...] | None
    share: int = 0
    shares: int = 1


def main() -> None:
    """Write the examples of the task at standard input as frames to standard output."""
    end_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    # Keep other output out of the frames.
    with os.fdopen(os.dup(1), "wb") as frames:
        os.dup2(2, 1)
        try:
            _run(sys.stdin.buffer, frames)
        except PcgError as error:
            write_frame(frames, {"error": type(error).__name__, "message": str(error)})
        except BrokenPipeError:  # the job was cancelled, or the engine's process is gone
            os._exit(1)


def _run(task_file: BinaryIO, frames: BinaryIO) -> None:
    task: Task = pickle.load(task_file)
    tokenizer: Tokenizer = pickle.loads(task.tokenizer)
    if isinstance(task.options, tuple):
        _stream(task, task.options, tokenizer, task_file, frames)
        return
    data = task.files if task.files is not None else list(_rows(task_file))
    reader = ExampleReader(data, tokenizer, task.options)
    for block in reader.blocks(task.share, task.shares):
        for example, place in block:
            check_example(example, place, task.sizes)
        write_batch(frames, block)
    facts = {name: getattr(reader, name) for name in ("format", "truncated", "dropped")}
    write_frame(frames, facts)


def _stream(
    task: Task,
    options: Sequence[ReadOptions],
    tokenizer: Tokenizer,
    requests: BinaryIO,
    frames: BinaryIO,
) -> None:
    """Answer requests, lists of rows by file, offset and place, with frames of their examples."""
    readers = [ExampleReader((), tokenizer, each) for each in options]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in task.files or ()]
        while True:
            try:
                request = pickle.load(requests)
            except EOFError:
                return
            before = sum(reader.truncated for reader in readers)
            placed = []
            for number, offset, where in request:
                files[number].seek(offset)
                row = Row(where, parsed_line(files[number].readline(), where))
                placed += [(each, "") for each in examples_of(readers[number], row, task.sizes)]
            truncated = sum(reader.truncated for reader in readers) - before
            write_batch(frames, placed, truncated=truncated)


def examples_of(reader: ExampleReader, row: Row, sizes: ModelSizes) -> list[Example]:
    """Return the checked examples of a row; without tokens for a dropped row."""
    placed = list(reader.examples([row]))
    for example, place in placed:
        check_example(example, place, sizes)
    return [example for example, _ in placed] or [Example([], [])] * reader.options.examples_each


def _rows(task_file: BinaryIO) -> Iterator[Any]:
    while True:
        try:
            yield from pickle.load(task_file)
        except EOFError:
            return
        except Exception as error:  # a class that this process does not find
            raise DataError(
                "a row has an object that another process cannot read "
                f"({type(error).__name__}: {error}); give dicts, lists, texts and numbers"
            ) from error


if __name__ == "__main__":
    main()
