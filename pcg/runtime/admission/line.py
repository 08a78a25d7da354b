"""A line of waiting requests, of which any joins or leaves at once, however many there are.

Requests of a lower priority number stand before those of a higher one. Among equals the preempted
ones are first, the earliest admitted before the others, and then all as they came.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from pcg.runtime.requests.sequence import Sequence


class Line:
    """Waiting requests in the order of their turns."""

    def __init__(self) -> None:
        self._of_priority: dict[int, OrderedDict[Sequence, None]] = {}
        self._priorities: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            yield from self._of_priority[priority]

    def newest_first(self) -> Iterator[Sequence]:
        """Iterate by priority, too, but over the requests that came last before the others."""
        for priority in self._priorities:
            yield from reversed(self._of_priority[priority])

    def add(self, sequence: Sequence) -> None:
        """Append a request that came."""
        self._equals(sequence.request.priority)[sequence] = None
        self._count += 1

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted request before its equals."""
        equals = self._equals(sequence.request.priority)
        equals[sequence] = None
        equals.move_to_end(sequence, last=False)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a request, wherever it stands."""
        priority = sequence.request.priority
        equals = self._of_priority[priority]
        del equals[sequence]
        self._count -= 1
        if not equals:
            del self._of_priority[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

    def _equals(self, priority: int) -> OrderedDict[Sequence, None]:
        if priority not in self._of_priority:
            self._of_priority[priority] = OrderedDict()
            insort(self._priorities, priority)
        return self._of_priority[priority]
