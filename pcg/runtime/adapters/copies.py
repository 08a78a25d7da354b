"""Copies of adapters from host memory, which run beside the steps of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from pcg.kernels.devices import device_pool, stream_for


class AdapterCopies:
    """Copies that run one after the other on a thread of their own, by the adapter's id.

    On a GPU they run on a stream beside all steps, which waits for the caller's stream first.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = device_pool(device, 1, "pcg copies")
        self._stream = stream_for("copies", device) if device.type == "cuda" else None
        self._under_way: dict[int, Future[bool]] = {}

    def begin(self, key: int, copy: Callable[[], bool]) -> None:
        """Begin a copy of an adapter, by its id, into memory that nothing else reads or writes."""
        before = None
        if self._stream is not None:
            before = torch.cuda.current_stream(self._stream.device).record_event()
        self._under_way[key] = self._thread.submit(self._make, copy, before)

    def is_under_way(self, key: int) -> bool:
        """Return True if a copy began and has not finished."""
        copy = self._under_way.get(key)
        return copy is not None and not copy.done()

    def take(self, key: int) -> bool:
        """Wait for a copy and forget it; returns True if it was made.

        Where the adapter does not fit, or the copy failed, it is copied again when it runs: then an
        error belongs to those who asked for it, and not to whoever waits for the copy.
        """
        copy = self._under_way.pop(key)
        return copy.exception() is None and copy.result()

    def wait(self) -> None:
        wait(self._under_way.values())

    def reset(self) -> None:
        """Wait for all copies, and forget them."""
        self.wait()
        self._under_way.clear()

    def _make(self, copy: Callable[[], bool], before: torch.cuda.Event | None) -> bool:
        # Gradient mode and inference mode are set per thread.
        with torch.no_grad():
            if self._stream is None:
                return copy()
            with torch.cuda.stream(self._stream):
                if before is not None:
                    self._stream.wait_event(before)
                fits = copy()
                self._stream.synchronize()
            return fits
