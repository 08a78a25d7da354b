"""End a child process with its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Linux' prctl option: the signal to a process when the thread that started it ends."""


def end_with_parent(parent: int) -> None:
    """Let Linux kill this process when the thread that started it ends.

    It works even if this process hangs, as in a kernel or a template.

    Args:
        parent: id of the process that started this process, which may have ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
