"""Server-sent events, and clients that leave.

A stream ends in `data: [DONE]`. What fails after its first event is an event {"error": …}, as
OpenAI's clients expect. A client that leaves, or does not read for `timeout_s`, ends its requests,
so that their pages are free after the engine's next step.

All that happens for each token happens between two steps' work for the interpreter's lock, so there
is little of it: one task, one part of the reply, and no middleware but at the ends of the reply.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pcg.runtime.requests.request import Chunk, Completion
from pcg.serve.http.errors import LOG, ApiError, as_api_error
from pcg.serve.http.middleware import direct_send
from pcg.serve.http.service import Submitted
from pcg.serve.http.wire import json_bytes

DONE = b"data: [DONE]\n\n"
_EARLY_S = 0.005
"""An event loop's clock may be so much behind when it calls."""


def event(content: object) -> bytes:
    """Return one event without a name."""
    return b"data: " + json_bytes(content) + b"\n\n"


class Events(ABC):
    """Writes the events of a stream.

    Attributes:
        repeats_output: True if the last events have all of the output again.
    """

    repeats_output = False

    def begin(self) -> bytes:
        """Return the events before those of chunks."""
        return b""

    @abstractmethod
    def step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        """Return the events of one step's chunks.

        Args:
            place: that of their request.
        """

    def end(self) -> bytes:
        """Return the events after those of the last chunks."""
        return DONE

    def failed(self, error: Exception) -> bytes:
        """Return the events of an error, which are the last ones."""
        return event(as_api_error(error).content) + DONE


@dataclass(frozen=True)
class Sending:
    """The ways of a stream.

    Attributes:
        beside: runs a function beside the event loop: what is asked of a prompt takes long, and so
            does a whole output.
        named: returns an error in the client's words.
        timeout_s: the most time that a part may take to send, seconds.
    """

    beside: Callable[[Callable[[], bytes]], Awaitable[bytes]]
    named: Callable[[Exception], Exception]
    timeout_s: float


class EventStream(Response):
    """A reply that is sent event by event, those of a step together.

    Args:
        chunks: what comes; it is cancelled when the client leaves.
        events: writes them.
        headers: further ones.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Chunks,
        events: Events,
        sending: Sending,
        headers: Mapping[str, str],
    ) -> None:
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**fixed, **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._events = events
        self._sending = sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_until_left(receive, self._chunks.cancel))
        unread = _Unread(self._sending.timeout_s)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, direct_send(scope, send), unread)
        except asyncio.CancelledError:
            if not unread.has_ended:
                raise
            # Without its end the server closes the connection.
            unread.task.uncancel()
            LOG.warning("a client did not read its stream for %s s", self._sending.timeout_s)
        finally:
            unread.close()
            watch.cancel()
            self._chunks.cancel()

    async def _send(self, send: Send, direct: Send, unread: _Unread) -> None:
        """Send the body: its first and last parts through all middleware, those between without."""
        part, is_last, begun = self._events.begin(), False, send
        while not is_last:
            try:
                found = await self._chunks.next()
                is_last = found is None
                part += self._events.end() if found is None else await self._step(*found)
            except Exception as error:
                failed = self._events.failed(self._sending.named(error))
                part, is_last = part + failed, True
            if part or is_last:
                message = {"type": "http.response.body", "body": part, "more_body": not is_last}
                unread.since_s = unread.loop.time()
                await (send if is_last else begun)(message)
                unread.since_s = None
                part, begun = b"", direct

    async def _step(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        for chunk in chunks:
            is_whole = self._events.repeats_output and chunk.completion is not None
            if chunk.prompt_logprobs or is_whole:  # as long as the prompt is, or the output
                return await self._sending.beside(partial(self._events.step, place, chunks))
        return self._events.step(place, chunks)


class _Unread:
    """Cancels its task when a part of the reply takes too long to send, and is no part's own timer.

    Attributes:
        since_s: when the part under way was given to send, on the loop's clock; None between two.
        has_ended: True once the task was cancelled.
    """

    def __init__(self, timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.loop = asyncio.get_running_loop()
        self.since_s: float | None = None
        self.has_ended = False
        self._timeout_s = timeout_s
        self._timer = self.loop.call_later(timeout_s, self._check)

    def _check(self) -> None:
        now_s = self.loop.time()
        since_s = now_s if self.since_s is None else self.since_s
        if now_s - since_s >= self._timeout_s - _EARLY_S:
            self.has_ended = True
            self.task.cancel()
        else:
            self._timer = self.loop.call_at(since_s + self._timeout_s, self._check)

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()


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


async def begun(request: Request, submitted: Sequence[Submitted]) -> Chunks:
    """Wait for the first chunks of requests, and return all of them.

    What the engine refuses is so told by a status, and not within a stream.

    Raises:
        PcgError: why a request could not begin.
    """
    chunks = Chunks(submitted)
    watch = asyncio.create_task(_until_left(request.receive, chunks.cancel))
    try:
        await chunks.begin()
    except BaseException:
        chunks.cancel()
        raise
    finally:
        watch.cancel()
    return chunks


class Chunks:
    """The chunks of requests as they come, those of a step together."""

    def __init__(self, submitted: Sequence[Submitted]) -> None:
        self._submitted = submitted
        self._merged = None if len(submitted) == 1 else _merged(submitted)
        self._first: tuple[int, list[Chunk]] | None = None

    def cancel(self) -> None:
        """End the requests, from the engine's next step on."""
        cancel_all(self._submitted)

    async def begin(self) -> None:
        """Wait for the first ones, and keep them."""
        self._first = await self.next()

    async def next(self) -> tuple[int, list[Chunk]] | None:
        """Return the next ones of a request, with its place; None after the last ones."""
        if self._first is not None:
            found, self._first = self._first, None
            return found
        if self._merged is not None:
            return await anext(self._merged, None)
        chunks = await self._submitted[0].stream.next_chunks()
        return (0, chunks) if chunks else None


async def _merged(submitted: Sequence[Submitted]) -> AsyncGenerator[tuple[int, list[Chunk]]]:
    """Yield the chunks of several requests as they come, each with the place of its request."""
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
