"""A disk that is soon full: a file system in memory, where this process may mount one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, size_kib: int) -> Iterator[Path]:
    """Mount it; skips the test where that is not allowed."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill_up(disk: Path) -> Path:
    """Leave no byte of it; returns the file that has them."""
    file = disk / "others"
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as rest:
        while True:
            rest.write(b"x" * 4096)
    return file
