"""Responses that are kept in memory, for `previous_response_id` and to be read again.

Each tenant has a bound of its own, so that nobody's flood drops what another asked to keep; the
response that was read least recently goes first. A restart forgets all of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pcg.serve.openai.responses.body import InputItem

MOST_RESPONSES = 1_024
MOST_BYTES = 32 * 2**20
"""The most responses of a tenant that are kept, and their bytes with all that came before them."""


@dataclass(frozen=True)
class KeptResponse:
    """A response.

    Attributes:
        content: the response object, as JSON.
        input: the items of its request.
        history: all items up to its output, which a next request goes on from.
        history_bytes: their memory (`items.memory_of`).
    """

    content: bytes
    input: Sequence[InputItem]
    history: Sequence[InputItem]
    history_bytes: int

    @property
    def size_bytes(self) -> int:
        """Its size; items that responses share count for each."""
        return len(self.content) + self.history_bytes


class ResponseStore:
    """The responses of all tenants; any thread may use it."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._of_tenant: defaultdict[str, OrderedDict[str, KeptResponse]] = defaultdict(OrderedDict)
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def may_keep(self, size_bytes: int) -> bool:
        """Return True if a response of this size can be kept."""
        return size_bytes <= self._most_bytes

    def put(self, tenant: str, response_id: str, kept: KeptResponse) -> None:
        """Keep a response, in place of older ones if need be."""
        with self._lock:
            responses = self._of_tenant[tenant]
            responses[response_id] = kept
            self._bytes[tenant] += kept.size_bytes
            while len(responses) > self._most or self._bytes[tenant] > self._most_bytes:
                _, dropped = responses.popitem(last=False)
                self._bytes[tenant] -= dropped.size_bytes

    def find(self, tenant: str, response_id: str) -> KeptResponse | None:
        """Return a tenant's response; None if there is none of that id."""
        with self._lock:
            responses = self._of_tenant.get(tenant, OrderedDict())
            if response_id in responses:
                responses.move_to_end(response_id)
            return responses.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a tenant's response; returns False if there is none of that id."""
        with self._lock:
            dropped = self._of_tenant.get(tenant, OrderedDict()).pop(response_id, None)
            if dropped is not None:
                self._bytes[tenant] -= dropped.size_bytes
            return dropped is not None
