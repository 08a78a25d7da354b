"""The available policies, by the names for `pcg serve --policy`."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from importlib import import_module
from itertools import count as counter
from itertools import islice

from pcg.errors import GenerationError
from pcg.options import PolicyName
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.policy import Chunks, Line, Policy
from pcg.runtime.requests.sequence import Sequence


class Fcfs(Policy):
    """First come, first served."""

    def __init__(self) -> None:
        self._line = Line()

    def add(self, sequence: Sequence) -> None:
        self._line.add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._line.put_back(sequence)

    def admit(self, sequence: Sequence, now_s: float) -> None:
        self._line.remove(sequence)

    def drop(self, sequence: Sequence, *, is_waiting: bool) -> None:
        if is_waiting:
            self._line.remove(sequence)

    def first(self, count: int, now_s: float, running: Iterable[Sequence]) -> List[Sequence]:
        return list(islice(self._line, count))

    def waiting(self) -> set[Sequence]:
        return set(self._line)

    def restart(self, waiting: Iterable[Sequence]) -> None:
        self._line = Line()
        for sequence in waiting:
            self._line.add(sequence)


class AdapterClustering(Policy):
    """Prefers requests of the batch's adapters once there are `clusters` of them (S-LoRA §A.2)."""

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
        adapters = {_adapter(sequence) for sequence in running}
        if len(adapters) < self.clusters:
            return list(islice(self._line, count))
        return list(islice(self._clustered(adapters), count))

    def waiting(self) -> set[Sequence]:
        return set(self._line)

    def restart(self, waiting: Iterable[Sequence]) -> None:
        self._line, self._of_adapter, self._turns = Line(), {}, {}
        for sequence in waiting:
            self.add(sequence)

    def _clustered(self, adapters: set[str | None]) -> Iterator[Sequence]:
        lines = [self._of_adapter[name] for name in adapters if name in self._of_adapter]
        yield from heapq.merge(*lines, key=self._turns.__getitem__)
        # By now all of the batch's adapters had their turns, so these are as many as are left out.
        yield from (sequence for sequence in self._line if _adapter(sequence) not in adapters)


def _adapter(sequence: Sequence) -> str | None:
    adapter = sequence.request.adapter
    return None if adapter is None else adapter.name


class EarlyAbort(Fcfs):
    """Aborts requests that cannot meet their TTFT SLO; serves the newest first under overload.

    R₁ and R₂ are moving averages of arrivals and admissions per second. Requests are aborted if
    their wait and prefill exceed the SLO; while R₁ > R₂ the newest requests are first, else the
    earliest (S-LoRA appendix B).

    Attributes:
        prefill_s: the longest recent time from admission to first token.
    """

    def __init__(self, horizon_s: float = 10.0) -> None:
        super().__init__()
        self.horizon_s = horizon_s
        self.prefill_s = 0.0
        self._arrivals: deque[float] = deque()
        self._admissions: deque[float] = deque()
        self._admitted: dict[Sequence, float] = {}
        self._waiting: set[Sequence] = set()
        self._due: list[tuple[float, int, Sequence]] = []

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._arrivals.append(sequence.times.submitted_s)
        self._await(sequence)

    def put_back(self, sequence: Sequence) -> None:
        super().put_back(sequence)
        self._await(sequence)

    def _await(self, sequence: Sequence) -> None:
        self._waiting.add(sequence)
        if len(self._due) > 2 * len(self._waiting) + 64:  # most of these are over by now
            self._due = [entry for entry in self._due if entry[2] in self._waiting]
            heapq.heapify(self._due)
        slo = sequence.times.ttft_slo_s
        if slo is not None and sequence.times.first_token_s is None:
            heapq.heappush(self._due, (sequence.times.submitted_s + slo, sequence.number, sequence))

    def admit(self, sequence: Sequence, now_s: float) -> None:
        super().admit(sequence, now_s)
        self._waiting.discard(sequence)
        self._admissions.append(now_s)
        if sequence.times.first_token_s is None:
            self._admitted[sequence] = now_s

    def drop(self, sequence: Sequence, *, is_waiting: bool) -> None:
        super().drop(sequence, is_waiting=is_waiting)
        self._waiting.discard(sequence)
        self._admitted.pop(sequence, None)

    def first(self, count: int, now_s: float, running: Iterable[Sequence]) -> List[Sequence]:
        for times in (self._arrivals, self._admissions):
            while times and times[0] < now_s - self.horizon_s:
                times.popleft()
        if len(self._arrivals) > len(self._admissions):
            return list(islice(self._line.newest_first(), count))
        return super().first(count, now_s, running)

    def restart(self, waiting: Iterable[Sequence]) -> None:
        ordered = list(waiting)
        super().restart(ordered)
        self._admitted, self._waiting, self._due = {}, set(), []
        for sequence in ordered:
            self._await(sequence)

    def hopeless(self, now_s: float) -> Iterable[Sequence]:
        hopeless: dict[Sequence, None] = {}
        while self._due and now_s + self.prefill_s > self._due[0][0]:
            _, _, sequence = heapq.heappop(self._due)
            if sequence in self._waiting and sequence.times.first_token_s is None:
                hopeless[sequence] = None
        return hopeless

    def served(self, chunks: Chunks) -> None:
        for sequence, _ in chunks:
            if sequence.times.first_token_s is not None and sequence in self._admitted:
                took = sequence.times.first_token_s - self._admitted.pop(sequence)
                self.prefill_s = max(took, 0.9 * self.prefill_s)


POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "fair-share": FairShare,
    "fcfs": Fcfs,
    "adapter-clustering": AdapterClustering,
    "early-abort": EarlyAbort,
}


def policy_named(name: str) -> Callable[[], Policy]:
    """Return a policy of `POLICIES`, or a class that a user wrote, as MODULE:CLASS.

    Raises:
        GenerationError: no such policy.
    """
    module, colon, attribute = name.partition(":")
    if not colon and name in POLICIES:
        return POLICIES[name]
    try:
        policy = getattr(import_module(module), attribute) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise GenerationError(
            f"policy={name!r}: {error}; add the module's folder to PYTHONPATH, or correct the name"
        ) from error
    if not isinstance(policy, type) or not issubclass(policy, Policy):
        raise GenerationError(
            f"policy={name!r}; use {', '.join(POLICIES)}, or MODULE:CLASS of a subclass of "
            "pcg.runtime.admission.policy.Policy"
        )
    return policy
