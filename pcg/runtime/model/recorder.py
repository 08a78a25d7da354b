"""Recorders: devices that run again what they ran, without the host's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pcg.errors import DeviceMemoryError
from pcg.kernels.devices import is_out_of_memory
from pcg.units import size_text


@dataclass(frozen=True)
class WarmUp:
    """The graphs that were recorded before the first step.

    Attributes:
        graphs: their number.
        seconds: the time that they took, compilations of their kernels included.
        size_bytes: memory of the device that they keep, and what was allocated to record them.
    """

    graphs: int
    seconds: float
    size_bytes: int


class Recorder(Protocol):
    """Makes functions that run again without the host's work.

    The functions of one recorder share memory: what one makes lies where one recorded before it had
    something else, and writes it again when it is repeated. So they are repeated in the order in
    which they were recorded, but for those whose results nobody reads any more.
    """

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a function, which is called any number of times, and return one that repeats it.

        It reads and writes memory that stays, and the repetition takes its present contents.
        """

    def apart(self) -> Recorder:
        """Return a recorder whose functions are repeated in any order among those of this one."""


class CudaRecorder:
    """Records CUDA graphs, in a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def apart(self) -> CudaRecorder:
        return CudaRecorder(self._device)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels, and has libraries make their workspaces
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may read adapters or compile meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay


def check_memory(error: Exception, what: str, pool_bytes: int) -> None:
    """Raise a DeviceMemoryError if something could not be recorded for lack of memory.

    Args:
        error: what ended the recording.
        what: what was recorded, with its size.
        pool_bytes: the bytes of the KV cache.
    """
    if is_out_of_memory(error):
        raise DeviceMemoryError(
            f"{what} cannot be recorded as a CUDA graph, as the GPU has too little memory left "
            f"beside a KV cache of {size_text(pool_bytes)}; use a smaller one, by a lower "
            "gpu_memory_utilization or kv_cache_gib"
        ) from error


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of a device; None if it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None
