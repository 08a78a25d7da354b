"""Server-sent events, and clients that leave.

A stream ends in `data: [DONE]`. What fails after its first event is an event {"error": …}, as
OpenAI's clients expect. A client that leaves, or does not read for `timeout_s`, ends its requests,
so that their pages are free after the engine's next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.errors import LOG, ApiError, as_api_error
from pcg.serve.json_bytes import json_bytes
from pcg.serve.service import Submitted

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    """Return one event without a name."""
    return b"data: " + json_bytes(content) + b"\n\n"


class EventStream(Response):
    """A reply that is sent event by event.

    Args:
        parts: bytes to send, each at once; they have one event or several.
        leave: what to do when the client leaves.
        timeout_s: the most time that a part may take to send, seconds.
        headers: further ones.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        leave: Callable[[], None],
        timeout_s: float,
        headers: Mapping[str, str],
    ) -> None:
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**fixed, **headers})
        del self.headers["content-length"]
        self._parts = parts
        self._leave = leave
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_until_left(receive, self._leave))
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async for part in self._parts:
                async with asyncio.timeout(self._timeout_s):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # Without its end the server closes the connection.
            LOG.warning("a client did not read its stream for %s s", self._timeout_s)
        finally:
            watch.cancel()
            self._leave()


async def _until_left(receive: Receive, leave: Callable[[], None]) -> None:
    """Wait until the client leaves; then do what is to be done."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


def cancel_all(submitted: Iterable[Submitted]) -> None:
    """End requests, from the engine's next step on."""
    for one in submitted:
        one.stream.cancel()


async def all_completions(
    request: Request, submitted: Sequence[Submitted]
) -> list[list[Completion]]:
    """Wait for the continuations of all prompts; a client that leaves ends them.

    Raises:
        ApiError: 503, the server gave a request up.
        PcgError: why one could not go on.
    """
    watch = asyncio.create_task(_until_left(request.receive, partial(cancel_all, submitted)))
    try:
        found = await asyncio.gather(*(one.stream.completions() for one in submitted))
    finally:
        watch.cancel()
        cancel_all(submitted)
    for completion in (one for group in found for one in group):
        check_ended(completion)
    return found


def check_ended(completion: Completion) -> None:
    """Raise an ApiError for a completion that was given up."""
    if completion.finish_reason not in ("stop", "length"):
        raise ApiError(503, "The server gave the request up.", code=completion.finish_reason)


async def begun(
    request: Request, submitted: Sequence[Submitted]
) -> AsyncIterator[tuple[int, list[Chunk]]]:
    """Wait for the first chunks of requests, and return an iterator over all of them.

    What the engine refuses is so told by a status, and not within a stream.

    Raises:
        PcgError: why a request could not begin.
    """
    chunks = _chunks(submitted)
    watch = asyncio.create_task(_until_left(request.receive, partial(cancel_all, submitted)))
    try:
        first = await anext(chunks)
    except BaseException:
        cancel_all(submitted)
        raise
    finally:
        watch.cancel()
    return _behind(first, chunks)


async def _behind(
    first: tuple[int, list[Chunk]], chunks: AsyncGenerator[tuple[int, list[Chunk]]]
) -> AsyncIterator[tuple[int, list[Chunk]]]:
    async with aclosing(chunks):
        yield first
        async for found in chunks:
            yield found


async def _chunks(submitted: Sequence[Submitted]) -> AsyncGenerator[tuple[int, list[Chunk]]]:
    """Yield the chunks of requests as they come, each with the place of its request."""
    if len(submitted) == 1:
        while found := await submitted[0].stream.next_chunks():
            yield 0, found
        return
    waiting = {
        asyncio.create_task(one.stream.next_chunks()): place for place, one in enumerate(submitted)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                if found := task.result():
                    again = asyncio.create_task(submitted[place].stream.next_chunks())
                    waiting[again] = place
                    yield place, found
    finally:
        for task in waiting:
            task.cancel()


async def guarded(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Send parts and the end of the stream; what fails is the last event before it."""
    try:
        async for part in parts:
            yield part
    except Exception as error:
        yield event(as_api_error(error).content)
    yield DONE
