"""The requests that an engine has, from their submission to their ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

from pcg.errors import GenerationError, PcgError, as_pcg_error
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.steps.flight import Flight
from pcg.runtime.engine.taken import Taken
from pcg.runtime.metrics.events import EventLog, Kind
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.requests.deadlines import Deadlines
from pcg.runtime.requests.groups import Groups
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step_results import StepResults


class OpenRequests:
    """Gives requests their tokens and ends, and keeps the chunks until they are taken.

    Attributes:
        by_id: the sequences of all, by their ids.
        deadlines: when those time out that have a time.
        chunks: those that nobody has taken yet.
    """

    def __init__(
        self, scheduler: Scheduler, log: EventLog, totals: Totals, note: Callable[..., None]
    ) -> None:
        self.by_id: dict[str, Sequence] = {}
        self.deadlines = Deadlines()
        self.chunks: list[Chunk] = []
        self._groups = Groups()
        self._scheduler = scheduler
        self._log = log
        self._totals = totals
        self._note = note

    def add(self, sequence: Sequence, due_s: float | None) -> None:
        """Add a request with its continuations, which times out when it is due."""
        opened = [sequence, *sequence.followers]
        self.by_id |= {one.id: one for one in opened}
        self._groups.add(sequence)
        if due_s is not None:
            self.deadlines.add(due_s, opened)

    def of(self, request: str) -> List[Sequence]:
        """Return a request's continuations; none if it is not here any more."""
        sequence = self.by_id.get(request) or self._groups.first(request)
        return () if sequence is None else self._groups.of(sequence)

    def end(
        self, request: List[Sequence], state: State, kind: Kind, error: PcgError | None = None
    ) -> None:
        """End a request: those of its continuations that are left."""
        reason = {} if error is None else {"reason": str(error)}
        not_begun = [other for one in request for other in one.followers]
        for one in request:
            if one.is_over:
                continue
            if one not in not_begun:
                self._scheduler.drop(one)
            del self.by_id[one.id]
            self.chunks += self._groups.handed_out(one, one.end(state, error))
            self._note(kind, one.id, tokens=len(one.generated), **reason)

    def fail(self, one: Sequence, error: Exception) -> None:
        """End the request of a sequence by an error."""
        caused = as_pcg_error(error, one.id, GenerationError)
        self.end(self._groups.of(one), State.FAILED, Kind.FAILED, caused)

    def time_out(self, now_s: float) -> None:
        """End what has come to its time, or has no hope, and what could not be prepared."""
        for late in self.deadlines.passed(now_s):
            self.end(late, State.TIMED_OUT, Kind.TIMED_OUT)
        for sequence, error in self._scheduler.queue_prepared():
            self.fail(sequence, error)
        for sequence in self._scheduler.policy.hopeless(now_s):
            self.end(self._groups.of(sequence), State.TIMED_OUT, Kind.TIMED_OUT)

    def accept(self, flight: Flight, results: StepResults, now_s: float) -> None:
        """Give the sequences of a step what it computed."""
        taken = Taken(now_s, self._groups, self._scheduler, self._totals)
        for sequence in flight.left:
            taken.give(sequence, results)
        self.chunks += taken.chunks
        taken.log(self._log, flight.plan.tokens, flight.trained)
        for sequence, reason in taken.ended:
            self._scheduler.drop(sequence)
            del self.by_id[sequence.id]
            self._note(Kind.FINISHED, sequence.id, reason=reason, tokens=len(sequence.generated))
        for sequence, cause in taken.failed.items():
            self.fail(sequence, cause)

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks that nobody has taken."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def check_integrity(self) -> None:
        """Raise an AssertionError if a sequence is lost."""
        here = self._scheduler.everyone
        there = {id(each) for one in here for each in (one, *one.followers)}
        assert there == {id(sequence) for sequence in self.by_id.values()}
