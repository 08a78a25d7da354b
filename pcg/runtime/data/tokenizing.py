"""Tokenizing in a separate process, which does not hold the GIL and can be ended at any time."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from pcg import errors
from pcg.errors import DataError, FinetuneError, PcgError
from pcg.runtime.data.dataset import Dataset, ReadOptions
from pcg.runtime.data.example import ModelSizes
from pcg.runtime.data.formats import READ_KEYS
from pcg.runtime.data.sources import Gathered, Placed, read_batch, read_header
from pcg.runtime.data.tokenizing_worker import Task


class Cancelling:
    """A flag that any thread may set once; setting it calls functions that end running work."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = Lock()
        self._is_cancelled = False
        self._acts: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def error(self) -> FinetuneError:
        """The error of a cancelled job."""
        return FinetuneError(f"job {self._job!r} was cancelled")

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            acts, self._acts = self._acts, []
        for act in acts:
            act()

    def check(self) -> None:
        """Raise a FinetuneError after cancellation."""
        if self._is_cancelled:
            raise self.error

    def add(self, act: Callable[[], None]) -> None:
        """Call a function, which must not block, on cancellation, or now if already cancelled."""
        with self._lock:
            is_late = self._is_cancelled
            if not is_late:
                self._acts.append(act)
        if is_late:
            act()

    @contextlib.contextmanager
    def to(self, act: Callable[[], None]) -> Iterator[None]:
        """Call a function, which must not block, on cancellation within the block."""
        self.add(act)
        try:
            yield
        finally:
            with self._lock:
                if act in self._acts:
                    self._acts.remove(act)


_ROWS = 64
"""Number of rows per pickle, which holds the GIL."""
_PAUSE_S = 1e-3
"""Pause between two pickles, so that steps can run."""
_NICE = 10
"""By how much it yields the processor to the engine's steps, a tenth of a core if it has to."""
_KILLED_BY_SYSTEM = -signal.SIGKILL


def load_apart(
    tokenizer: bytes,
    cancelling: Cancelling,
    data: Gathered,
    options: ReadOptions,
    sizes: ModelSizes,
) -> Dataset:
    """Create and check the examples of files or rows in another process.

    Args:
        tokenizer: the pickled tokenizer; pickling it once saves 0.1 s of the GIL per job.
    Raises:
        DataError: see `load_examples`; or the process ended without a result.
        FinetuneError: the job was cancelled.
    """
    files = tuple(path.absolute() for path in data) if isinstance(data, tuple) else None
    with tempfile.TemporaryFile() as task:
        try:
            pickle.dump(Task(tokenizer, options, sizes, files), task)
            if isinstance(data, list):
                _write_rows(data, task, cancelling)
            task.seek(0)
        except OSError as error:
            raise DataError(
                f"the data cannot be written for the process that tokenizes ({error.strerror}); "
                f"make room in {tempfile.gettempdir()}, or set TMPDIR"
            ) from error
        return _run(task, sizes, cancelling)


def _write_rows(rows: list[Any], task: BinaryIO, cancelling: Cancelling) -> None:
    for start in range(0, len(rows), _ROWS):
        cancelling.check()
        lot = [_plain(row) for row in rows[start : start + _ROWS]]
        try:
            task.write(pickle.dumps(lot))
        except OSError:
            raise
        except Exception as error:  # custom pickling may raise any error
            raise DataError(
                f"data[{start}] or one of the {len(lot) - 1} rows behind it has an object that "
                f"cannot be pickled ({type(error).__name__}: {error}); give dicts, lists, texts "
                "and numbers"
            ) from error
        time.sleep(_PAUSE_S)


def _plain(row: object) -> object:
    if not isinstance(row, Mapping):
        return row
    return {key: value if key in READ_KEYS else None for key, value in row.items()}


def _run(task: BinaryIO, sizes: ModelSizes, cancelling: Cancelling) -> Dataset:
    with _start(task) as process, cancelling.to(process.kill):
        assert process.stdout is not None
        placed: list[Placed] = []
        try:
            while (header := read_header(process.stdout)) and "lengths" in header:
                placed += read_batch(process.stdout, header)
        except EOFError:
            header = None
    cancelling.check()
    if header is None:
        raise _lost(process.returncode)
    if "error" in header:
        kind: type[PcgError] = getattr(errors, header["error"], DataError)
        raise kind(header["message"])
    examples, places = tuple(e for e, _ in placed), tuple(place for _, place in placed)
    facts = (header["format"], header["truncated"], header["dropped"], places)
    return Dataset(examples, *facts, checked=sizes)


def _start(task: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the process, which imports the same pcg, and no module of the working directory.

    A Ctrl-C in the terminal reaches only this process, which may save its state.
    """
    places = [place for place in sys.path if place]
    root = str(Path(errors.__file__).parents[1])
    paths = os.pathsep.join(places if root in places else [*places, root])
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pcg.runtime.data.tokenizing_worker", str(os.getpid())],
            stdin=task,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,
        )
    except OSError as error:
        raise DataError(
            f"no process can be started to tokenize the data: {error.strerror}; end others, or "
            "allow this user more"
        ) from error
    nice = os.getpriority(os.PRIO_PROCESS, 0) + _NICE
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, process.pid, min(nice, 19))
    return process


def _lost(status: int) -> DataError:
    how = f"ended with status {status}"
    if status == _KILLED_BY_SYSTEM:
        how = "was killed, as the system does where memory runs out"
    return DataError(
        f"the process that tokenizes the data {how}, and gave no result; give less data, or see "
        "what it wrote to standard error"
    )
