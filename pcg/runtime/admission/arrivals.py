"""Arrivals: requests that were sent to an engine's thread, and are not in the engine yet.

All that is sent to the thread is done in the order of sending, but a tenant with a name has at most
eight requests there at once. Its others are held back, and one follows as each is taken, so that
those of a flood stand before nobody else's.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from pcg.errors import QueueFullError
from pcg.runtime.admission.backlog import Backlog
from pcg.runtime.requests.stream import Stream

Call = TypeVar("Call")
"""Gives a request to the engine."""

_AT_ONCE = 8
"""Requests of a tenant that are sent to the thread at once."""


class Arrivals(Generic[Call]):
    """The requests on their way, by tenant; the caller locks."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._counts: Counter[str] = Counter()
        self._held: dict[str, dict[Stream, Call]] = {}

    def __len__(self) -> int:
        return self._counts.total()

    def why_full(self, tenant: str) -> QueueFullError | None:
        """Return the error that refuses a request; None if it may come.

        With those on their way no more may wait than the queue takes. A flood is so refused where
        it is made, and costs the engine's thread nothing.
        """
        limits = self._backlog.limits
        most = limits.tenant_requests if tenant else limits.requests
        there = self._counts[tenant] + self._backlog.requests_of(tenant)
        if most is None or there < most:
            return None
        return QueueFullError(
            f"the queue is full: {there} requests wait or came since the last step, and {most} "
            "may; ask again later, or give the engine other QueueLimits"
        )

    def add(self, tenant: str, stream: Stream, call: Call) -> bool:
        """Count a request; returns True if it may be sent now, and otherwise holds it back."""
        self._counts[tenant] += 1
        if not tenant or self._counts[tenant] <= _AT_ONCE:
            return True
        self._held.setdefault(tenant, {})[stream] = call
        return False

    def taken(self, tenant: str) -> Call | None:
        """Note that the engine has one; returns the next one that may be sent, if any."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        held = self._held.get(tenant)
        return None if not held else self._release(tenant, next(iter(held)))

    def release(self, wanted: Stream | str) -> Call | None:
        """Return one that is held back, by its stream or its id, to be sent out of its turn."""
        for tenant, held in self._held.items():
            for stream in held:
                if wanted in (stream, stream.request_id):
                    return self._release(tenant, stream)
        return None

    def _release(self, tenant: str, stream: Stream) -> Call:
        held = self._held[tenant]
        call = held.pop(stream)
        if not held:
            del self._held[tenant]
        return call

    def clear(self) -> list[Stream]:
        """Forget all of them; returns those that were held back."""
        held = [stream for streams in self._held.values() for stream in streams]
        self._counts.clear()
        self._held.clear()
        return held
