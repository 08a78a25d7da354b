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
    """Finds the first stop string of a stream, and cuts the text before it.

    Raises:
        GenerationError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise GenerationError(f"stop={stop!r}; use a sequence of strings that are not empty")
        self._stop = tuple(dict.fromkeys(stop))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add a part of the stream; returns the text that can be returned now.

        After a match that is the text before the stop string, and "" from then on.
        """
        if self.matched is not None:
            return ""
        text = self._held + text
        # (end, start): first complete, then longest.
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            _, start, self.matched = min(matches)
            self._held = ""
            return text[:start]
        safe = len(text) - self._length_to_hold(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """End the stream; returns the text held back."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins some stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
