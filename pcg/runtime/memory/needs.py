"""Needs: the pages that requests need at most, and the most of any, found at once."""

from __future__ import annotations

import heapq
from collections import Counter


class Needs:
    """Numbers of pages that come and go."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._largest_first: list[int] = []

    @property
    def most(self) -> int:
        """The largest number; 0 if there is none."""
        while self._largest_first and -self._largest_first[0] not in self._counts:
            heapq.heappop(self._largest_first)
        return -self._largest_first[0] if self._largest_first else 0

    def add(self, pages: int) -> None:
        if pages not in self._counts:
            heapq.heappush(self._largest_first, -pages)
        self._counts[pages] += 1

    def remove(self, pages: int) -> None:
        self._counts[pages] -= 1
        if not self._counts[pages]:
            del self._counts[pages]
