"""The current device of a thread, threads that begin with one, and streams of a GPU.

CUDA has a current GPU for each thread: Triton launches there, events are recorded and memory is
pinned by it. It is GPU 0 in a new thread, and the user's own choice in the user's threads, whatever
device an executor has. So every thread is started by `device_thread` or `device_pool`, which set
its device, and what a user's thread calls runs within `on_device`. Operators of PyTorch go to the
device of their tensors by themselves.

Torch has 32 streams of a GPU and deals them in turn, so that the 33rd is the first again. Where
each object had a stream of its own, one would in time be that of something else, and a copy on the
stream that a graph is captured on becomes a part of the graph. So there is one for each use, for
the whole process (`stream_for`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Thread
from typing import Literal, TypeAlias

import torch

Use: TypeAlias = Literal["recorder", "branch", "copies", "side"]
_STREAMS: dict[tuple[Use, int | None], torch.cuda.Stream] = {}


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


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return a GPU's free memory and all of it, bytes; 0 and 0 of other devices."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


def own_memory(device: torch.device) -> int:
    """Return a GPU's memory that is free or this process's tensors', bytes; 0 of other devices."""
    free, _ = device_memory(device)
    return free + (torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error comes from too little memory of a device.

    A graph that ends for it is ended by an error of its own, with the cause as its context; and the
    driver, which keeps the launches of graphs, raises no OutOfMemoryError.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


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


def stream_for(use: Use, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU that has a use, on any thread the same one.

    Args:
        use: "recorder" captures graphs, and "branch" is beside it within one; "copies" brings
            adapters from the host; "side" runs parts of jobs beside a step.
    """
    key = use, indexed(device).index
    if key not in _STREAMS:
        _STREAMS.setdefault(key, torch.cuda.Stream(device))
    return _STREAMS[key]
