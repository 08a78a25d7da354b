"""The backlog: how much waits, for each tenant and for all, and how much may."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from pcg.errors import GenerationError, QueueFullError
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence


@dataclass(frozen=True)
class QueueLimits:
    """The most that may wait in an engine; what comes then is refused by a `QueueFullError`.

    A request is taken where nothing waits, however long its prompt is. None is for no limit.

    Attributes:
        requests: the most requests.
        tokens: the most tokens of their prompts.
        tenant_requests: the most requests of one tenant; those without a tenant are not of one.
        tenant_tokens: the most tokens of the prompts of one tenant.
    Raises:
        GenerationError: a limit is no int of at least 1.
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
    """Counts the waiting requests and their tokens."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.requests = 0
        self.tokens = 0
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.requests

    def add(self, sequence: Sequence) -> None:
        """Count a request that waits from now on."""
        self._count(sequence.request, 1)

    def remove(self, sequence: Sequence) -> None:
        """Count a request that waits no more."""
        self._count(sequence.request, -1)

    def _count(self, request: Request, sign: int) -> None:
        tenant, tokens = request.tenant, sign * request.length
        self.requests += sign
        self.tokens += tokens
        self._requests[tenant] += sign
        self._tokens[tenant] += tokens
        if not self._requests[tenant]:
            del self._requests[tenant], self._tokens[tenant]

    def why_full(self, request: Request) -> QueueFullError | None:
        """Return the error that refuses a request; None if there is room for it."""
        limits, tenant = self.limits, request.tenant
        counts = [(self.requests, limits.requests, self.tokens, limits.tokens, "")]
        if tenant:
            mine = self._requests.get(tenant, 0), self._tokens.get(tenant, 0)
            name = f" of tenant {tenant!r}"
            counts.append((mine[0], limits.tenant_requests, mine[1], limits.tenant_tokens, name))
        for requests, most, tokens, most_tokens, whose in counts:
            full = None
            if most is not None and requests >= most:
                full = f"{requests} requests{whose} wait, and {most} may"
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
