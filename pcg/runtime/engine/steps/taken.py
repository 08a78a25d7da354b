"""Results as sequences take them: their chunks and events, and which of them ended or failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from pcg.runtime.engine.scheduler import Scheduler
from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.metrics.totals import Totals
from pcg.runtime.requests.groups import Groups
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.sequence import Sequence, State
from pcg.runtime.requests.step_results import StepResults


@dataclass
class Taken:
    """The results of a step, as sequences take them one after the other.

    Attributes:
        before_s: when the last step before this one ended that gave tokens.
        chunks: where their chunks go.
        ended: where sequences go that ended, and why.
        failed: where sequences go that could not take what was computed, and why.
    """

    now_s: float
    groups: Groups
    scheduler: Scheduler
    totals: Totals
    chunks: list[Chunk]
    ended: list[tuple[Sequence, str]]
    failed: dict[Sequence, Exception]
    _events: list[Event] = field(default_factory=list)
    _others: list[str] = field(default_factory=list)
    _longer_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before_s = self.totals.latest_step_s

    def give(self, sequence: Sequence, results: StepResults) -> None:
        """Give a sequence what is its own, and begin others where its prompt ends."""
        self._give(sequence, results)
        if sequence.followers and sequence.has_prompt and sequence not in self.failed:
            self._begin_others(sequence, results)

    def _begin_others(self, sequence: Sequence, results: StepResults) -> None:
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            self.scheduler.fork(sequence, follower, self.now_s)
            if follower.state is State.RUNNING:
                self._events.append(Event(self.now_s, Kind.ADMITTED, follower.id))
            self._give(follower, results)

    def _give(self, sequence: Sequence, results: StepResults) -> None:
        try:
            chunk = results.give(sequence)
            if chunk is None:
                return
            if chunk.token_id is not None:
                self._note_token(sequence)
            handed_out = self.groups.handed_out(sequence, chunk) if self.groups else (chunk,)
        except Exception as error:  # the sequence may be half changed
            self.failed[sequence] = error
            return
        self.chunks += handed_out
        if chunk.completion is not None:
            self.ended.append((sequence, chunk.completion.finish_reason))

    def _note_token(self, sequence: Sequence) -> None:
        times = sequence.times
        if times.first_token_s is None:
            times.first_token_s = self.now_s
            details = {"count": 1, "cached_tokens": sequence.blocks.found}
            self._events.append(Event(self.now_s, Kind.TOKEN, sequence.id, details))
        else:
            self._others.append(sequence.id)
            if times.latest_token_s != self.before_s:  # most had one in the last step
                self._longer_s.append(self.now_s - (times.latest_token_s or 0.0))
        times.latest_token_s = self.now_s

    def log(self, log: EventLog, served: int, trained: int) -> None:
        """Log the tokens, and what began; count the step's gaps, and its tokens by their kind."""
        self.totals.ran(served, trained)
        if self._others or self._events:
            since_before = len(self._others) - len(self._longer_s)
            self.totals.count_gaps(self.now_s, since_before, self._longer_s)
        log.add_tokens(self.now_s, self._others)
        log.add(*self._events)
