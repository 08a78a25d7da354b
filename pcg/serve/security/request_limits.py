"""Bounds of what is in the server: the requests of a key, and the bytes of a tenant's bodies.

Bytes are counted as they come, whatever a header says. What is beyond is refused before it is read:
a 413 for one body, a 429 for what there is in all. How much waits in the engine is the engine's to
bound (`pcg.runtime.admission.backlog`). Files go to the disk as they come, so that their bytes are
bounded by a tenant's quota (`pcg.serve.files.quota`).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcg.serve.errors import ApiError
from pcg.serve.options import ServeOptions
from pcg.serve.security.json_elements import check_elements

LONG_BYTES = 2**16
"""Bodies from here on are long; a shorter one takes less than handing it to a thread is worth."""
_BODIES = 8
"""The bodies of the largest size that a tenant may have in the server at once, by their bytes."""


_FILES = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")
"""The paths to which files come."""


class RequestLimits:
    """ASGI middleware behind the authentication, which bounds requests and bodies.

    Args:
        most_values: the most entries of lists and objects of a body, if more than `MOST_VALUES`.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, most_values: int) -> None:
        self.app = app
        self._options = options
        self.most_values = most_values
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller = scope["state"].get("caller")
        key, tenant = ("", "") if caller is None else (caller.key, caller.tenant)
        has_file = _FILES.fullmatch(scope["path"]) is not None
        refusal = self._refusal(key, 0 if has_file else _said_bytes(scope))
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        body = _Body(self, tenant, receive, is_kept=not has_file, is_text=not _is_protobuf(scope))
        self._requests[key] += 1
        try:
            await self.app(scope, body.receive, send)
        finally:
            _less(self._requests, key, 1)
            _less(self._bytes, tenant, body.size_bytes)

    def _refusal(self, key: str, said_bytes: int) -> ApiError | None:
        if said_bytes > self._options.max_body_bytes:
            return self._too_large()
        most = self._options.key_requests
        if self._requests[key] >= most:
            return ApiError(
                429,
                f"This key has {most} requests in the server already; ask again later.",
                code="too_many_requests",
            )
        return None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"The body has more than {self._options.max_body_bytes} bytes; send less.",
            code="body_too_large",
            headers={"connection": "close"},
        )

    def take(self, tenant: str, size_bytes: int, body_bytes: int) -> None:
        """Count a part of a body of a tenant.

        Args:
            body_bytes: the bytes of the body so far, with this part.
        Raises:
            ApiError: it is more than a body or a tenant may have.
        """
        self._bytes[tenant] += size_bytes
        most = self._options.max_body_bytes
        if body_bytes > most:
            raise self._too_large()
        if self._bytes[tenant] > _BODIES * most:
            raise ApiError(
                429,
                f"The bodies of your requests have more than {_BODIES * most} bytes "
                "together; ask again later.",
                code="too_many_bytes",
                headers={"connection": "close"},
            )

    @property
    def timeout_s(self) -> float:
        """The most time between two parts of a body."""
        return self._options.stream_timeout_s


def _said_bytes(scope: Scope) -> int:
    """Return how many bytes a request says that it has."""
    said = dict(scope["headers"]).get(b"content-length", b"0")
    return int(said[:20]) if said.isdigit() else 0


def _is_protobuf(scope: Scope) -> bool:
    """Return True for a body that nobody reads as JSON."""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return kinds == [b"application/x-protobuf"]


def _less(counts: Counter[str], key: str, count: int) -> None:
    counts[key] -= count
    if not counts[key]:
        del counts[key]


class _Body:
    """A body that is counted while it comes.

    Args:
        is_kept: True for one that is held as a whole by whoever reads it.
        is_text: True for one that may be read as JSON.
    """

    def __init__(
        self,
        limits: RequestLimits,
        tenant: str,
        receive: Receive,
        *,
        is_kept: bool,
        is_text: bool,
    ) -> None:
        self.size_bytes = 0
        self._limits = limits
        self._tenant = tenant
        self._receive = receive
        self._is_kept = is_kept
        self._is_text = is_text
        self._is_whole = False
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._is_whole:  # then it waits for the client to leave
            return await self._receive()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                message = await self._receive()
        except TimeoutError:
            headers = {"connection": "close", "x-should-retry": "false"}
            raise ApiError(
                408, "The body did not come in time.", code="body_timeout", headers=headers
            ) from None
        part = message.get("body", b"")
        self._is_whole = not message.get("more_body", False)
        if not self._is_kept:
            return message
        self.size_bytes += len(part)
        self._limits.take(self._tenant, len(part), self.size_bytes)
        if self._is_text:
            self._parts.append(part)
        if self._is_whole and self.size_bytes > LONG_BYTES:  # a shorter one has too few bytes
            parts, self._parts = self._parts, []
            await asyncio.to_thread(check_elements, b"".join(parts), self._limits.most_values)
        return message
