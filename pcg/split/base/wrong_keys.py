"""Wrong keys: who tries some waits before the next is looked at, longer after each."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_S, _MOST_S = 0.25, 8.0
_FORGOTTEN_S = 60.0
_MOST_ADDRESSES = 4096


@dataclass
class _Tries:
    """An address's last wrong key.

    Attributes:
        delay_s: how long it waits after that.
        until_s: until when it waits.
    """

    delay_s: float
    until_s: float


class WrongKeys:
    """Addresses that wrong keys came from."""

    def __init__(self) -> None:
        self._tries: dict[str, _Tries] = {}

    def wait_s(self, address: str, now_s: float) -> float:
        """Return how long to wait before a key from an address is looked at; 0 for not at all."""
        tries = self._tries.get(address)
        return 0.0 if tries is None else max(0.0, tries.until_s - now_s)

    def note(self, address: str, now_s: float) -> None:
        """Note that a wrong key came from an address."""
        kept = {
            name: one
            for name, one in self._tries.items()
            if one.until_s + _FORGOTTEN_S > now_s and name != address
        }
        before = self._tries.get(address)
        again = before is not None and before.until_s + _FORGOTTEN_S > now_s
        delay_s = min(_MOST_S, 2 * before.delay_s) if before is not None and again else _FIRST_S
        while len(kept) >= _MOST_ADDRESSES:
            del kept[next(iter(kept))]
        self._tries = {**kept, address: _Tries(delay_s, now_s + delay_s)}
