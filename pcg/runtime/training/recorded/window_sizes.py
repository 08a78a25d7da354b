"""The number of tokens that a job's windows are recorded with.

A graph is recorded for a fixed number of tokens, and holds the memory that its layer saves for
backward. So a job's windows have a single size at a time: the size that the sharing rule requested
most often lately. The rest of a pass is padded with tokens of no sequence, unless it is so short
that it costs less without.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

SIZES: tuple[int, ...] = (
    16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip
"""Tokens of recorded windows: two sizes to an octave, so that a window is at most a third shorter
than it may be."""
_LEAST_PART = 8
"""A window of less than this part of the size runs eagerly: filled up, it would take longer."""
_TRIES = 8
"""Windows that ask for another size in turn before it is taken: to record it takes a pass."""


class WindowSizes:
    """Chooses how long windows are.

    Attributes:
        size: tokens of a recorded window; 0 before the first. It changes between two passes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._next = 0
        self._asked = 0
        self._times = 0

    def begin_with(self, tokens: int) -> None:
        """Begin with the largest size up to `tokens`."""
        self.size = self._next = SIZES[max(bisect_right(SIZES, tokens) - 1, 0)]

    def begin_pass(self) -> None:
        """Adopt the requested size."""
        self.size = self._next

    def fitting(self, tokens: int, remaining: int) -> int:
        """Return how many of up to `tokens` tokens a window has.

        Args:
            remaining: tokens of the pass that have yet to go forward.
        """
        tokens = min(tokens, remaining)
        if tokens < remaining:
            self._ask(SIZES[max(bisect_right(SIZES, tokens) - 1, 0)])
        elif tokens > self.size:
            self._ask(SIZES[min(bisect_left(SIZES, tokens), len(SIZES) - 1)])
        window = min(tokens, self.size)
        # Two windows that are filled up instead of one and a rest that would run eagerly.
        half = (remaining + 1) // 2
        is_short = 0 < _LEAST_PART * (remaining - window) < self.size
        return half if is_short and half <= window else window

    def _ask(self, size: int) -> None:
        """Note the size that would be best."""
        self._times = self._times + 1 if size == self._asked else 1
        self._asked = size
        if self._times >= _TRIES or not self.size:
            self._next = size
        self.size = self.size or size

    def holds(self, tokens: int) -> bool:
        """Return whether a window of `tokens` tokens runs in the recorded size."""
        return self.size <= _LEAST_PART * tokens and tokens <= self.size
