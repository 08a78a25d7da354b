"""Policies: the order in which waiting requests are admitted, and which are given up.

Each policy is one small class; the scheduler calls it before every admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Reversible
from dataclasses import dataclass, field
from typing import TypeAlias

from pcg.runtime.requests.sequence import Sequence

Chunks: TypeAlias = Iterable[tuple[Sequence, int]]
"""Sequences, and how many of their tokens ran."""


@dataclass(frozen=True)
class Queue:
    """The requests that a policy orders: waiting ones as they came, and admitted ones."""

    now_s: float
    waiting: Reversible[Sequence]
    running: Iterable[Sequence]


class Policy:
    """Orders waiting requests: by itself, first come, first served."""

    def order(self, queue: Queue) -> Iterable[Sequence]:
        """Return the waiting requests in the order of their admission."""
        return queue.waiting

    def hopeless(self, queue: Queue) -> Iterable[Sequence]:
        """Return the waiting requests that are given up."""
        return ()

    def admitted(self, sequence: Sequence, now_s: float) -> None:
        """Note an admission."""

    def served(self, chunks: Chunks) -> None:
        """Note tokens that ran, before their requests are updated."""


class Fcfs(Policy):
    """First come, first served."""


@dataclass
class AdapterClustering(Policy):
    """Admits requests of the batch's adapters first once these are `clusters` (S-LoRA §A.2)."""

    clusters: int = 32

    def order(self, queue: Queue) -> Iterable[Sequence]:
        there = {_adapter(sequence) for sequence in queue.running}
        if len(there) < self.clusters:
            return queue.waiting
        return sorted(queue.waiting, key=lambda sequence: _adapter(sequence) not in there)


@dataclass
class EarlyAbort(Policy):
    """Gives up requests that cannot meet their TTFT SLO; serves the newest first under overload.

    R₁ is the moving average of arrivals, R₂ that of admissions, both a second. Requests are given
    up whose wait and prefill exceed the SLO; while R₁ > R₂ the newest come first, else the earliest
    (S-LoRA appendix B).

    Attributes:
        prefill_s: the longest recent time from admission to first token.
    """

    horizon_s: float = 10.0
    prefill_s: float = 0.0
    _arrivals: list[float] = field(default_factory=list)
    _admissions: list[float] = field(default_factory=list)
    _latest: int = -1
    _admitted: dict[int, float] = field(default_factory=dict)

    def order(self, queue: Queue) -> Iterable[Sequence]:
        self._see(queue)
        if len(self._arrivals) > len(self._admissions):
            return list(reversed(queue.waiting))
        return queue.waiting

    def hopeless(self, queue: Queue) -> Iterable[Sequence]:
        found = []
        for sequence in queue.waiting:
            slo = sequence.ttft_slo_s
            if slo is not None and sequence.first_token_s is None:
                due = sequence.submitted_s + slo
                if queue.now_s + self.prefill_s > due:
                    found.append(sequence)
        return found

    def admitted(self, sequence: Sequence, now_s: float) -> None:
        self._admissions.append(now_s)
        self._admitted[sequence.number] = now_s

    def _see(self, queue: Queue) -> None:
        for sequence in queue.waiting:
            if sequence.number > self._latest:
                self._latest = sequence.number
                self._arrivals.append(sequence.submitted_s)
        since = queue.now_s - self.horizon_s
        self._arrivals = [time_s for time_s in self._arrivals if time_s >= since]
        self._admissions = [time_s for time_s in self._admissions if time_s >= since]

    def served(self, chunks: Chunks) -> None:
        for sequence, _ in chunks:
            if sequence.first_token_s is not None and sequence.number in self._admitted:
                took = sequence.first_token_s - self._admitted.pop(sequence.number)
                self.prefill_s = max(took, 0.9 * self.prefill_s)


@dataclass
class FairShare(Policy):
    """Admits requests of the least served tenant first.

    A tenant that returns after it had no requests starts at the level of the least served active
    one, so that nobody saves up (virtual token counters: Sheng et al., "Fairness in Serving Large
    Language Models", §4).
    """

    _served: dict[str, float] = field(default_factory=dict)
    _active: set[str] = field(default_factory=set)

    def order(self, queue: Queue) -> Iterable[Sequence]:
        active = {s.request.tenant for s in (*queue.waiting, *queue.running)}
        stayed = [self._served[tenant] for tenant in active & self._active]
        least = min(stayed, default=max(self._served.values(), default=0.0))
        for tenant in active - self._active:
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._active = active
        return sorted(queue.waiting, key=lambda s: (self._served[s.request.tenant], s.number))

    def served(self, chunks: Chunks) -> None:
        for sequence, tokens in chunks:
            tenant = sequence.request.tenant
            self._served[tenant] = self._served.get(tenant, 0.0) + tokens


def _adapter(sequence: Sequence) -> str | None:
    adapter = sequence.request.adapter
    return None if adapter is None else adapter.name
