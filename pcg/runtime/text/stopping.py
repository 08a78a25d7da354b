"""Stop strings in streamed text.

Text comes in parts of any size, a stop string may span several, and returned text cannot be taken
back. So the longest suffix that could still grow into a stop string is held back.

The match is the one that is complete first; of several complete at the same character, the longest.
That rule does not look ahead, so it stops generation at the earliest possible token, and does not
depend on how the text was cut into parts.
"""

from collections.abc import Sequence

from pcg.errors import GenerationError


class StopChecker:
    """Finds the first stop string of a stream, and cuts the text before or after it.

    Args:
        included: leave the stop string in the text.
    Raises:
        GenerationError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], included: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise GenerationError(f"stop={stop!r}; use a sequence of strings that are not empty")
        self._stop = tuple(dict.fromkeys(stop))
        self._included = included
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> str:
        """Add a part of the stream; returns the text that can be returned now.

        After a match that is the text before the stop string, and "" from then on.

        Args:
            may_end: False if no stop string that is complete within this part ends the stream.
        """
        if self.matched is not None:
            return ""
        held, text = len(self._held), self._held + text
        # (end, start): first complete, then longest. What is held has been looked at.
        matches = [
            (start + len(stop), start, stop)
            for stop in (self._stop if may_end else ())
            if (start := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return text[: end if self._included else start]
        safe = self._safe_length(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """End the stream; returns the text held back."""
        held, self._held = self._held, ""
        return held

    def _safe_length(self, text: str) -> int:
        """Return where the longest suffix begins that could grow into a stop string."""
        safe = len(text)
        for stop in self._stop:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), safe)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, safe)
            if start >= 0:
                safe = start
        return safe
