"""Text before a marker: what may be its beginning is held back, and white space before it."""

from __future__ import annotations

MOST_SPACE = 1024
"""The characters of white space that are held back, or that stand before a call: a model that
writes nothing else would make the reading of each token longer and longer."""


class HeldText:
    """Splits a stream of text at a marker.

    Attributes:
        space: the white space before the marker that was found last.
    """

    def __init__(self, marker: str) -> None:
        self.space = ""
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what is certainly no marker, and what is behind one, None without.

        White space just before the marker is left out, and is `space`; of much of it, the end.
        """
        text = self._held + text
        before, found, behind = text.partition(self._marker)
        if found:
            safe = _without_space(before)
            self._held, self.space = "", before[safe:]
            return before[:safe], behind
        safe = _without_space(text[: len(text) - _overlap(text, self._marker)])
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """Return what is held back."""
        held, self._held = self._held, ""
        return held


def _without_space(text: str) -> int:
    """Return the length of a text without white space at its end."""
    return max(len(text.rstrip()), len(text) - MOST_SPACE)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that a marker may begin with."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
