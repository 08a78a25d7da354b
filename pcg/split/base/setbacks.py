"""Setbacks: who fails waits before the next try is looked at, longer after each."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_S, _MOST_S = 0.25, 8.0
_FORGOTTEN_S = 60.0
_MOST_NAMES = 4096


@dataclass
class _Last:
    """The last failure of somebody.

    Attributes:
        delay_s: how long they wait after that.
        until_s: until when they wait.
    """

    delay_s: float
    until_s: float


class Setbacks:
    """The names of who failed lately: addresses of wrong keys, and keys of refused graphs."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}

    def wait_s(self, name: str, now_s: float) -> float:
        """Return how long somebody waits for the next try; 0 for not at all."""
        last = self._last.get(name)
        return 0.0 if last is None else max(0.0, last.until_s - now_s)

    def note(self, name: str, now_s: float) -> None:
        """Note that somebody has failed."""
        kept = {
            other: one
            for other, one in self._last.items()
            if one.until_s + _FORGOTTEN_S > now_s and other != name
        }
        before = self._last.get(name)
        again = before is not None and before.until_s + _FORGOTTEN_S > now_s
        delay_s = min(_MOST_S, 2 * before.delay_s) if before is not None and again else _FIRST_S
        while len(kept) >= _MOST_NAMES:
            del kept[next(iter(kept))]
        self._last = {**kept, name: _Last(delay_s, now_s + delay_s)}
