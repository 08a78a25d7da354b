"""The process that started this one: what works for it ends with it, however it ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Linux' prctl: the signal that a process gets when the thread that started it ends."""


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends; Linux only.

    It works even if this process hangs, as in a kernel or a template.

    Args:
        parent: the id of the process that started this one, which may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
