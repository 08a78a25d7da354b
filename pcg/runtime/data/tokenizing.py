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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from pcg import errors
from pcg.errors import DataError, FinetuneError, PcgError
from pcg.runtime.data.dataset import Dataset, ReadOptions, no_examples
from pcg.runtime.data.example import ModelSizes
from pcg.runtime.data.formats import READ_KEYS
from pcg.runtime.data.sources import Gathered, Header, Placed, read_batch, read_header
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
    processes: int = 1,
) -> Dataset:
    """Create and check the examples of files or rows in other processes.

    Args:
        tokenizer: the pickled tokenizer; pickling it once saves 0.1 s of the GIL per job.
        processes: the number of processes, which divide the rows of files.
    Raises:
        DataError: see `load_examples`; or the process ended without a result.
        FinetuneError: the job was cancelled.
    """
    files = tuple(path.absolute() for path in data) if isinstance(data, tuple) else None
    shares = processes if files else 1
    with contextlib.ExitStack() as stack:
        tasks = []
        try:
            for share in range(shares):
                task = stack.enter_context(tempfile.TemporaryFile())
                pickle.dump(Task(tokenizer, options, sizes, files, share, shares), task)
                if isinstance(data, list):
                    keys = READ_KEYS.union(options.columns.values())
                    _write_rows(data, task, cancelling, keys)
                task.seek(0)
                tasks.append(task)
        except OSError as error:
            raise DataError(
                f"the data cannot be written for the process that tokenizes ({error.strerror}); "
                f"make room in {tempfile.gettempdir()}, or set TMPDIR"
            ) from error
        return _run(tasks, data, sizes, cancelling)


def _write_rows(rows: list[Any], task: BinaryIO, cancelling: Cancelling, keys: Set[str]) -> None:
    """Write rows with the values of some keys; values of others may be anything."""
    for start in range(0, len(rows), _ROWS):
        cancelling.check()
        lot = [_plain(row, keys) for row in rows[start : start + _ROWS]]
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


def _plain(row: object, keys: Set[str]) -> object:
    if not isinstance(row, Mapping):
        return row
    return {key: value if key in keys else None for key, value in row.items()}


def _run(
    tasks: Sequence[BinaryIO], data: Gathered, sizes: ModelSizes, cancelling: Cancelling
) -> Dataset:
    """Read the blocks of the processes in turn, which is the order of the rows."""
    placed: list[Placed] = []
    ends: list[Header] = []
    with contextlib.ExitStack() as stack:
        processes = []
        for task in tasks:
            processes.append(stack.enter_context(start_worker(task)))
            stack.enter_context(cancelling.to(processes[-1].kill))
        working, header = deque(processes), None
        while working:
            process = working.popleft()
            assert process.stdout is not None
            try:
                header = read_header(process.stdout)
                if header and "lengths" in header:
                    placed += read_batch(process.stdout, header)
                    working.append(process)
                    continue
            except EOFError:
                header = None
            if header is None or "error" in header:
                for each in processes:
                    each.kill()
                break
            ends.append(header)
    cancelling.check()
    if header is None:
        raise lost(process.returncode)
    if "error" in header:
        raise error_of(header)
    truncated, dropped = (sum(end[name] for end in ends) for name in ("truncated", "dropped"))
    if not placed:
        raise no_examples(data, dropped)
    examples, places = tuple(e for e, _ in placed), tuple(place for _, place in placed)
    return Dataset(examples, header["format"], truncated, dropped, places, checked=sizes)


def error_of(header: Header) -> PcgError:
    """Return the error of a frame."""
    kind: type[PcgError] = getattr(errors, header["error"], DataError)
    return kind(header["message"])


def start_worker(task: BinaryIO | int) -> subprocess.Popen[bytes]:
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


def lost(status: int) -> DataError:
    """Return the error of a process that ended early."""
    how = f"ended with status {status}"
    if status == _KILLED_BY_SYSTEM:
        how = "was killed, as the system does where memory runs out"
    return DataError(
        f"the process that tokenizes the data {how}, and gave no result; give less data, or see "
        "what it wrote to standard error"
    )
