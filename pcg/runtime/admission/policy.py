"""Policies: the order of admission of waiting requests, and early aborts.

The scheduler notifies a policy when a request arrives, is admitted, preempted or ends, and gets the
next few requests from it in constant time. A `Line` orders requests by priority number; among equal
priorities, preempted requests are first, in order of first admission, then all others by arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from typing import TypeAlias

from pcg.errors import GenerationError
from pcg.runtime.admission.latency import Latency
from pcg.runtime.admission.step_bound import StepBound
from pcg.runtime.requests.sequence import Sequence

Chunks: TypeAlias = Iterable[tuple[Sequence, int]]
"""Sequences, with the numbers of tokens that ran."""


class Policy(ABC):
    """The order of admission of an engine's waiting requests.

    Subclasses define the abstract methods; other methods have defaults.
    """

    is_shared = False
    """True if the engine has requests of several tenants."""
    is_paced = False
    """True if predicted times limit steps, also before several tenants have requests."""
    _is_taken = False

    def take(self) -> None:
        """Reserve the policy for an engine. GenerationError: another engine uses the policy."""
        if self._is_taken:
            name = type(self).__name__
            raise GenerationError(
                f"this {name} keeps the waiting requests of another engine; make one for each"
            )
        self._is_taken = True

    @abstractmethod
    def add(self, sequence: Sequence) -> None:
        """Add a new waiting request."""

    @abstractmethod
    def put_back(self, sequence: Sequence) -> None:
        """Handle the preemption of a request, which waits again."""

    @abstractmethod
    def admit(self, sequence: Sequence, now_s: float) -> None:
        """Handle the admission of a waiting request."""

    def trained(self, used: Mapping[str, int]) -> None:  # noqa: B027 (few policies have shares)
        """Count the work of jobs, in tokens of forward passes by tenant."""

    @abstractmethod
    def drop(self, sequence: Sequence, *, is_waiting: bool) -> None:
        """Handle the end of a request, which was waiting or admitted."""

    @abstractmethod
    def first(self, count: int, now_s: float, running: Iterable[Sequence]) -> List[Sequence]:
        """Return the next waiting requests, at most `count`, given the `running` requests."""

    @abstractmethod
    def waiting(self) -> set[Sequence]:
        """Return all waiting requests of the policy."""

    @abstractmethod
    def restart(self, waiting: Iterable[Sequence]) -> None:
        """Reset the policy to the given waiting requests, in order, without admitted requests."""

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the running requests, with the first candidates for preemption last.

        Candidates have the highest priority number and, among equals, the latest admission.
        """
        ordered = list(running)
        if [sequence for sequence in ordered if sequence.request.priority]:
            ordered.sort(key=lambda sequence: sequence.request.priority)
        return ordered

    def bound(self, forward: Latency | None, alone_s: float) -> StepBound | None:
        """Return the bound of some tenants' tokens in the next step; None for no bound.

        Args:
            forward: the predicted time of a step, if known.
            alone_s: the longest step of bounded tenants while no other tenant has requests,
                seconds.
        """
        return None

    def gives_way(self, sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Return the running request that makes room for a waiting request; None for no request."""
        return None

    def has_place(self, sequence: Sequence) -> bool:
        """Return True if a further continuation of a running request may start."""
        return True

    def hopeless(self, now_s: float) -> Iterable[Sequence]:
        """Return the waiting requests to abort."""
        return ()

    def served(self, chunks: Chunks) -> None:  # noqa: B027 (most policies do not count)
        """Count tokens that ran, before their requests are updated."""


class Line:
    """Waiting requests in order."""

    def __init__(self) -> None:
        self._of_priority: dict[int, OrderedDict[Sequence, None]] = {}
        self._priorities: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            yield from self._of_priority[priority]

    def newest_first(self) -> Iterator[Sequence]:
        """Iterate by priority, with the newest requests first."""
        for priority in self._priorities:
            yield from reversed(self._of_priority[priority])

    def add(self, sequence: Sequence) -> None:
        self._equals(sequence.request.priority)[sequence] = None
        self._count += 1

    def put_back(self, sequence: Sequence) -> None:
        """Insert a preempted request before requests of equal priority."""
        equals = self._equals(sequence.request.priority)
        equals[sequence] = None
        equals.move_to_end(sequence, last=False)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        equals = self._of_priority[priority]
        del equals[sequence]
        self._count -= 1
        if not equals:
            del self._of_priority[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

    def _equals(self, priority: int) -> OrderedDict[Sequence, None]:
        if priority not in self._of_priority:
            self._of_priority[priority] = OrderedDict()
            insort(self._priorities, priority)
        return self._of_priority[priority]
