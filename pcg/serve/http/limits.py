"""Limits of a key's requests, of the bytes of a tenant's bodies, and of the elements of JSON.

Bytes are counted as they arrive, regardless of headers. A request beyond a limit is refused before
it is read: 413 if a single body is too large, 429 if a tenant's bodies together are. The engine
limits its own queue (`pcg.runtime.admission.backlog`). Files are written to disk as they arrive and
are limited by a tenant's quota (`pcg.serve.files.files`).

The elements of a JSON text are counted in its bytes before it is parsed. Parsing holds the
interpreter lock to its end and stalls all streams. Its time depends mostly on the number of
elements: 4 MiB take 50 ms as two million numbers, two seconds as a million lists, which the garbage
collector visits repeatedly, and 3 ms as a single string. numpy counts without the lock.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import ApiError

# ------------------------------------------------------------------------------------ json elements


MOST_CONTAINERS = 2**16
"""More than any body within the limits of its lists has (`pcg.serve.openai`)."""
MOST_VALUES = 2**18
"""Parsed and validated in 20 ms; for models with a long context the limit is twice the context."""
_MOST: Mapping[str, int] = {
    "lists and objects": MOST_CONTAINERS,
    "names": 2**16,
    "quotation marks": 2**18,
    "values": MOST_VALUES,
}
_PART = 2**17
"""Bytes per pass: between two passes numpy needs the interpreter lock."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")

Bytes = npt.NDArray[np.uint8]


def check_elements(body: bytes, most_values: int = MOST_VALUES) -> None:
    """Refuse a JSON text that has too many elements.

    Args:
        most_values: the most entries of lists and objects, if more than `MOST_VALUES`.
    Raises:
        ApiError: too many elements; the message has their kind and the limit.
    """
    most = {**_MOST, "values": max(most_values, MOST_VALUES)}
    parts = [np.frombuffer(body[at : at + _PART], np.uint8) for at in range(0, len(body), _PART)]
    counted = (_counts(part, _count(part, '"')) for part in parts)
    if _excess(counted, most) is None:  # the usual case
        return
    excess = _excess((_counts(*part) for part in _without_texts(parts)), most)
    if excess is not None:
        raise ApiError(
            400,
            f"The body has more than {most[excess]} {excess}; send fewer.",
            code="body_too_large",
        )


def _excess(parts: Iterable[Counter[str]], most: Mapping[str, int]) -> str | None:
    """Return the first kind of element that exceeds its limit in total, or None."""
    counts = sum(parts, Counter[str]())
    return next((name for name, bound in most.items() if counts[name] > bound), None)


def _counts(text: Bytes, quotes: int) -> Counter[str]:
    """Return upper bounds of a text's elements, from the characters that each kind needs."""
    brackets, names, commas = (_count(text, characters) for characters in ("[{", ":", ","))
    counts = (brackets, names, quotes, commas + brackets)
    return Counter(dict(zip(_MOST, counts, strict=True)))


def _count(text: Bytes, characters: str) -> int:
    return sum(int(np.count_nonzero(text == ord(character))) for character in characters)


def _without_texts(parts: Sequence[Bytes]) -> Iterator[tuple[Bytes, int]]:
    """Yield the bytes outside a JSON text's strings, and the number of quotation marks."""
    run = is_inside = 0
    for text in parts:
        places = np.arange(len(text), dtype=np.int32)
        others = np.maximum.accumulate(np.where(text == _BACKSLASH, np.int32(-1), places))
        others[others < 0] = -1 - run  # continue the run of backslashes before this part
        # The number of backslashes directly before each character.
        runs = places - 1 - np.concatenate(([-1 - run], others[:-1]))
        run = len(text) - 1 - int(others[-1])
        # An odd number escapes a quotation mark.
        is_end = (text == _QUOTE) & (runs % 2 == 0)
        is_within = np.bitwise_xor.accumulate(is_end.astype(np.uint8)) ^ is_inside
        is_inside = int(is_within[-1])
        yield text[is_within == 0], int(np.count_nonzero(is_end))


# ----------------------------------------------------------------------------------- request limits


SHORT_BODY = 2**16
"""Bytes up to which a body is read to its end after its reply was sent."""
LONG_BYTES = 2**16
"""Bytes from which a body is parsed on a thread; for shorter bodies a thread costs more."""
_BODIES = 8
"""Limit of the bytes of a tenant's concurrent bodies, in bodies of the maximum size."""


_FILES = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")
"""The paths that receive files."""


class RequestLimits:
    """ASGI middleware inside the authentication that limits requests and bodies.

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
        refusal = self._refusal(key, 0 if has_file else _declared_bytes(scope))
        if refusal is not None:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        body = _Body(self, tenant, receive, is_kept=not has_file, is_text=not _is_protobuf(scope))

        def closing(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and not (body.is_whole or is_short(scope)):
                headers = MutableHeaders(scope=message)
                headers["connection"] = "close"  # the rest of the body is not awaited
            return send(message)

        self._requests[key] += 1
        try:
            await self.app(scope, body.receive, closing)
        finally:
            _less(self._requests, key, 1)
            _less(self._bytes, tenant, body.size_bytes)

    def _refusal(self, key: str, declared_bytes: int) -> ApiError | None:
        if declared_bytes > self._options.max_body_bytes:
            return self._too_large()
        most = self._options.key_requests
        if self._requests[key] >= most:
            return ApiError(
                429,
                f"This key already has {most} requests in the server; ask again later.",
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
        """Count a part of a tenant's body.

        Args:
            body_bytes: bytes of the body so far, including this part.
        Raises:
            ApiError: the body or the tenant's bodies are too large.
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
        """The maximum time between two parts of a body, seconds."""
        return self._options.stream_timeout_s


def _declared_bytes(scope: Scope) -> int:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length[:20]) if length.isdigit() else 0


def is_short(scope: Scope) -> bool:
    """Return True for a request without a body, or with a body that is read after the reply."""
    headers = dict(scope["headers"])
    if b"content-length" in headers:
        return b"expect" not in headers and _declared_bytes(scope) <= SHORT_BODY
    return b"transfer-encoding" not in headers


def _is_protobuf(scope: Scope) -> bool:
    """Return True if the body is protobuf."""
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return kinds == [b"application/x-protobuf"]


def _less(counts: Counter[str], key: str, count: int) -> None:
    counts[key] -= count
    if not counts[key]:
        del counts[key]


class _Body:
    """A body that is counted while it arrives.

    Args:
        is_kept: True if the route holds the whole body in memory.
        is_text: True if the body may be parsed as JSON.
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
        self.is_whole = False
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        if self.is_whole:  # the caller waits for the client to disconnect
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
        self.is_whole = not message.get("more_body", False)
        if not self._is_kept:
            return message
        self.size_bytes += len(part)
        self._limits.take(self._tenant, len(part), self.size_bytes)
        if self._is_text:
            self._parts.append(part)
        if self.is_whole and self.size_bytes > LONG_BYTES:  # a short body cannot exceed the limits
            parts, self._parts = self._parts, []
            await asyncio.to_thread(check_elements, b"".join(parts), self._limits.most_values)
        return message
