"""The event log: every state transition of requests, jobs and adapters, in order.

Metrics and tests read only the log. A request that arrives during a step is logged after the step's
events, with its time of arrival.

Nearly all events are tokens. The tokens of one step are held as one object: an object for each
would be a thousand long-lived objects a step, which Python's garbage collector traverses again and
again.

Kinds by subject:

    requests   submitted → refused
               submitted → admitted → token … → finished
               admitted or submitted → cancelled | timed_out | failed
               admitted → preempted → admitted | failed
    jobs       queued → started → stepped … → completed | cancelled | failed
               started → paused → resumed;  published between
    adapters   paged_in, evicted
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of an event."""

    SUBMITTED = "submitted"
    REFUSED = "refused"
    ADMITTED = "admitted"
    TOKEN = "token"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    QUEUED = "queued"
    STARTED = "started"
    STEPPED = "stepped"
    PAUSED = "paused"
    RESUMED = "resumed"
    PUBLISHED = "published"
    COMPLETED = "completed"
    PAGED_IN = "paged_in"
    EVICTED = "evicted"


KEPT_EVENTS = 2**16
"""The number of events that an engine's log keeps unless it is told otherwise."""

_LOG = logging.getLogger("pcg.engine")

_NOTHING: Mapping[str, object] = MappingProxyType({})
_ONE: Mapping[str, object] = MappingProxyType({"count": 1})


class Event(NamedTuple):
    """A state transition.

    Attributes:
        subject: id of the request or job, or name of the adapter.
        details: numbers and reasons, such as `prompt_tokens`, `adapter` and `adapter_version` of a
            submitted request, `adapter_version` of a published adapter, `cached_tokens` of a
            request's first token, `tokens` of a job's step, `reason` of a refusal, and `job` of a
            job's end, as its name may be a request's, too.
    """

    time_s: float
    kind: Kind
    subject: str
    details: Mapping[str, object] = _NOTHING


class _Tokens(NamedTuple):
    time_s: float
    subjects: tuple[str, ...]

    def events(self) -> Iterator[Event]:
        return (Event(self.time_s, Kind.TOKEN, subject, _ONE) for subject in self.subjects)


@dataclass(frozen=True, eq=False)
class _Listener:
    on_event: Callable[[Event], None]
    on_tokens: Callable[[float, Sequence[str]], None] | None


class EventLog:
    """The latest `kept` events in order of time, or all of them; listeners get each.

    Attributes:
        lacks_until_s: the time up to which events are missing; -inf while none is.
    """

    def __init__(self, kept: int | None = None, lacks_until_s: float = -math.inf) -> None:
        self.lacks_until_s = lacks_until_s
        self._kept = kept
        self._entries: deque[Event | _Tokens] = deque()
        self._count = 0
        self._listeners: list[_Listener] = []

    def add(self, *events: Event) -> None:
        self._entries.extend(events)
        self._count += len(events)
        self._drop()
        self._tell(events)

    def add_tokens(self, time_s: float, subjects: Sequence[str]) -> None:
        """Append a token's event, not a first token's, of each of some requests."""
        tokens = _Tokens(time_s, tuple(subjects))
        if tokens.subjects:
            self._entries.append(tokens)
            self._count += len(tokens.subjects)
            self._drop()
        if self._listeners:
            self._tell((), tokens)

    def listen(
        self,
        on_event: Callable[[Event], None],
        on_tokens: Callable[[float, Sequence[str]], None] | None = None,
    ) -> Callable[[], None]:
        """Call a function with each event from now on; return a function that ends the calls.

        A function that raises is not called again, and its error is logged.

        Args:
            on_tokens: called once with the time and the requests of a step's tokens, except first
                tokens, instead of `on_event` for each.
        """
        listener = _Listener(on_event, on_tokens)
        self._listeners.append(listener)
        return lambda: self._end(listener)

    def recording(self) -> tuple[EventLog, Callable[[], None]]:
        """Return a log of all events from now on, without a limit, and a function that ends it."""
        last_s = self._entries[-1].time_s if self._entries else self.lacks_until_s
        recorded = EventLog(lacks_until_s=last_s)
        return recorded, self.listen(recorded.add, recorded.add_tokens)

    def _end(self, listener: _Listener) -> None:
        self._listeners = [other for other in self._listeners if other is not listener]

    def _tell(self, events: Sequence[Event], tokens: _Tokens | None = None) -> None:
        for listener in self._listeners:
            try:
                if tokens is not None and listener.on_tokens is not None:
                    listener.on_tokens(tokens.time_s, tokens.subjects)
                else:
                    for event in events if tokens is None else tokens.events():
                        listener.on_event(event)
            except Exception:
                self._end(listener)
                _LOG.exception("a listener of the engine's events raised; it gets no more of them")

    def __iter__(self) -> Iterator[Event]:
        entries = tuple(self._entries)
        parts = (entry.events() if isinstance(entry, _Tokens) else (entry,) for entry in entries)
        return chain.from_iterable(parts)

    def __len__(self) -> int:
        return self._count

    def of(self, subject: str) -> tuple[Event, ...]:
        return tuple(event for event in self if event.subject == subject)

    def _drop(self) -> None:
        while self._kept is not None and self._count > self._kept:
            excess, first = self._count - self._kept, self._entries.popleft()
            count = 1
            if isinstance(first, _Tokens):
                count = min(excess, len(first.subjects))
                if count < len(first.subjects):
                    self._entries.appendleft(first._replace(subjects=first.subjects[count:]))
            self._count -= count
            self.lacks_until_s = first.time_s
