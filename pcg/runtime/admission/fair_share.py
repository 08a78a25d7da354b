"""Fair share: tenants are served equally, independent of their demand.

Each tenant has a counter of its served tokens (virtual token counters: Sheng et al., "Fairness in
Serving Large Language Models", §4). The least served tenant is next, and its requests run by
priority and arrival. A returning tenant starts at the level of the least served tenant with
requests, so that tenants cannot save up credit. Requests without a tenant count as a common tenant;
without other tenants, the policy is FCFS.

Turns do not limit the tokens of a tenant in a step, which lengthen the step for all tenants. A
tenant that runs more than twice the mean of the others is heavy
(`pcg.runtime.admission.step_bound`), and may lengthen a step in which other tenants decode at most
by the factor `stretch`, by predicted times. While no other tenant decodes, a heavy tenant is not
limited. If no place or page is free, the tenant that runs most makes room for a tenant that runs
less than half as much.

Tenants with waiting requests are in a heap by counter; outdated entries are dropped when they reach
the top. The time to find the next requests therefore does not depend on the queue's length.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from itertools import chain, islice

from pcg.runtime.admission.latency import Latency
from pcg.runtime.admission.policy import Chunks, Line, Policy
from pcg.runtime.admission.step_bound import AHEAD, RecentUse, StepBound
from pcg.runtime.requests.sequence import Sequence
from pcg.value_checks import require_int, require_number

_REMEMBERED = 64
"""Number of idle tenants above which counters are checked for removal."""
_LOOK = 16
"""Every so many bounded steps, a step without heavy tenants measures its time."""
_AT_ONCE, _AT_ONCE_ALONE = 4, 16
"""Maximum number of a heavy tenant's waiting requests per step, with and without others."""
_PATIENCE = 128
"""Number of steps without tokens of heavy tenants after which a heavy tenant's sequence runs."""


