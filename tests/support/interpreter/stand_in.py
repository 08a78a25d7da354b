"""A GPU that is not there: tensors on "cuda" that the CPU computes, and what a device would refuse.

Within `stand_in()` torch says that there is a GPU. A tensor on it is a wrapper of one on the CPU;
operators run on what is wrapped, and Triton's kernels in the interpreter (`device_tensors.py`).
What would go wrong on a device, and not on the CPU, is an error:

- an operator or a kernel that is given tensors of both, or pointers into the host's memory;
- to wait for the device where `torch.cuda.set_sync_debug_mode("error")` or a capture forbids it;
- to write pinned memory that the device has not read yet, or to have it write to the host's with
  nobody waiting;
- to launch, to pin memory, or to record an event on the other of two GPUs, which is the current
  one of a thread that has not set its device;
- two streams that touch the same bytes, one of them to write, with nothing to order them, or
  memory that one of them frees while the other may still use it (`streams.py`); of products of the
  vendor's library this is so of their workspaces, too;
- a stream that runs what another thread captures a graph of.

A graph records what runs as a `Tape` does, in the memory of its pool. Autograd does not run
backward here, as its engine looks for a real device.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from tests.support.interpreter.device_tensors import (
    MEMORY,
    DeviceMode,
    DeviceTensor,
    Workspaces,
    clear_workspaces,
    launch,
    using,
    workspaces,
)
from tests.support.interpreter.streams import DEVICE, ORDER, Dealt, DeviceError, Event, Stream
from tests.support.interpreter.tape import Arena, noting

_Grid = interpreter.GridExecutor


class _Pools:
    """The memory of graphs, by its handle."""

    def __init__(self) -> None:
        self._arenas: dict[object, Arena] = {}
        self._graphs: Counter[object] = Counter()
        self._handles = count(1)

    def handle(self) -> tuple[int, int]:
        return 0, next(self._handles)

    def begin(self, graph: Graph, handle: object) -> Arena:
        """Return the memory that a graph takes its own from.

        Raises:
            RuntimeError: the last graph of the pool is gone, and its memory is not: so says torch.
        """
        if handle in self._arenas and not self._graphs[handle]:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0 of a graph's pool")
        self._graphs[handle] += 1
        weakref.finalize(graph, self._graphs.subtract, [handle])
        return self._arenas.setdefault(handle, Arena())

    def drop_unused(self) -> None:
        self._arenas = {h: arena for h, arena in self._arenas.items() if self._graphs[h]}


_POOLS = _Pools()


class Graph:
    """The stand-in of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._notes: list[Callable[[], None]] = []
        self._workspaces: Workspaces = {}
        self._capture = ExitStack()

    def capture_begin(
        self, pool: object = None, capture_error_mode: str = "global", **_: Any
    ) -> None:
        if ORDER.current is ORDER.streams[0]:
            raise DeviceError("a graph is captured on the default stream")
        arena = _POOLS.begin(self, pool or _POOLS.handle())
        self._capture.enter_context(ORDER.capture())
        self._notes = self._capture.enter_context(noting(arena))

    def capture_end(self) -> None:
        if ORDER.current is not ORDER.first_captured:
            raise DeviceError("a capture ends on another stream than it began on")
        self._workspaces = workspaces()
        self._capture.close()

    def replay(self) -> None:
        with using(self._workspaces):
            for again in self._notes:
                again()


