"""The process that tokenizes: `python -m pcg.runtime.data.tokenizing_worker`.

Its argument is the id of its parent process, with which it ends. Its standard input is a file with
the pickled `Task`, and then pickled lists of rows if the task names no files. Its standard output
has frames. It runs with low priority, concurrently with steps.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pcg.errors import DataError, PcgError
from pcg.parent_process import end_with_parent
from pcg.runtime.data.dataset import ExampleReader, ReadOptions
from pcg.runtime.data.example import ModelSizes, check_example
from pcg.runtime.data.sources import Placed, write_batch, write_frame
from pcg.runtime.text.tokenizer import Tokenizer

NICENESS = 10
"""The nice value of this process, below the priority of the engine's threads."""
_BATCH = 64
"""Examples per frame, so that reading a frame holds the GIL for a fraction of a millisecond."""


@dataclass(frozen=True)
class Task:
    """The work of the process.

    Attributes:
        tokenizer: the pickled `Tokenizer`.
        files: the files to read; None if rows follow.
        sizes: the model sizes that examples have to fit.
    """

    tokenizer: bytes
    options: ReadOptions
    sizes: ModelSizes
    files: tuple[Path, ...] | None


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
    data = task.files if task.files is not None else list(_rows(task_file))
    tokenizer: Tokenizer = pickle.loads(task.tokenizer)
    reader = ExampleReader(data, tokenizer, task.options)
    batch: list[Placed] = []
    for example, place in reader:
        check_example(example, place, task.sizes)
        batch.append((example, place))
        if len(batch) == _BATCH:
            write_batch(frames, batch)
            batch.clear()
    write_batch(frames, batch)
    facts = {name: getattr(reader, name) for name in ("format", "truncated", "dropped")}
    write_frame(frames, facts)


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