class FairShare(Policy):
    """Admits requests of the least served tenant first.

    Args:
        tenant_running: maximum number of a tenant's running sequences, as each lengthens the steps
            of all tenants; None for no limit.
        stretch: the factor by which heavy tenants may lengthen the steps of other tenants.

    Attributes:
        heavy: the running tenants with a bound in this step.
    Raises:
        GenerationError: tenant_running is not an int of at least 1, or stretch not above 1.
    """

    def __init__(self, tenant_running: int | None = None, stretch: float = 1.1) -> None:
        if tenant_running is not None:
            require_int("tenant_running", tenant_running, 1, hint="; None is for no limit")
        require_number("stretch", stretch, 1, math.inf, open_low=True)
        self._most = tenant_running
        self._stretch = stretch
        self.heavy: set[str] = set()
        self._recent = RecentUse()
        self._bound: StepBound | None = None
        self._patience = _PATIENCE
        self._bounded = 0
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._lines: dict[str, Line] = {}
        self._heap: list[tuple[int, str]] = []

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if not self._requests[tenant]:
            self._served[tenant] = max(self._served.get(tenant, 0), self._least())
        self._requests[tenant] += 1
        self._asked[tenant] += _asked(sequence)
        self._line(tenant).add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._less(self._running, tenant)
        self._line(tenant).put_back(sequence)

    def admit(self, sequence: Sequence, now_s: float) -> None:
        self._running[sequence.request.tenant] += 1
        self._leave(sequence)

    def drop(self, sequence: Sequence, *, is_waiting: bool) -> None:
        tenant = sequence.request.tenant
        if is_waiting:
            self._leave(sequence)
        else:
            self._less(self._running, tenant)
        self._less(self._requests, tenant)
        self._less(self._asked, tenant, _asked(sequence))
        if tenant not in self._requests:
            self._forget()

    def first(self, count: int, now_s: float, running: Iterable[Sequence]) -> List[Sequence]:
        """Return the next requests, as if each prompt ran before the next is chosen.

        In a bounded step these include few requests of each heavy tenant.
        """
        bound, self._bound = self._bound, None
        in_turn: list[Sequence] = []
        lines: dict[str, Iterator[Sequence]] = {}
        charged: list[tuple[int, str]] = []
        while len(in_turn) < count:
            if self._heap and (not charged or self._heap[0] < charged[0]):
                served, tenant = heapq.heappop(self._heap)
                if tenant in lines or tenant not in self._lines or served != self._served[tenant]:
                    continue  # an outdated entry
                lines[tenant] = islice(self._lines[tenant], self._most_next(tenant, bound))
            elif charged:
                served, tenant = heapq.heappop(charged)
            else:
                break
            sequence = next(lines[tenant], None)
            if sequence is not None:
                in_turn.append(sequence)
                heapq.heappush(charged, (served + sequence.pending, tenant))
        for tenant in lines:
            heapq.heappush(self._heap, (self._served[tenant], tenant))
        return in_turn

    def waiting(self) -> set[Sequence]:
        return {sequence for line in self._lines.values() for sequence in line}

    def restart(self, waiting: Iterable[Sequence]) -> None:
        ordered = list(waiting)
        self._requests = Counter(each.request.tenant for each in ordered)
        self._asked, self._running, self._lines, self._heap = Counter(), Counter(), {}, []
        self._bound, self.heavy = None, set()
        for sequence in ordered:
            tenant = sequence.request.tenant
            self._served.setdefault(tenant, 0)
            self._asked[tenant] += _asked(sequence)
            self._line(tenant).add(sequence)

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        return len(self._requests) > 1

    @property
    def is_paced(self) -> bool:  # type: ignore[override]
        return len(self._requests) > ("" in self._requests)

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return sequences with heavy tenants last, the most served at the end, and by priority."""
        ordered = list(running)
        if [sequence for sequence in ordered if sequence.request.priority]:
            ordered = _by_priority(ordered)
        if self.heavy:
            ordered.sort(key=self._weight)
        return ordered

    def _weight(self, sequence: Sequence) -> int:
        tenant = sequence.request.tenant
        return self._served[tenant] if tenant in self.heavy else -1

    def bound(self, forward: Latency | None, alone_s: float) -> StepBound | None:
        """Find the heavy tenants, and return their bound."""
        heavy, self._bound = self._recent.heavy(self._asked), None
        self.heavy = {tenant for tenant in self._running if tenant in heavy} if heavy else set()
        if not heavy or forward is None:
            return None
        stretch = self._stretch
        if self.heavy:
            self._patience -= 1
            self._bounded += 1
            if self._bounded % _LOOK == 0:
                stretch = 1.0
        is_alone = all(tenant in heavy for tenant in chain(self._running, self._lines))
        most_s = alone_s if is_alone else None
        self._bound = StepBound(
            heavy, stretch, most_s, forward, self._note_heavy, self._patience > 0
        )
        return self._bound

    def _note_heavy(self) -> None:
        self._patience = _PATIENCE
        self._bounded = 0

    def gives_way(self, sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Return the latest request of the tenant that runs most, if named and far ahead."""
        named = {tenant: count for tenant, count in self._running.items() if tenant}
        most = max(named, key=named.__getitem__, default="")
        if not most or named[most] <= 2 * self._running[sequence.request.tenant] + 1:
            return None
        return [other for other in self.in_order(running) if other.request.tenant == most][-1]

    def has_place(self, sequence: Sequence) -> bool:
        return self._places(sequence.request.tenant) != 0

    def _most_next(self, tenant: str, bound: StepBound | None) -> int | None:
        """Return the maximum number of a tenant's waiting sequences to consider; None for all.

        Few sequences of a bounded flood start in a step, so considering all would waste time.
        """
        places = self._places(tenant)
        if bound is None or not bound.is_of(tenant):
            return places
        at_once = _AT_ONCE_ALONE if bound.is_alone else _AT_ONCE
        most = 0 if bound.is_full else at_once
        return most if places is None else min(places, most)

    def _places(self, tenant: str) -> int | None:
        return None if self._most is None else max(self._most - self._running[tenant], 0)

    def served(self, chunks: Chunks) -> None:
        ran: dict[str, int] = {}
        for sequence, tokens in chunks:
            tenant = sequence.request.tenant
            ran[tenant] = ran.get(tenant, 0) + tokens
        self._recent.add(ran)
        for tenant, tokens in ran.items():
            self._charge(tenant, tokens)

    def trained(self, used: Mapping[str, int]) -> None:
        self._recent.count(used)
        for tenant, tokens in used.items():
            if tenant in self._served:
                self._charge(tenant, tokens)

    def _charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens
        if tenant in self._lines:
            heapq.heappush(self._heap, (self._served[tenant], tenant))

    def _line(self, tenant: str) -> Line:
        if tenant not in self._lines:
            self._lines[tenant] = Line()
            heapq.heappush(self._heap, (self._served[tenant], tenant))
        return self._lines[tenant]

    def _leave(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._lines[tenant].remove(sequence)
        if not self._lines[tenant]:
            del self._lines[tenant]
        if not self._lines:
            self._heap.clear()

    def _least(self) -> int:
        while self._heap:
            served, tenant = self._heap[0]
            if tenant in self._lines and served == self._served[tenant]:
                break
            heapq.heappop(self._heap)
        running = (self._served[tenant] for tenant in self._running)
        return min((*running, *(served for served, _ in self._heap[:1])), default=0)

    def _forget(self) -> None:
        """Drop counters of idle tenants below the level at which a returning tenant starts."""
        if not self._requests:
            self._served.clear()
        elif len(self._served) > 2 * len(self._requests) + _REMEMBERED:
            least = self._least()
            self._served = {
                tenant: served
                for tenant, served in self._served.items()
                if tenant in self._requests or served > least
            }

    @staticmethod
    def _less(counts: Counter[str], tenant: str, count: int = 1) -> None:
        counts[tenant] -= count
        if not counts[tenant]:
            del counts[tenant]


def _asked(sequence: Sequence) -> int:
    """Return the expected next tokens of a request; continuations share the prompt's tokens."""
    return AHEAD + (0 if sequence.choice else sequence.request.length)


def _by_priority(running: List[Sequence]) -> list[Sequence]:
    """Return sequences with each tenant's sequences sorted by priority within their places."""
    of_tenant: dict[str, list[Sequence]] = {}
    for sequence in running:
        of_tenant.setdefault(sequence.request.tenant, []).append(sequence)
    for sequences in of_tenant.values():
        sequences.sort(key=lambda sequence: sequence.request.priority)
    in_turn = {tenant: iter(sequences) for tenant, sequences in of_tenant.items()}
    return [next(in_turn[sequence.request.tenant]) for sequence in running]
