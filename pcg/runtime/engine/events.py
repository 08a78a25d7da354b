"""The event log: every state transition of requests, jobs and adapters, in order.

Metrics and tests read what happened here and nowhere else. A request that comes during a step
stands behind the step's events, with the time when it came.

Kinds by subject:

    requests   submitted → refused
               submitted → admitted → token … → finished
               admitted or submitted → cancelled | timed_out | failed
               admitted → preempted → admitted
    jobs       queued → started → stepped … → completed | cancelled | failed
               started → paused → resumed;  evaluated, saved and published between
    adapters   added, published, removed;  paged_in, evicted
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from pcg.runtime.engine.clock import Clock


class Kind(StrEnum):
    """What happened."""

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
    EVALUATED = "evaluated"
    SAVED = "saved"
    PUBLISHED = "published"
    COMPLETED = "completed"
    ADDED = "added"
    REMOVED = "removed"
    PAGED_IN = "paged_in"
    EVICTED = "evicted"


_NOTHING: Mapping[str, object] = MappingProxyType({})


class Event(NamedTuple):
    """A transition.

    Attributes:
        time_s: on the engine's clock, seconds.
        kind: what happened.
        subject: id of the request or job, or name of the adapter.
        details: numbers and reasons, such as `prompt_tokens` and `adapter` of a submitted request,
            `cached_tokens` of a request's first token, `tokens` of a job's step, `reason` of a
            refusal.
    """

    time_s: float
    kind: Kind
    subject: str
    details: Mapping[str, object] = _NOTHING


class EventLog:
    """Events in order of time; holds the latest, and tells listeners of each.

    Args:
        kept: how many to hold; None for all.
    """

    def __init__(self, kept: int | None = None) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._listeners: list[Callable[[Event], None]] = []

    def add(self, *events: Event) -> None:
        """Append events."""
        self._events.extend(events)
        for listener in self._listeners:
            for event in events:
                listener(event)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Have a function called with each event from now on; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)

    def of(self, subject: str) -> tuple[Event, ...]:
        """The events of one subject."""
        return tuple(event for event in self._events if event.subject == subject)


@dataclass(frozen=True)
class Notes:
    """Writes events at the time that it is.

    Whoever is told of something by the parts of an engine has this, and not the engine: so nothing
    that an engine has refers to it, and its memory is free as soon as it is dropped.

    Attributes:
        log: to write to.
        clock: to time by.
    """

    log: EventLog
    clock: Clock

    def __call__(self, kind: Kind, subject: str, **details: object) -> None:
        self.log.add(Event(self.clock.now_s(), kind, subject, details))
