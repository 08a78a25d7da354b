"""Timeouts: the requests that are given up when their time is out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from pcg.runtime.requests.sequence import Sequence

_LEAST = 64
"""The number of timeouts that are kept without looking at them."""


class Timeouts:
    """The times at which requests are given up, first those that come first.

    A request that ended is forgotten by the time when as many others came, whatever its timeout.

    Args:
        is_over: tells if a request has ended, with all of its continuations.
    """

    def __init__(self, is_over: Callable[[Sequence], bool]) -> None:
        self._is_over = is_over
        self._heap: list[tuple[float, int, Sequence]] = []
        self._most = _LEAST

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Note when a new request is given up, if it is."""
        timeout_s = sequence.request.timeout_s
        if timeout_s is None:
            return
        if len(self._heap) >= self._most:
            self._heap = [one for one in self._heap if not self._is_over(one[2])]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _LEAST
        heapq.heappush(self._heap, (sequence.submitted_s + timeout_s, sequence.number, sequence))

    def due(self, now_s: float) -> Iterator[Sequence]:
        """Return the requests whose time is out, and forget them."""
        while self._heap and self._heap[0][0] < now_s:
            yield heapq.heappop(self._heap)[2]
