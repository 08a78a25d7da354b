"""Sums by adapter: those used most have sums of their own, and all others have one together.

A monitoring system keeps a series for every adapter that ever had one, so there are at most `most`
at a time, and they change slowly: an adapter gets its own sums while there is room; later, once in
`turn_s`, one that was clearly asked for more often than one with sums of its own takes its place.
Sums begin at 0 with a new place, and what was counted together stays there, so that no sum ever
falls while it is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pcg.runtime.metrics.histogram import FIRST_TOKEN_BOUNDS_S, Histogram

_LEAD = 10
"""An adapter takes the place of one that n requests named if more than 2 n + 10 named it."""
_MOST_COUNTED = 4096
"""The most adapters without sums of their own whose requests are counted."""


@dataclass
class AdapterSums:
    """The sums of an adapter's requests.

    Attributes:
        requests: requests that came.
        prompt_tokens: tokens of prompts that were read.
        output_tokens: tokens that were generated, counted where a request ends.
        ttft: times to the first token, seconds.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))

    @classmethod
    def of(cls, parts: Sequence[AdapterSums]) -> AdapterSums:
        """Return the sums of several adapters, as those of the versions of one."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for one in parts:
            whole.requests += one.requests
            whole.prompt_tokens += one.prompt_tokens
            whole.output_tokens += one.output_tokens
            whole.ttft.add(one.ttft)
        return whole


class AdapterTotals:
    """The requests and pages of adapters, by name; read them from any thread.

    Attributes:
        others: the sums of all adapters without their own.
        waiting, running: requests of each adapter that wait and run now.
        resident: versions of each adapter that have pages now.
        paged_in, evicted: how often an adapter was given pages, and gave them up.
    """

    def __init__(self, most: int = 32, turn_s: float = 60.0) -> None:
        self.others = AdapterSums()
        self.waiting: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.resident: Counter[str] = Counter()
        self.paged_in = 0
        self.evicted = 0
        self._most = most
        self._turn_s = turn_s
        self._turned_s: float | None = None
        self._own: dict[str, AdapterSums] = {}
        self._used: Counter[str] = Counter()

    @property
    def own(self) -> Mapping[str, AdapterSums]:
        """The adapters with sums of their own, and these."""
        return self._own.copy()

    def take(self, own: Mapping[str, AdapterSums]) -> None:
        """Have these sums in place of those that adapters have, as another engine counted them."""
        self._own = dict(own)

    def of(self, name: str) -> AdapterSums:
        """Return the sums that count an adapter now."""
        return self._own.get(name, self.others)

    def came(self, name: str, time_s: float) -> None:
        """Count a request of an adapter, which waits."""
        if self._turned_s is None:
            self._turned_s = time_s
        elif time_s - self._turned_s >= self._turn_s:
            self._turn(time_s)
        if name not in self._own and len(self._own) < self._most:
            self._own[name] = AdapterSums()
        self.of(name).requests += 1
        if name in self._used or len(self._used) < _MOST_COUNTED:
            self._used[name] += 1
        self.waiting[name] += 1

    def moves(self, name: str, *, is_running: bool) -> None:
        """Note that a request that waited runs, or waits again."""
        leave(self.waiting if is_running else self.running, name)
        (self.running if is_running else self.waiting)[name] += 1

    def paged(self, name: str, *, is_in: bool) -> None:
        """Note that a version of an adapter was given pages, or gave them up."""
        if is_in:
            self.paged_in += 1
            self.resident[name] += 1
        else:
            self.evicted += 1
            leave(self.resident, name)

    def _turn(self, time_s: float) -> None:
        """Give the places of adapters that are used less to others that are used more."""
        used, self._used, self._turned_s = self._used, Counter(), time_s
        newcomers = [one for one in used.most_common(2 * self._most) if one[0] not in self._own]
        least_first = sorted(self._own, key=used.__getitem__)
        for (name, count), least in zip(newcomers, least_first, strict=False):
            if count <= 2 * used[least] + _LEAD:
                return
            del self._own[least]
            self._own[name] = AdapterSums()


def leave(counts: Counter[str], name: str) -> None:
    """Count one less of a name, which is forgotten at 0."""
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
