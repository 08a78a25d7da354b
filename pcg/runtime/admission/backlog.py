"""The backlog: the number of waiting requests, by tenant and in total, and its limits.

Arrivals are requests that were sent to an engine's thread and are not in the engine yet. The thread
handles calls in order, but a named tenant has at most eight requests in this queue; its further
requests are held back, so that a flood does not delay other tenants' requests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from pcg.errors import GenerationError, QueueFullError
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.runtime.requests.stream import Stream
from pcg.units import shown


@dataclass(frozen=True)
class QueueLimits:
    """Limits of waiting requests; further requests are refused by a `QueueFullError`.

    A request of any length is accepted while no other request waits. None means no limit.

    Attributes:
        requests: maximum number of requests; each continuation (`n` or `best_of`) counts.
        tokens: maximum number of tokens of the prompts.
        tenant_requests: maximum number of requests of a named tenant.
        tenant_tokens: maximum number of tokens of the prompts of a named tenant.
    Raises:
        GenerationError: a limit is not an int of at least 1.
    """

    requests: int | None = 4096
    tokens: int | None = 4 * 2**20
    tenant_requests: int | None = 1024
    tenant_tokens: int | None = 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (type(value) is not int or value < 1):
                raise GenerationError(
                    f"{field.name}={value!r}; use an int of at least 1, or None for no limit"
                )


UNLIMITED = QueueLimits(None, None, None, None)


class Backlog:
    """Counts the waiting requests and their tokens.

    Preempted requests and continuations of a computed prompt do not count, as they were already
    accepted.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.requests = 0
        self.tokens = 0
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.requests

    def requests_of(self, tenant: str) -> int:
        """Return the number of waiting requests of a tenant; of all tenants for an empty name."""
        return self._requests.get(tenant, 0) if tenant else self.requests

    def add(self, sequence: Sequence) -> None:
        """Count a request that starts to wait."""
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Stop counting a request that waits no more."""
        self._count(sequence, -1)

    def clear(self) -> None:
        """Reset all counts."""
        self.requests = self.tokens = 0
        self._requests.clear()
        self._tokens.clear()

    def _count(self, sequence: Sequence, sign: int) -> None:
        if not (came := new_requests(sequence)):
            return
        request, requests = sequence.request, sign * came
        tenant, tokens = request.tenant, sign * request.length
        self.requests += requests
        self.tokens += tokens
        self._requests[tenant] += requests
        self._tokens[tenant] += tokens
        if not self._requests[tenant]:
            del self._requests[tenant], self._tokens[tenant]

    def why_full(self, request: Request) -> QueueFullError | None:
        """Return the error that refuses a request; None to accept it."""
        limits, tenant, came = self.limits, request.tenant, request.params.width
        counts = [(self.requests, limits.requests, self.tokens, limits.tokens, "")]
        if tenant:
            mine = self._requests.get(tenant, 0), self._tokens.get(tenant, 0)
            name = f" of tenant {shown(tenant)}"
            counts.append((mine[0], limits.tenant_requests, mine[1], limits.tenant_tokens, name))
        for requests, most, tokens, most_tokens, whose in counts:
            full = None
            if most is not None and requests + came > most:
                several = f", {came} came" if came > 1 else ""
                full = f"{requests} requests{whose} wait{several}, and {most} may"
            elif most_tokens is not None and requests and tokens + request.length > most_tokens:
                full = (
                    f"{requests} requests{whose} with {tokens} tokens wait, {request.length} came, "
                    f"and {most_tokens} may wait"
                )
            if full is not None:
                return QueueFullError(
                    f"the queue is full: {full}; ask again later, or give the engine "
                    "other QueueLimits"
                )
        return None


def new_requests(sequence: Sequence) -> int:
    """Count a waiting sequence and its followers; 0 for a sequence that has run before."""
    return 0 if sequence.generated or sequence.choice else 1 + len(sequence.followers)


Call = TypeVar("Call")
"""A call that submits a request to the engine."""

_AT_ONCE = 8
"""Maximum number of a tenant's requests in the thread's queue."""


class Arrivals(Generic[Call]):
    """The requests on their way to the engine, by tenant; changes need the lock, reads do not."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._all = 0
        # A tenant's requests in order of arrival, with None for sent requests.
        self._coming: dict[str, dict[Stream, Call | None]] = {}

    def __len__(self) -> int:
        return self._all

    def why_full(self, tenant: str) -> QueueFullError | None:
        """Return the error that refuses a request; None to accept it.

        Waiting requests and arrivals are limited together, so that a flood is refused in the
        caller's thread, at no cost for the engine's thread.
        """
        limits = self._backlog.limits
        most = limits.tenant_requests if tenant else limits.requests
        waiting = len(self._coming.get(tenant, ())) + self._backlog.requests_of(tenant)
        if most is None or waiting < most:
            return None
        return QueueFullError(
            f"the queue is full: {waiting} requests wait or came since the last step, and {most} "
            "may; ask again later, or give the engine other QueueLimits"
        )

    def add(self, tenant: str, stream: Stream, call: Call) -> bool:
        """Count a request; return True to send it now, False if it is held back."""
        coming = self._coming.setdefault(tenant, {})
        is_sent = not tenant or len(coming) < _AT_ONCE
        coming[stream] = None if is_sent else call
        self._all += 1
        return is_sent

    def taken(self, tenant: str, stream: Stream) -> Call | None:
        """Remove a call that has arrived or failed; return the next call to send, if any."""
        coming = self._coming.get(tenant, {})
        if stream not in coming:
            return None
        del coming[stream]
        self._all -= 1
        if not coming:
            del self._coming[tenant]
        for coming_stream, call in coming.items() if tenant else ():  # few were sent
            if call is not None:
                coming[coming_stream] = None
                return call
        return None

    def find(self, request_id: str) -> Stream | None:
        """Return the stream of an arriving request by id."""
        streams = (stream for coming in self._coming.values() for stream in coming)
        return next((match for match in streams if match.request_id == request_id), None)

    def clear(self) -> list[Stream]:
        """Remove all arrivals; return the streams of unsent requests."""
        everyone = [pair for coming in self._coming.values() for pair in coming.items()]
        self._all = 0
        self._coming.clear()
        return [stream for stream, call in everyone if call is not None]
