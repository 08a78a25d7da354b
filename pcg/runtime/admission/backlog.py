"""The backlog: how much waits, for each tenant and for all, and how much may."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from pcg.errors import GenerationError, QueueFullError
from pcg.runtime.requests.request import Request
from pcg.runtime.requests.sequence import Sequence
from pcg.units import shown


@dataclass(frozen=True)
class QueueLimits:
    """The most that may wait in an engine; what comes then is refused by a `QueueFullError`.

    A request is taken where nothing waits, however long its prompt is. None is for no limit.

    Attributes:
        requests: the most requests; each continuation of one with `n` or `best_of` counts.
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
    """Counts the waiting requests and their tokens.

    Those that began and were put back, and continuations of a prompt that was computed, were taken
    already and do not count: else a tenant's own could fill the queue beyond what it may have.
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
        """Count the requests of a tenant; those of all for requests without one."""
        return self._requests.get(tenant, 0) if tenant else self.requests

    def add(self, sequence: Sequence) -> None:
        """Count a request that waits from now on."""
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Count a request that waits no more."""
        self._count(sequence, -1)

    def clear(self) -> None:
        """Count no request."""
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
        """Return the error that refuses a request; None if there is room for it."""
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
    """Count a waiting sequence and what follows it; 0 for one that began before."""
    return 0 if sequence.generated or sequence.choice else 1 + len(sequence.followers)
