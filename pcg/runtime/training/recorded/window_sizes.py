"""The sizes of a job's recorded windows, in tokens.

A graph is recorded for a fixed number of tokens, and holds the memory that its layer saves for
backward. A job's windows therefore have a single size at a time: the size that the sharing rule
requested repeatedly. The last window of a pass is padded with tokens of no sequence, or runs
eagerly if the window is so short that padding would take longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

SIZES: tuple[int, ...] = (
    16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip
"""Tokens of recorded windows: two sizes per octave, so that rounding down loses at most a third of
a window."""
_LEAST_PART = 8
"""A window below 1/8 of the size runs eagerly, as padding would take longer."""
_TRIES = 8
"""Consecutive requests of another size before a change, as recording a size takes a pass."""


class WindowSizes:
    """Chooses the size of windows.

    Attributes:
        size: tokens of a recorded window, changed only between passes; 0 before the first window.
    """

    def __init__(self) -> None:
        self.size = 0
        self._next = 0
        self._asked = 0
        self._times = 0

    def begin_with(self, tokens: int) -> None:
        """Set the initial size to the largest size up to `tokens`."""
        self.size = self._next = SIZES[max(bisect_right(SIZES, tokens) - 1, 0)]

    def begin_pass(self) -> None:
        """Adopt the requested size."""
        self.size = self._next

    def fitting(self, tokens: int, remaining: int) -> int:
        """Return the size of the next window, at most `tokens`.

        Args:
            remaining: tokens of the pass that have not run forward yet.
        """
        tokens = min(tokens, remaining)
        if tokens < remaining:
            self._ask(SIZES[max(bisect_right(SIZES, tokens) - 1, 0)])
        elif tokens > self.size:
            self._ask(SIZES[min(bisect_left(SIZES, tokens), len(SIZES) - 1)])
        window = min(tokens, self.size)
        # Use two padded windows instead of a full window and a rest that would run eagerly.
        half = (remaining + 1) // 2
        is_short = 0 < _LEAST_PART * (remaining - window) < self.size
        return half if is_short and half <= window else window

    def _ask(self, size: int) -> None:
        """Count a request of a size; adopt the size after enough consecutive requests."""
        self._times = self._times + 1 if size == self._asked else 1
        self._asked = size
        if self._times >= _TRIES or not self.size:
            self._next = size
        self.size = self.size or size

    def holds(self, tokens: int) -> bool:
        """Return True if a window of `tokens` tokens runs in the recorded size."""
        return self.size <= _LEAST_PART * tokens and tokens <= self.size