@contextmanager
def _captured(
    graph: Graph,
    pool: object = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """The stand-in of `torch.cuda.graph`."""
    ORDER.synchronize()
    _empty_cache()
    with _on_stream(stream or Dealt()):
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


def _empty_cache() -> None:
    """Give memory back, for which the device stops."""
    ORDER.synchronize()
    _POOLS.drop_unused()


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    """The stand-in of `torch.cuda.stream`, on whatever thread."""
    before = ORDER.current
    ORDER.current = stream or before
    try:
        with _on_gpu(DEVICE if stream else None), _on_thread():
            yield
    finally:
        ORDER.current = before


@contextmanager
def _on_gpu(device: Any) -> Iterator[None]:
    """The stand-in of `torch.cuda.device`."""
    before = ORDER.gpu
    if device is not None:
        ORDER.gpu = torch.device(device).index
    try:
        yield
    finally:
        ORDER.gpu = before


def _set_device(device: Any) -> None:
    """The stand-in of `torch.cuda.set_device`, which makes a thread ready for its tensors."""
    ORDER.gpu = torch.device(device).index
    if threading.current_thread() is not threading.main_thread():
        torch._C._set_only_lift_cpu_tensors(True)
        DeviceMode().__enter__()  # for as long as the thread lives


def _current_stream(device: Any = None) -> Stream:
    ORDER.check_device("the current stream", device)
    return ORDER.current


def _synchronize(device: Any = None) -> None:
    ORDER.check_device("what is waited for", device)
    ORDER.synchronize()


@contextmanager
def _on_thread() -> Iterator[None]:
    """Have this thread's factories make tensors of the device's."""
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with DeviceMode():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


class _Generator(torch.Generator):
    """The stand-in of `torch.Generator`: one of the CPU, wherever it says it is."""

    def __new__(cls, device: object = "cpu") -> Any:
        return super().__new__(cls, "cpu")


_PROPERTIES = SimpleNamespace(
    name="stand-in", total_memory=MEMORY.total, multi_processor_count=4, major=9, minor=0, uuid="0"
)


def _set_sync_debug_mode(mode: int | str) -> None:
    ORDER.may_wait = mode not in (2, "error")


_TORCH_CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "current_device": lambda: ORDER.gpu,
    "set_device": _set_device,
    "device": _on_gpu,
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: _PROPERTIES,
    "mem_get_info": lambda device=None: (MEMORY.total - MEMORY.used, MEMORY.total),
    "empty_cache": _empty_cache,
    "synchronize": _synchronize,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_sync_debug_mode": lambda: 0 if ORDER.may_wait else 2,
    "is_current_stream_capturing": lambda: ORDER.current in ORDER.captured,
    "current_stream": _current_stream,
    "stream": _on_stream,
    "Stream": Dealt,
    "Event": Event,
    "CUDAGraph": Graph,
    "graph": _captured,
    "graph_pool_handle": _POOLS.handle,
}


@functools.cache
def _let_torch_know_cuda() -> None:
    """Set a guard that does nothing for tensors on "cuda".

    Torch has one, and takes it only in place of one that knows of no device; builds for CPUs have
    none. So they are given that first: an object whose every function gives 0.
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[1] is None:
        nothing = ctypes.CFUNCTYPE(ctypes.c_long)(lambda: 0)
        functions = (ctypes.c_void_p * 64)(*[ctypes.cast(nothing, ctypes.c_void_p).value] * 64)
        guard = ctypes.c_void_p(ctypes.addressof(functions))
        guards[1] = ctypes.addressof(guard)
        torch._C._ensureCUDADeviceGuardSet()


@contextmanager
def stand_in() -> Iterator[None]:
    """Have a GPU, whose kernels the interpreter runs.

    Raises:
        DeviceError: something that a device would refuse, or get wrong.
    """
    run = _Grid.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, DeviceTensor) for x in tree_leaves((args, kwargs))):
            return launch(run, self, args, kwargs)
        return run(self, *args, **kwargs)

    with patch.object(_Grid, "__call__", launched), tensors_on_cuda():
        yield
        ORDER.synchronize()


@contextmanager
def tensors_on_cuda() -> Iterator[None]:
    """Have a GPU that runs torch's operators, and has nothing of the graphs of one before."""
    _let_torch_know_cuda()
    _POOLS.drop_unused()
    clear_workspaces()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # A module's parameters become tensors of another class.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with ExitStack() as stack:
            for name, new in _TORCH_CUDA.items():
                stack.enter_context(patch.object(torch.cuda, name, new))
            stack.enter_context(patch.object(torch, "Generator", _Generator))
            clear = ("_cuda_clearCublasWorkspaces", clear_workspaces)
            stack.enter_context(patch.object(torch._C, *clear, create=True))
            stack.enter_context(_on_thread())
            stack.enter_context(_on_gpu(DEVICE))
            # Its kernels may not compute anything, as where they are only compiled.
            stack.enter_context(patch("pcg.kernels.triton.ptxas.failure", lambda device: None))
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        _set_sync_debug_mode("default")
