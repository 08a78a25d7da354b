"""Middleware around every request: its id, its record, and the server's own `send`.

`RequestId` gives every reply an x-request-id, the client's own if it sent a proper one. The engine
never sees it: the server makes the engine's ids, so that no client meets another's.

`Recording` makes a record of one request over HTTP, from its first byte to the end of its reply.
`Service.submit` notes the engine's requests in it, and observers, such as the access log, receive
it when the reply and those requests have ended. It contains no text of a request.

`DirectSend` keeps the server's `send` for the middle parts of streamed replies. They would pass
through every middleware, six coroutines a token, which read the beginning and the end alone.
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
    """ASGI middleware that gives every reply an id, and answers errors beyond the routes."""

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

        def with_id(message: Message) -> Awaitable[None]:  # no coroutine of its own for each part
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith(MESSAGES):
                    headers["request-id"] = request_id  # where Anthropic's client looks
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
    """ASGI middleware, the first to see a request, which keeps the server's `send`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})[_KEY] = send
        await self.app(scope, receive, send)


def direct_send(scope: Scope, send: Send) -> Send:
    """Return the server's `send` of a request; the given one where none was kept."""
    kept: Send = scope.get("state", {}).get(_KEY, send)
    return kept


# ------------------------------------------------------------------------------------------- record


QUIET = ("/", "/health", "/metrics", "/ping", "/status")
"""Routes that clients poll: observers get their errors alone."""

LEFT = 499
"""The status of a request whose client left before the end of its reply, as nginx has it."""

_END_S = 5.0
"""The most time that a record waits for requests that a client left, seconds."""


@dataclass
class Record:
    """One request over HTTP.

    Attributes:
        scope: what the server knows of it: its method, route, headers and caller.
        came_s: when it came, Unix seconds; `began_s`, of the monotonic clock.
        model: the name of the model that it asked for; None if it did not come so far.
        requests: the engine's requests, with their outputs.
        status: the status of the reply; `LEFT` if the client left before its end.
        first_byte_s, ended_s: when the reply's body began and ended, of the monotonic clock.
        has_left: True if the client left, or its reply was sent.
        is_whole: True if the reply was sent to its end before the client left.
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
        """The route's path, with names in braces for its parameters; None for no route."""
        path: str | None = getattr(self.scope.get("route"), "path", None)
        return path

    @property
    def completions(self) -> list[Completion]:
        return [completion for _, stream in self.requests for completion in stream.ended]

    @property
    def version(self) -> AdapterVersion | None:
        """The version of the adapter that answered; None without one."""
        return next((completion.adapter_version for completion in self.completions), None)

    @property
    def queued_s(self) -> float | None:
        """The longest time in the queue, seconds; None where nothing was admitted."""
        times = [completion.queued_s for completion in self.completions]
        return max((time_s for time_s in times if time_s is not None), default=None)

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompts, and of the outputs."""
        outputs = sum(len(completion.token_ids) for completion in self.completions)
        return sum(len(request.prompt_ids) for request, _ in self.requests), outputs

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its coming to the first token of any prompt; None without."""
        times = [stream.first_chunk_s for _, stream in self.requests]
        first_s = min((time_s for time_s in times if time_s is not None), default=None)
        return None if first_s is None else first_s - self.began_s


class Observer(Protocol):
    """A receiver of the records of requests."""

    def observe(self, record: Record) -> None:
        """Take the record of a finished request, without waiting."""

    def close(self) -> None:
        """Write what is left, and end."""


_CURRENT: ContextVar[Record | None] = ContextVar("record", default=None)


def note_requests(model: str, requests: Sequence[tuple[Request, Stream]]) -> None:
    """Note the engine's requests in the record of the HTTP request that is handled now, if any."""
    record = _CURRENT.get()
    if record is not None:
        record.model = model
        record.requests += requests


class Recording:
    """ASGI middleware that makes a record of every request, for the observers."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self.app = app
        self._observers = tuple(observers)
        self._waiting: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = Record(scope)

        def noting(message: Message) -> Awaitable[None]:  # no coroutine of its own for each part
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
            self._tell(record)
            return
        task = asyncio.create_task(self._tell_later(record))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _tell_later(self, record: Record) -> None:
        with contextlib.suppress(Exception):  # refused and failed requests have no completions
            async with asyncio.timeout(_END_S):
                for _, stream in record.requests:
                    await stream.completions()
        self._tell(record)

    def _tell(self, record: Record) -> None:
        for observer in self._observers:
            try:
                observer.observe(record)
            except Exception:  # the reply has been sent, and others go on
                LOG.exception("a request could not be noted")
