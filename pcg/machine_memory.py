"""The memory of this machine, or of the container in which the process runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
"""The root of the kernel's files."""
CGROUP_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, of cgroup versions 2 and 1."""


class Memory(NamedTuple):
    """Bytes of memory; None where the system does not tell.

    Attributes:
        total: all memory, or the container's limit if that is less.
        available: memory that can be used without swapping.
    """

    total: int | None
    available: int | None


def memory() -> Memory:
    """Return the memory of the machine, or of its container if that is less."""
    try:
        text = (ROOT / "proc/meminfo").read_text()
        total, available = (
            int(match[1]) * 1024
            for key in ("MemTotal", "MemAvailable")
            if (match := re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE))
        )
    except (OSError, ValueError):
        return _memory_of_posix()
    for limit_name, used_name in CGROUP_FILES:
        try:
            limit = int((ROOT / limit_name).read_text())
            used = int((ROOT / used_name).read_text())
        except (OSError, ValueError):  # no such cgroup, or the limit "max"
            continue
        if limit < total:
            return Memory(limit, min(available, limit - used))
    return Memory(total, available)


def _memory_of_posix() -> Memory:
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total = page_bytes * os.sysconf("SC_PHYS_PAGES")
        return Memory(total, page_bytes * os.sysconf("SC_AVPHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return Memory(None, None)
