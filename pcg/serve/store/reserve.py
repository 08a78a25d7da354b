"""Room on the disk that is kept for deletions, so that a full disk can be emptied.

The reserve is a file of `RESERVE_BYTES`. A write that may use it and finds no room takes half of
what is left, and the store only reads and deletes until the reserve is whole again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

RESERVE = "reserve"
RESERVE_BYTES = 4 * 2**20
"""Room for the pages of some thousand deletions in the database's log."""
_LEAST_BYTES = 2**16
_AGAIN_S = 0.5
"""Time between two tries to make it whole, seconds."""


class Reserve:
    """The reserve of a data folder, for one thread at a time.

    Attributes:
        is_whole: False while the store only reads and deletes.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE
        self._tried_s = -_AGAIN_S
        self.is_whole = self._size_bytes() >= RESERVE_BYTES

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def restore(self) -> bool:
        """Fill the reserve if there is room; return True if it is whole."""
        if self.is_whole or time.monotonic() - self._tried_s < _AGAIN_S:
            return self.is_whole
        self._tried_s = time.monotonic()
        before = self._size_bytes()
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # no room for its name
            return False
        try:
            os.posix_fallocate(handle, 0, RESERVE_BYTES)
            self.is_whole = True
        except OSError:
            os.ftruncate(handle, before)
        finally:
            os.close(handle)
        return self.is_whole

    def release(self) -> bool:
        """Give half of the reserve to the disk; return False if nothing is left."""
        before = self._size_bytes()
        if not before:
            return False
        os.truncate(self._path, before // 2 if before > _LEAST_BYTES else 0)
        self.is_whole = False
        return True
