"""Arrivals: requests that were sent to an engine's thread, and are not in the engine yet.

All that is sent to the thread is done in the order of sending, but a tenant with a name has at most
eight requests there at once. Its others are held back, and one follows as each is taken, so that
those of a flood stand before nobody else's.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pcg.errors import QueueFullError
from pcg.runtime.admission.backlog import Backlog
from pcg.runtime.requests.stream import Stream

Call = TypeVar("Call")
"""Gives a request to the engine."""

_AT_ONCE = 8
"""Requests of a tenant that are sent to the thread at once."""


class Arrivals(Generic[Call]):
    """The requests on their way, by tenant; who changes it has the lock, and anyone may read."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._all = 0
        # Those of a tenant in the order in which they came, with None once they were sent.
        self._coming: dict[str, dict[Stream, Call | None]] = {}

    def __len__(self) -> int:
        return self._all

    def why_full(self, tenant: str) -> QueueFullError | None:
        """Return the error that refuses a request; None if it may come.

        With those on their way no more may wait than the queue takes. A flood is so refused where
        it is made, and costs the engine's thread nothing.
        """
        limits = self._backlog.limits
        most = limits.tenant_requests if tenant else limits.requests
        there = len(self._coming.get(tenant, ())) + self._backlog.requests_of(tenant)
        if most is None or there < most:
            return None
        return QueueFullError(
            f"the queue is full: {there} requests wait or came since the last step, and {most} "
            "may; ask again later, or give the engine other QueueLimits"
        )

    def add(self, tenant: str, stream: Stream, call: Call) -> bool:
        """Count a request; returns True if it may be sent now, and otherwise holds it back."""
        coming = self._coming.setdefault(tenant, {})
        is_sent = not tenant or len(coming) < _AT_ONCE
        coming[stream] = None if is_sent else call
        self._all += 1
        return is_sent

    def taken(self, tenant: str, stream: Stream) -> Call | None:
        """Remove a call that has arrived or failed; return the next one to send, if any."""
        coming = self._coming.get(tenant, {})
        if stream not in coming:
            return None
        del coming[stream]
        self._all -= 1
        if not coming:
            del self._coming[tenant]
        for one, call in coming.items() if tenant else ():  # few were sent
            if call is not None:
                coming[one] = None
                return call
        return None

    def find(self, request_id: str) -> Stream | None:
        """Return the stream of a request that is on its way, by its id."""
        streams = (stream for coming in self._coming.values() for stream in coming)
        return next((one for one in streams if one.request_id == request_id), None)

    def clear(self) -> list[Stream]:
        """Forget all of them; returns those that were not sent."""
        everyone = [pair for coming in self._coming.values() for pair in coming.items()]
        self._all = 0
        self._coming.clear()
        return [stream for stream, call in everyone if call is not None]
