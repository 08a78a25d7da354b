"""Adapter clustering: requests whose adapters run already are admitted first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from itertools import count as counter
from itertools import islice

from pcg.runtime.admission.line import Line
from pcg.runtime.admission.policy import Policy
from pcg.runtime.requests.sequence import Sequence


class AdapterClustering(Policy):
    """Admits requests of the batch's adapters first once these are `clusters` (S-LoRA §A.2)."""

    def __init__(self, clusters: int = 32) -> None:
        self.clusters = clusters
        self._line = Line()
        self._of_adapter: dict[str | None, Line] = {}
        self._turns: dict[Sequence, tuple[int, int]] = {}
        self._later, self._earlier = counter(), counter(-1, -1)

    def add(self, sequence: Sequence) -> None:
        self._turns[sequence] = sequence.request.priority, next(self._later)
        self._line.add(sequence)
        self._of_adapter.setdefault(_adapter(sequence), Line()).add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._turns[sequence] = sequence.request.priority, next(self._earlier)
        self._line.put_back(sequence)
        self._of_adapter.setdefault(_adapter(sequence), Line()).put_back(sequence)

    def admit(self, sequence: Sequence, now_s: float) -> None:
        del self._turns[sequence]
        self._line.remove(sequence)
        name = _adapter(sequence)
        self._of_adapter[name].remove(sequence)
        if not self._of_adapter[name]:
            del self._of_adapter[name]

    def drop(self, sequence: Sequence, *, is_waiting: bool) -> None:
        if is_waiting:
            self.admit(sequence, 0.0)

    def first(self, count: int, now_s: float, running: Iterable[Sequence]) -> List[Sequence]:
        there = {_adapter(sequence) for sequence in running}
        if len(there) < self.clusters:
            return list(islice(self._line, count))
        return list(islice(self._clustered(there), count))

    def waiting(self) -> set[Sequence]:
        return set(self._line)

    def restart(self, waiting: Iterable[Sequence]) -> None:
        self._line, self._of_adapter, self._turns = Line(), {}, {}
        for sequence in waiting:
            self.add(sequence)

    def _clustered(self, there: set[str | None]) -> Iterator[Sequence]:
        lines = [self._of_adapter[name] for name in there if name in self._of_adapter]
        yield from heapq.merge(*lines, key=self._turns.__getitem__)
        # By now all of the batch's adapters had their turns, so these are as many as are left out.
        yield from (one for one in self._line if _adapter(one) not in there)


def _adapter(sequence: Sequence) -> str | None:
    adapter = sequence.request.adapter
    return None if adapter is None else adapter.name
