"""Bounds of what is in the server: requests of a key, bytes of a tenant's bodies, elements of JSON.

Bytes are counted as they arrive, whatever a header says. A request beyond a bound is refused before
it is read: a 413 for one body, a 429 for all of a tenant's. The engine bounds its own queue
(`pcg.runtime.admission.backlog`). Files go to the disk as they arrive, and a tenant's quota bounds
them (`pcg.serve.files.files`).

The elements of a JSON text are counted in its bytes before objects are made of them. Reading JSON
holds the interpreter's lock from the first byte to the last, so no stream goes on meanwhile, and
the time depends on the number of elements far more than on bytes: 4 MiB took 50 ms as two million
numbers, and two seconds as a million lists, which the garbage collector visits again and again; as
one text they take 3 ms. numpy counts without the lock.
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
"""More than a body can have whose lists are within their bounds (`pcg.serve.openai`)."""
MOST_VALUES = 2**18
"""Read and validated in 20 ms; a model with a longer context has twice as many as its tokens."""
_MOST: Mapping[str, int] = {
    "lists and objects": MOST_CONTAINERS,
    "names": 2**16,
    "quotation marks": 2**18,
    "values": MOST_VALUES,
}
_PART = 2**17
"""Bytes that are looked at at once: numpy has the lock again between them."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")

Bytes = npt.NDArray[np.uint8]


def check_elements(body: bytes, most_values: int = MOST_VALUES) -> None:
    """Refuse a JSON text that has too many elements.

    Args:
        most_values: the most entries of lists and objects, if more than `MOST_VALUES`.
    Raises:
        ApiError: says of what there are too many, and how many there may be.
    """
    most = {**_MOST, "values": max(most_values, MOST_VALUES)}
    parts = [np.frombuffer(body[at : at + _PART], np.uint8) for at in range(0, len(body), _PART)]
    counted = (_counts(part, _count(part, '"')) for part in parts)
    if _excess(counted, most) is None:  # as nearly always
        return
    excess = _excess((_counts(*part) for part in _without_texts(parts)), most)
    if excess is not None:
        raise ApiError(
            400,
            f"The body has more than {most[excess]} {excess}; send fewer.",
            code="body_too_large",
        )


def _excess(parts: Iterable[Counter[str]], most: Mapping[str, int]) -> str | None:
    """Return the kind of element that the parts have too many of together; None without."""
    counts = sum(parts, Counter[str]())
    return next((name for name, bound in most.items() if counts[name] > bound), None)


def _counts(text: Bytes, quotes: int) -> Counter[str]:
    """Return upper bounds of a text's elements, by the characters that each of them needs."""
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
        others[others < 0] = -1 - run  # the backslashes before this part, on which it goes on
        # How many backslashes stand before each character.
        runs = places - 1 - np.concatenate(([-1 - run], others[:-1]))
        run = len(text) - 1 - int(others[-1])
        # An odd number makes a quotation mark a part of its string.
        is_end = (text == _QUOTE) & (runs % 2 == 0)
        is_within = np.bitwise_xor.accumulate(is_end.astype(np.uint8)) ^ is_inside
        is_inside = int(is_within[-1])
        yield text[is_within == 0], int(np.count_nonzero(is_end))


# ----------------------------------------------------------------------------------- request limits


SHORT_BODY = 2**16
"""The bytes of a body that is read to its end though its reply has ended."""
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

        def closing(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and not (body.is_whole or is_short(scope)):
                headers = MutableHeaders(scope=message)
                headers["connection"] = "close"  # so that nobody waits for the rest of the body
            return send(message)

        self._requests[key] += 1
        try:
            await self.app(scope, body.receive, closing)
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
    said = dict(scope["headers"]).get(b"content-length", b"0")
    return int(said[:20]) if said.isdigit() else 0


def is_short(scope: Scope) -> bool:
    """Return True for a request with no body, or with one that is read though its reply is out."""
    headers = dict(scope["headers"])
    if b"content-length" in headers:
        return b"expect" not in headers and _said_bytes(scope) <= SHORT_BODY
    return b"transfer-encoding" not in headers


def _is_protobuf(scope: Scope) -> bool:
    """Return True for a body in protobuf."""
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
        self.is_whole = False
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        if self.is_whole:  # then it waits for the client to leave
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
        if self.is_whole and self.size_bytes > LONG_BYTES:  # a shorter one has too few bytes
            parts, self._parts = self._parts, []
            await asyncio.to_thread(check_elements, b"".join(parts), self._limits.most_values)
        return message
