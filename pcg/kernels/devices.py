"""The current device of a thread, and threads that begin with one.

CUDA has a current GPU for each thread: Triton launches there, events are recorded and memory is
pinned by it. It is GPU 0 in a new thread, and the user's own choice in the user's threads, whatever
device an executor has. So every thread is started by `device_thread` or `device_pool`, which set
its device, and what a user's thread calls runs within `on_device`. Operators of PyTorch go to the
device of their tensors by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Thread

import torch


def use_device(device: torch.device | None) -> None:
    """Have this thread launch and copy on a device; None where it does neither."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Have this thread launch and copy on a device within a `with`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def indexed(device: torch.device) -> torch.device:
    """Return a device with its index: that of "cuda" is this thread's current GPU."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())


def device_thread(device: torch.device | None, act: Callable[[], object], name: str) -> Thread:
    """Make a thread that does not keep the process alive.

    Args:
        device: the one that it launches or copies on; None where it does neither.
    """

    def run() -> None:
        use_device(device)
        act()

    return Thread(target=run, name=name, daemon=True)


def device_pool(device: torch.device | None, threads: int, name: str) -> ThreadPoolExecutor:
    """Make a pool of up to so many threads; `device` is as of `device_thread`."""
    return ThreadPoolExecutor(threads, name, initializer=partial(use_device, device))
