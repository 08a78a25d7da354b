"""The requests that an engine has, from their submission to their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from pcg.errors import GenerationError, PcgError, as_pcg_error
from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.engine.steps.flight import Flight
from pcg.runtime.engine.steps.taken import Taken
from pcg.runtime.memory.pool import PageTable
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
        # What a step ended and what failed in it, until the scheduler has let go of it.
        self._ended: list[tuple[Sequence, str]] = []
        self._failed: dict[Sequence, Exception] = {}
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

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that could not be added."""
        for one in (sequence, *sequence.followers):
            self.by_id.pop(one.id, None)

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
            if self.by_id.get(one.id) is not one:
                continue  # it is over, and a later request may have its id
            chunks = self._groups.handed_out(one, one.end(state, error))
            self._leave(one, chunks)
            self._note(kind, one.id, tokens=len(one.generated), **reason)
            if one not in not_begun:
                self._scheduler.drop(one)

    def _leave(self, one: Sequence, chunks: List[Chunk] = ()) -> None:
        del self.by_id[one.id]
        self.chunks += chunks

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
        own = (self.chunks, self._ended, self._failed)
        taken = Taken(now_s, self._groups, self._scheduler, self._totals, *own)
        for sequence in flight.left:
            taken.give(sequence, results)
        taken.log(self._log, flight.plan.tokens, flight.trained)
        while self._ended:
            self._scheduler.drop(self._finish())
        self._fail_all()

    def _finish(self) -> Sequence:
        """Let go of a sequence that has had its last chunk; returns it."""
        sequence, reason = self._ended[0]
        self._leave(sequence)
        del self._ended[0]
        self._note(Kind.FINISHED, sequence.id, reason=reason, tokens=len(sequence.generated))
        return sequence

    def _fail_all(self) -> None:
        for sequence, cause in list(self._failed.items()):
            self.fail(sequence, cause)
            del self._failed[sequence]

    def restart(self, kept: Iterable[PageTable]) -> None:
        """Have all requests wait, with the tokens that they have, after a call that failed.

        Args:
            kept: pages that are not theirs.
        """
        while self._ended:
            self._finish()
        for one in [one for one in self.by_id.values() if one.is_over]:
            if one not in self._failed:  # its end was not handed out
                self._leave(one, [one.end(one.state)])
        for one in self.by_id.values():
            if one.generated:  # its prompt ended, and they can share it no more
                one.followers = []
        following = {other for one in self.by_id.values() for other in one.followers}
        here = [one for one in self.by_id.values() if one not in following]
        self._scheduler.restart(here, kept)
        self._fail_all()

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks that nobody has taken."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def check_integrity(self) -> None:
        """Raise an AssertionError if a sequence is lost."""
        here = self._scheduler.everyone
        there = {id(each) for one in here for each in (one, *one.followers)}
        assert there == {id(sequence) for sequence in self.by_id.values()}
