"""Middleware around every request: its id, its record, and the server's own `send`.

`RequestId` gives every reply an x-request-id: the client's, if valid, else a new id. The engine
uses the server's own ids, so ids of two clients cannot collide.

`Recording` creates a record of each HTTP request, from its first byte to the end of its reply.
`Service.submit` adds the engine's requests. Observers, such as the access log, receive the record
when the reply and those requests have ended. It contains no text of a request.

`DirectSend` keeps the server's `send` for the middle parts of streamed replies. The other
middleware would cost six coroutines a token and needs only the start and the end of a reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.requests.request import Completion, Request
from pcg.runtime.requests.stream import Stream
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import LOG, MESSAGES, as_api_error
from pcg.serve.http.wire import new_id

# --------------------------------------------------------------------------------------- request id


_PROPER = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """ASGI middleware that adds a request id and answers errors raised outside the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _PROPER.fullmatch(sent) else new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        def with_id(message: Message) -> Awaitable[None]:  # saves a coroutine per part
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith(MESSAGES):
                    headers["request-id"] = request_id  # the name that Anthropic's client reads
            return send(message)

        try:
            await self.app(scope, receive, with_id)
        except Exception as error:
            if has_begun:
                LOG.log(logging.ERROR, "a reply broke off", exc_info=error)
                raise
            await as_api_error(error).response(scope["path"])(scope, receive, with_id)


# -------------------------------------------------------------------------------------- direct send


_KEY = "direct_send"


class DirectSend:
    """The outermost ASGI middleware, which keeps the server's `send`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})[_KEY] = send
        await self.app(scope, receive, send)


def direct_send(scope: Scope, send: Send) -> Send:
    """Return the server's `send` of a request; the argument if none was kept."""
    kept: Send = scope.get("state", {}).get(_KEY, send)
    return kept


# ------------------------------------------------------------------------------------------- record


QUIET = ("/", "/health", "/metrics", "/ping", "/status")
"""Routes that clients poll: observers receive only their errors."""

LEFT = 499
"""nginx's status of a request whose client disconnected before the end of its reply."""

_END_S = 5.0
"""Longest time that a record waits for the requests of a disconnected client, seconds."""


@dataclass
class Record:
    """A request over HTTP.

    Attributes:
        scope: ASGI scope: method, route, headers and caller.
        came_s: arrival, Unix seconds.
        began_s: arrival, on the monotonic clock.
        model: name of the requested model; None if the request failed earlier.
        requests: the engine's requests, with their outputs.
        status: status of the reply; `LEFT` if the client disconnected before its end.
        first_byte_s, ended_s: start and end of the reply's body, on the monotonic clock.
        has_left: True if the client disconnected, or the whole reply was sent.
        is_whole: True if the whole reply was sent before the client disconnected.
    """

    scope: Scope
    came_s: float = field(default_factory=time.time)
    began_s: float = field(default_factory=time.monotonic)
    model: str | None = None
    requests: list[tuple[Request, Stream]] = field(default_factory=list)
    status: int = 0
    first_byte_s: float | None = None
    ended_s: float = 0.0
    has_left: bool = False
    is_whole: bool = False

    @property
    def request_id(self) -> str:
        return str(self.scope.get("state", {}).get("request_id", ""))

    @property
    def caller(self) -> Caller | None:
        """The caller; None without a key."""
        caller: Caller | None = self.scope.get("state", {}).get("caller")
        return caller

    @property
    def route(self) -> str | None:
        """The route's path, with parameter names in braces; None without a route."""
        path: str | None = getattr(self.scope.get("route"), "path", None)
        return path

    @property
    def completions(self) -> list[Completion]:
        return [completion for _, stream in self.requests for completion in stream.ended]

    @property
    def version(self) -> AdapterVersion | None:
        """The version of the adapter in the replies; None without an adapter."""
        return next((completion.adapter_version for completion in self.completions), None)

    @property
    def queued_s(self) -> float | None:
        """The longest time in the queue, seconds; None if nothing was admitted."""
        times = [completion.queued_s for completion in self.completions]
        return max((time_s for time_s in times if time_s is not None), default=None)

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompts, and of the outputs."""
        outputs = sum(len(completion.token_ids) for completion in self.completions)
        return sum(len(request.prompt_ids) for request, _ in self.requests), outputs

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token of any prompt; None without a token."""
        times = [stream.first_chunk_s for _, stream in self.requests]
        first_s = min((time_s for time_s in times if time_s is not None), default=None)
        return None if first_s is None else first_s - self.began_s


class Observer(Protocol):
    """A receiver of the records of requests."""

    def observe(self, record: Record) -> None:
        """Process the record of a finished request without blocking."""

    def close(self) -> None:
        """Write the remaining records, and end."""


_CURRENT: ContextVar[Record | None] = ContextVar("record", default=None)


def note_requests(model: str, requests: Sequence[tuple[Request, Stream]]) -> None:
    """Add the engine's requests to the record of the current HTTP request, if any."""
    record = _CURRENT.get()
    if record is not None:
        record.model = model
        record.requests += requests


class Recording:
    """ASGI middleware that creates a record of every request, for the observers."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self.app = app
        self._observers = tuple(observers)
        self._waiting: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = Record(scope)

        def noting(message: Message) -> Awaitable[None]:  # saves a coroutine per part
            if message["type"] == "http.response.start":
                record.status = message["status"]
            else:
                if record.first_byte_s is None:
                    record.first_byte_s = time.monotonic()
                record.is_whole = not (message.get("more_body", False) or record.has_left)
            return send(message)

        async def hearing() -> Message:
            message = await receive()
            record.has_left = record.has_left or message["type"] == "http.disconnect"
            return message

        token = _CURRENT.set(record)
        try:
            await self.app(scope, hearing, noting)
        finally:
            _CURRENT.reset(token)
            record.ended_s = time.monotonic()
            if record.has_left and not record.is_whole:
                record.status = LEFT
            if record.route not in QUIET or record.status >= 400:
                self._end(record)

    def _end(self, record: Record) -> None:
        if all(stream.is_over for _, stream in record.requests):
            self._notify(record)
            return
        task = asyncio.create_task(self._notify_later(record))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _notify_later(self, record: Record) -> None:
        with contextlib.suppress(Exception):  # refused and failed requests have no completions
            async with asyncio.timeout(_END_S):
                for _, stream in record.requests:
                    await stream.completions()
        self._notify(record)

    def _notify(self, record: Record) -> None:
        for observer in self._observers:
            try:
                observer.observe(record)
            except Exception:  # the reply has been sent; the other observers continue
                LOG.exception("a request could not be recorded")
