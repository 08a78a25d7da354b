"""Devices: the current one of a thread, streams of a GPU, and copies and tables there.

CUDA has a current GPU for each thread: Triton launches there, events are recorded and memory is
pinned by it. It is GPU 0 in a new thread, and the user's choice in the user's threads, whatever
device an executor has. So every thread is started by `device_thread` or `device_pool`, which set
its device, and a call of a user's thread runs within `on_device`. Operators of PyTorch go to the
device of their tensors by themselves.

Torch has 32 streams of a GPU and deals them in turn, so that the 33rd is the first again. If each
object had its own stream, two objects would in time share a stream, and a copy on the stream that a
graph is captured on becomes a part of the graph. So each use has a stream, for the whole
process (`stream_for`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from threading import Thread
from typing import Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

Use: TypeAlias = Literal["recorder", "branch", "copies", "side"]
_STREAMS: dict[tuple[Use, int | None], torch.cuda.Stream] = {}


def use_device(device: torch.device | None) -> None:
    """Set this thread's current device; None changes nothing."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Set this thread's current device within a `with`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def indexed(device: torch.device) -> torch.device:
    """Return a device with its index: that of "cuda" is this thread's current GPU."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return a GPU's free and total memory, bytes; 0 and 0 of other devices."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


def own_memory(device: torch.device) -> int:
    """Return a GPU's memory that is free or this process's tensors', bytes; 0 of other devices."""
    free, _ = device_memory(device)
    return free + (torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether too little device memory caused an error.

    The end of a failed graph capture raises another error, with the cause as its context; and the
    driver, which keeps the launches of graphs, raises no OutOfMemoryError.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def device_thread(device: torch.device | None, act: Callable[[], object], name: str) -> Thread:
    """Make a daemon thread with `device` as its current device; None leaves the default."""

    def run() -> None:
        use_device(device)
        act()

    return Thread(target=run, name=name, daemon=True)


def device_pool(device: torch.device | None, threads: int, name: str) -> ThreadPoolExecutor:
    """Make a pool of threads with `device` as their current device."""
    return ThreadPoolExecutor(threads, name, initializer=partial(use_device, device))


def stream_for(use: Use, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU that has a use, the same in any thread.

    Args:
        use: "recorder" captures graphs, and "branch" runs parallel to it within a graph; "copies"
            copies adapters from the host; "side" runs parts of jobs parallel to a step.
    """
    key = use, indexed(device).index
    if key not in _STREAMS:
        _STREAMS.setdefault(key, torch.cuda.Stream(device))
    return _STREAMS[key]


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting.

    A GPU reads pinned memory, which torch keeps until then; the host would wait for a copy from any
    other memory.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def uploaded_list(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device, [n]."""
    return uploaded(torch.tensor(values, dtype=dtype), device)


def downloaded(x: Tensor) -> Tensor:
    """Copy a tensor to the host (pinned); read it after an event that is recorded afterwards."""
    if x.device.type != "cuda":
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return copy.copy_(x, non_blocking=True)


Make = TypeVar("Make", bound=Callable[..., object])
_MOST = 256

_KEPT: ContextVar[list[object] | None] = ContextVar("kept tables", default=None)


def table_cache(make: Make) -> Make:
    """Cache a function's last tables by its arguments."""
    cached = lru_cache(maxsize=_MOST)(make)

    @wraps(cached)
    def table(*args: Hashable) -> object:
        tables = cached(*args)
        kept = _KEPT.get()
        if kept is not None:
            kept.append(tables)
        return tables

    return cast(Make, table)


@contextmanager
def kept_tables() -> Iterator[list[object]]:
    """Collect the used tables, for a recorder that has to keep their memory."""
    kept: list[object] = []
    token = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(token)
