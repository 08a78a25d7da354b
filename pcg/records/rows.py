"""Files of JSON lines that a run appends to; readable after a crash at any instant.

A row is a complete line. After a crash, an incomplete last line is ignored by readers, and removed
by the next writer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pcg.errors import RecordError
from pcg.files import json_object, read_bytes, shown_path

_TRIES = 20
_PAUSE_S = 0.01
"""Pause before a second try to lock: `is_written` holds the lock for an instant."""


class RowWriter:
    """Appends rows to a file, under an exclusive lock.

    A row is passed to the system before `append` returns, so that killing the process loses no row.
    If the disk is full, the file is left unchanged.
    """

    def __init__(self, path: Path) -> None:
        """Open or create a file. RecordError: not writable, or another run is writing it."""
        self._path = path
        self._size = 0
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except (OSError, ValueError) as error:
            raise _unwritable(path, error) from error
        if not _locked(self._handle):
            os.close(self._handle)
            raise RecordError(
                f"another run writes {shown_path(path)} now; wait for its end, or give another "
                "folder"
            )

    def cut(self, stays: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        """Remove the first row for which `stays` is False, and all later rows; return the rest.

        Raises:
            RecordError: the file is damaged before its end, or cannot be cut.
        """
        kept = []
        self._size = 0
        for row, end in _rows(self._path):
            if not stays(row):
                break
            kept.append(row)
            self._size = end
        try:
            os.ftruncate(self._handle, self._size)
        except OSError as error:
            raise _unwritable(self._path, error) from error
        return kept

    def append(self, rows: list[Mapping[str, Any]]) -> None:
        """Append all rows or none. RecordError: the rows cannot be written."""
        lines = [json.dumps(row, separators=(",", ":"), allow_nan=False) for row in rows]
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            written = os.write(self._handle, data)
            while written < len(data):  # after a partial write, the next one raises the error
                written += os.write(self._handle, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise _unwritable(self._path, error) from error
        self._size += len(data)

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; empty without a file. RecordError: the file is damaged."""
    return [row for row, _ in _rows(path)] if path.exists() else []


def is_written(path: Path) -> bool:
    """Return True if a running run has the file open; False on file systems without locks.

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise RecordError(f"{shown_path(path)} cannot be read: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each complete row with the offset of its end."""
    data = read_bytes(path, RecordError)
    start, number = 0, 0
    while (end := data.find(b"\n", start)) >= 0:
        number += 1
        try:
            row = json_object(data[start:end], f"{shown_path(path)}, line {number},", RecordError)
        except RecordError:
            if data.find(b"\n", end + 1) >= 0:
                raise
            return  # a power failure may leave a last line of zeros
        start = end + 1
        yield row, start


def _locked(handle: int) -> bool:
    """Lock an open file; return False if this or another process has locked it."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except OSError:  # a file system without locks
            return True
        else:
            return True
    return False


def _unwritable(path: Path, error: Exception) -> RecordError:
    reason = getattr(error, "strerror", None) or "it is no name of a file"
    return RecordError(
        f"{shown_path(path)} cannot be written: {reason}; what was there stays. Make room, or give "
        "another folder"
    )
