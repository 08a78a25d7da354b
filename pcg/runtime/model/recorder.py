"""Recorders: repeat recorded work of a device without the host's work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import torch

from pcg.errors import DeviceMemoryError
from pcg.kernels.devices import is_out_of_memory, stream_for
from pcg.units import size_text


@dataclass(frozen=True)
class WarmUp:
    """The graphs that were recorded before the first step.

    Attributes:
        graphs: their number.
        seconds: the time of recording, compilations of kernels included.
        size_bytes: memory of the device that they keep, and allocations for recording.
    """

    graphs: int
    seconds: float
    size_bytes: int


class Recorder(Protocol):
    """Records functions that run again without the host's work.

    The functions of one recorder share memory: results of a function may lie where an earlier
    function had other data, and a repetition writes them again. So functions are repeated in the
    order of recording, except for those with results that are no longer read.
    """

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function, which may be called several times; return its repetition.

        It reads and writes memory that stays allocated; a repetition uses the present contents.
        """

    def apart(self) -> Recorder:
        """Return a recorder with functions that may be repeated in any order relative to these."""


class CudaRecorder:
    """Records CUDA graphs, in a memory pool of its own.

    All capture on one stream of the process. Capturing does not wait for the device, and frees no
    memory that torch has cached, unless there is no other memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._latest: torch.cuda.CUDAGraph | None = None

    def apart(self) -> CudaRecorder:
        return CudaRecorder(self._device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        stream = stream_for("recorder", self._device)
        with _CAPTURING:
            current = torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run()  # compiles kernels, and has libraries load theirs
                graph = self._captured(run)
            current.wait_stream(stream)
        return graph.replay

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        try:
            return self._capture(run)
        except RuntimeError as error:  # with which goes what its frames hold
            if not is_out_of_memory(error):
                raise
        # Torch gives back what it has cached only while nothing is captured.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self._capture(run)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a function on the current stream; `torch.cuda.graph` would stop the device."""
        graph = torch.cuda.CUDAGraph()
        # Products have a workspace for each stream that they are launched on. Graphs that share it
        # would both write it, where they run on two streams at once: so it is of the pool's memory.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Other threads may read adapters or compile meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            self._latest = graph  # torch takes no pool whose graphs are gone
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # it says that there was an error before
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return graph


_CAPTURING = Lock()
"""Held while anything is captured: torch and the stream have one capture at a time."""


def check_memory(error: Exception, what: str, pool_bytes: int) -> None:
    """Raise a DeviceMemoryError if a recording failed for lack of memory.

    Args:
        error: the error of the recording.
        what: the recorded object, with its size.
        pool_bytes: the bytes of the KV cache.
    """
    if is_out_of_memory(error):
        raise DeviceMemoryError(
            f"{what} cannot be recorded as a CUDA graph, as the GPU has too little memory left "
            f"beside a KV cache of {size_text(pool_bytes)}; use a smaller one, by a lower "
            "gpu_memory_utilization or kv_cache_gib"
        ) from error


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of a device; None without CUDA graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None
