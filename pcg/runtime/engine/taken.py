"""The parts of a step that sequences took: their chunks, their events, and which of them ended or failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from pcg.runtime.metrics.events import Event, EventLog, Kind
from pcg.runtime.requests.groups import Groups
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.step_results import StepResults


@dataclass
class Taken:
    """The results of a step, as sequences take them one after the other.

    Attributes:
        ended: sequences that ended, and why.
        failed: sequences that could not take what was computed, and why.
    """

    now_s: float
    groups: Groups
    chunks: list[Chunk] = field(default_factory=list)
    ended: list[tuple[Sequence, str]] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    _firsts: list[Event] = field(default_factory=list)
    _others: list[str] = field(default_factory=list)

    def give(self, sequence: Sequence, results: StepResults) -> bool:
        """Give a sequence what is its own; returns False if it failed."""
        try:
            chunk = results.give(sequence)
        except Exception as error:
            self.failed.append((sequence, error))
            return False
        if chunk is None:
            return True
        self.chunks += self.groups.handed_out(sequence, chunk)
        if chunk.completion is not None:
            self.ended.append((sequence, chunk.completion.finish_reason))
        if chunk.token_id is None:
            return True
        if sequence.first_token_s is None:
            sequence.first_token_s = self.now_s
            details = {"count": 1, "cached_tokens": sequence.found}
            self._firsts.append(Event(self.now_s, Kind.TOKEN, sequence.id, details))
        else:
            self._others.append(sequence.id)
        return True

    def log(self, log: EventLog) -> None:
        """Log the tokens."""
        log.add_tokens(self.now_s, self._others)
        log.add(*self._firsts)
