"""Deadlines: the times after which requests are given up."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as List
from itertools import count

from pcg.runtime.requests.sequence import Sequence


class Deadlines:
    """The requests that have a time, the earliest first; those that are over are forgotten."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, List[Sequence]]] = []
        self._number = count()
        self._most = 64

    def __len__(self) -> int:
        return len(self._due)

    def add(self, due_s: float, request: List[Sequence]) -> None:
        """Add a request, as its continuations, with the time on the engine's clock."""
        heapq.heappush(self._due, (due_s, next(self._number), request))
        if len(self._due) > self._most:
            self._due = [one for one in self._due if not all(each.is_over for each in one[2])]
            heapq.heapify(self._due)
            self._most = 2 * len(self._due) + 64

    def passed(self, now_s: float) -> Iterator[List[Sequence]]:
        """Yield the requests whose time is out, among them some that are over."""
        while self._due and self._due[0][0] < now_s:
            yield self._due[0][2]
            heapq.heappop(self._due)  # once it is ended, so that an error leaves it here
