"""Copies of adapters from the host's memory, which are made beside the steps of an engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


class Copies:
    """Copies under way, by the id of the adapter: one after the other, on a thread of their own.

    On GPUs they have a stream of their own as well, behind what the caller's stream runs already.

    Args:
        device: that they go to.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "pcg-copies")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: dict[int, Future[bool]] = {}

    def begin(self, key: int, copy: Callable[[], bool]) -> None:
        """Have a copy made.

        Args:
            key: of the adapter.
            copy: makes it into room that nothing else writes or reads; whether it fits there.
        """
        before = None
        if self._stream is not None:
            before = torch.cuda.current_stream(self._stream.device).record_event()
        self._under_way[key] = self._thread.submit(self._make, copy, before)

    def is_under_way(self, key: int) -> bool:
        """Whether a copy began and is not made yet."""
        copy = self._under_way.get(key)
        return copy is not None and not copy.done()

    def take(self, key: int) -> bool:
        """Whether a copy fits; waits for its end, and knows it no more.

        Raises:
            Exception: what the copy came to.
        """
        return self._under_way.pop(key).result()

    def wait(self) -> None:
        """Wait for the end of all that began."""
        wait(self._under_way.values())

    def _make(self, copy: Callable[[], bool], before: torch.cuda.Event | None) -> bool:
        # Gradients and inference mode are a thread's own.
        with torch.no_grad():
            if self._stream is None:
                return copy()
            with torch.cuda.stream(self._stream):
                if before is not None:
                    self._stream.wait_event(before)
                fits = copy()
                self._stream.synchronize()
            return fits
