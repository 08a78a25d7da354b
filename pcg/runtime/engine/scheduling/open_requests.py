"""The open requests of an engine, from submission to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from pcg.errors import GenerationError, PcgError, as_pcg_error
from pcg.runtime.engine.scheduling.running import Running
from pcg.runtime.engine.scheduling.scheduler import Scheduler
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.requests.groups import Deadlines, Groups
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step import Results


@dataclass(slots=True)
class _Tokens:
    """The tokens of a step, for the log and the totals.

    Attributes:
        before_s: time at which the previous step with tokens ended.
        events: events of first tokens, and of the start of continuations.
        further: ids of sequences with a token after their first.
        longer_s: gaps of sequences without a token in the previous step.
    """

    now_s: float
    before_s: float | None
    events: list[Event] = field(default_factory=list)
    further: list[str] = field(default_factory=list)
    longer_s: list[float] = field(default_factory=list)


class OpenRequests:
    """Gives requests their tokens, ends requests, and collects chunks for `take_chunks`.

    Attributes:
        by_id: all open sequences, by id.
        deadlines: deadlines of requests with a timeout.
        chunks: chunks that were not taken yet.
    """

    def __init__(
        self, scheduler: Scheduler, log: EventLog, totals: Totals, note: Callable[..., None]
    ) -> None:
        self.by_id: dict[str, Sequence] = {}
        self.deadlines = Deadlines()
        self.chunks: list[Chunk] = []
        # Ended and failed sequences of a step, until the scheduler has dropped them.
        self._ended: list[tuple[Sequence, str]] = []
        self._failed: dict[Sequence, Exception] = {}
        self._groups = Groups()
        self._scheduler = scheduler
        self._log = log
        self._totals = totals
        self._note = note

    def add(self, sequence: Sequence, due_s: float | None) -> None:
        """Add a request with its continuations; `due_s` is the request's deadline."""
        opened = [sequence, *sequence.followers]
        self.by_id |= {each.id: each for each in opened}
        self._groups.add(sequence)
        if due_s is not None:
            self.deadlines.add(due_s, opened)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request that could not be scheduled."""
        for each in (sequence, *sequence.followers):
            self.by_id.pop(each.id, None)

    def of(self, request: str) -> List[Sequence]:
        """Return the continuations of a request; empty if the request is over."""
        sequence = self.by_id.get(request) or self._groups.first(request)
        return () if sequence is None else self._groups.of(sequence)

    def end(
        self, request: List[Sequence], state: State, kind: Kind, error: PcgError | None = None
    ) -> None:
        """End the remaining continuations of a request."""
        reason = {} if error is None else {"reason": str(error)}
        not_begun = [other for sequence in request for other in sequence.followers]
        for sequence in request:
            if self.by_id.get(sequence.id) is not sequence:
                continue  # already over; a later request may have the same id
            chunks = self._groups.handed_out(sequence, sequence.end(state, error))
            self._leave(sequence, chunks)
            self._note(kind, sequence.id, tokens=len(sequence.generated), **reason)
            if sequence not in not_begun:
                self._scheduler.drop(sequence)

    def _leave(self, sequence: Sequence, chunks: List[Chunk] = ()) -> None:
        del self.by_id[sequence.id]
        self.chunks += chunks

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End the request of a sequence with an error."""
        caused = as_pcg_error(error, sequence.id, GenerationError)
        self.end(self._groups.of(sequence), State.FAILED, Kind.FAILED, caused)

    def time_out(self, now_s: float) -> None:
        """End requests that timed out, are hopeless, or have a guide that failed to compile."""
        for late in self.deadlines.passed(now_s):
            self.end(late, State.TIMED_OUT, Kind.TIMED_OUT)
        for sequence, error in self._scheduler.queue_prepared():
            self.fail(sequence, error)
        for sequence in self._scheduler.policy.hopeless(now_s):
            self.end(self._groups.of(sequence), State.TIMED_OUT, Kind.TIMED_OUT)

    def accept(self, running: Running, results: Results, now_s: float) -> None:
        """Give the sequences of a step their results, log their tokens, and end completed ones."""
        tokens = _Tokens(now_s, self._totals.latest_step_s)
        for sequence in running.left:
            self._give(sequence, results, tokens)
            if sequence.followers and sequence.has_prompt and sequence not in self._failed:
                self._fork(sequence, results, tokens)
        plan = running.plan
        self._totals.ran(plan.tokens, running.work.load.tokens - plan.tokens)
        if tokens.further or tokens.events:
            since_before = len(tokens.further) - len(tokens.longer_s)
            self._totals.count_gaps(now_s, since_before, tokens.longer_s)
        self._log.add_tokens(now_s, tokens.further)
        self._log.add(*tokens.events)
        while self._ended:
            self._scheduler.drop(self._finish())
        self._fail_all()

    def _give(self, sequence: Sequence, results: Results, tokens: _Tokens) -> None:
        try:
            chunk = results.give(sequence)
            if chunk is None:
                return
            if chunk.token_id is not None:
                times = sequence.times
                if times.first_token_s is None:
                    times.first_token_s = tokens.now_s
                    details = {"count": 1, "cached_tokens": sequence.blocks.found}
                    event = Event(tokens.now_s, Kind.TOKEN, sequence.id, details)
                    tokens.events.append(event)
                else:
                    tokens.further.append(sequence.id)
                    if times.latest_token_s != tokens.before_s:  # rare: no token in the last step
                        tokens.longer_s.append(tokens.now_s - (times.latest_token_s or 0.0))
                times.latest_token_s = tokens.now_s
            handed_out = self._groups.handed_out(sequence, chunk) if self._groups.of_all else None
        except Exception as error:  # the sequence may be half changed
            self._failed[sequence] = error
            return
        if handed_out is None:
            self.chunks.append(chunk)
        else:
            self.chunks += handed_out
        if chunk.completion is not None:
            self._ended.append((sequence, chunk.completion.finish_reason))

    def _fork(self, sequence: Sequence, results: Results, tokens: _Tokens) -> None:
        """Start the other continuations of a computed prompt."""
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            self._scheduler.fork(sequence, follower, tokens.now_s)
            if follower.state is State.RUNNING:
                tokens.events.append(Event(tokens.now_s, Kind.ADMITTED, follower.id))
            self._give(follower, results, tokens)

    def _finish(self) -> Sequence:
        """Remove and return a sequence after its last chunk."""
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
        """Put all requests back into the queue, with their tokens, after a failed call.

        Args:
            kept: page tables of other owners.
        """
        while self._ended:
            self._finish()
        for sequence in [sequence for sequence in self.by_id.values() if sequence.is_over]:
            if sequence not in self._failed:  # the last chunk was not returned
                self._leave(sequence, [sequence.end(sequence.state)])
        for sequence in self.by_id.values():
            if sequence.generated:  # the prompt has ended; followers cannot share it any more
                sequence.followers = []
        following = {other for sequence in self.by_id.values() for other in sequence.followers}
        here = [sequence for sequence in self.by_id.values() if sequence not in following]
        self._scheduler.restart(here, kept)
        self._fail_all()

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks since the last call."""
        chunks, self.chunks = self.chunks, []
        return chunks

    def check_integrity(self) -> None:
        """Raise an AssertionError if a sequence is lost."""
        here = self._scheduler.everyone
        open_ids = {id(each) for first in here for each in (first, *first.followers)}
        assert open_ids == {id(sequence) for sequence in self.by_id.values()}
