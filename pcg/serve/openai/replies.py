"""Replies to requests for the output of a model, whole or as a stream.

A stream consists of server-sent events and ends in `data: [DONE]`. An error after the first event
is an event {"error": …}, as OpenAI's clients expect. If a client disconnects, or does not read for
`timeout_s`, its requests are cancelled, and their pages are free after the engine's next step.

The work for a token runs between two steps of the engine and holds the interpreter lock, so it is
small: a single task per stream, a single part for all events of a step, and middleware only for the
first and last part.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pcg.keys import Scope as KeyScope
from pcg.runtime.engine.commands import Numbers
from pcg.runtime.requests.request import Chunk, Completion, RequestFields
from pcg.serve.adapters.catalog import Catalog, ServedModel
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import LOG, ApiError, as_api_error
from pcg.serve.http.middleware import direct_send
from pcg.serve.http.service import Prompt, Service, ServiceDependency, Submitted, part
from pcg.serve.http.wire import json_bytes
from pcg.serve.metrics.engine_metrics import ASKED, load_headers
from pcg.serve.openai.logprobs import LogprobWriter, TokenTexts
from pcg.serve.openai.sampling import GenerationConfig, SamplingBody, SamplingDefaults
from pcg.serve.openai.tool_formats import ArgumentsPiece, CallPiece, TextPiece
from pcg.serve.openai.tools import MessageReader, ToolUse
from pcg.serve.openai.wire import FieldNames, StreamOptions

DONE = b"data: [DONE]\n\n"
STREAMED = {
    "description": "With `stream`: server-sent events, each a part of a reply.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
"""Description of a route's stream in /openapi.json."""
_EARLY_S = 0.005
"""Tolerance for event loops that run a timer early, seconds."""


def event(content: object) -> bytes:
    """Return an event without a name."""
    return b"data: " + json_bytes(content) + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """Return an event with its type as its name."""
    return b"event: %s\ndata: %s\n\n" % (content["type"].encode(), json_bytes(content))


class PromptTokensDetails(BaseModel):
    """Prompt tokens from the KV cache."""

    cached_tokens: int


class Usage(BaseModel):
    """The tokens of a reply; a prompt counts once for all its continuations."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def check_ended(completion: Completion) -> None:
    """Raise an ApiError for a completion that the engine cancelled."""
    if completion.finish_reason not in ("stop", "length"):
        raise ApiError(503, "The server cancelled the request.", code=completion.finish_reason)


class Reply(ABC):
    """Writes the reply to requests in an API's format, whole or as events of chunks.

    Attributes:
        submitted: the requests, one for each prompt.
        repeats_output: True if the last events repeat the whole output.
        output_tokens: number of tokens in the chunks so far.
        cached_tokens: prompt tokens from the KV cache, by the prompt's index.
    """

    repeats_output = False

    def __init__(self, submitted: Sequence[Submitted]) -> None:
        self.submitted = submitted
        self.prompt_tokens = sum(len(each.request.prompt_ids) for each in submitted)
        self.output_tokens = 0
        self.cached_tokens: dict[int, int] = {}

    @abstractmethod
    def whole(self, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """Return the whole reply from the continuations of each prompt."""

    def begin(self) -> bytes:
        """Return the events before the first chunk's."""
        return b""

    def step(self, index: int, chunks: Sequence[Chunk]) -> bytes:
        """Return the events of a step's chunks of the request with this index."""
        events = []
        for chunk in chunks:
            if chunk.token_id is not None:
                self.output_tokens += 1
            if chunk.completion is not None:
                check_ended(chunk.completion)
                self.cached_tokens[index] = chunk.completion.cached_tokens
            events.append(self.events(index, chunk))
        return b"".join(events)

    @abstractmethod
    def events(self, index: int, chunk: Chunk) -> bytes:
        """Return the events of a chunk, which has been counted."""

    def end(self) -> bytes:
        """Return the events after the last chunk's."""
        return DONE

    def failed(self, error: Exception) -> bytes:
        """Return the final events of a failed stream."""
        return event(as_api_error(error).content) + DONE

    def usage(self, groups: Sequence[Sequence[Completion]] | None = None) -> dict[str, Any]:
        """Return the usage of completions, or of the chunks so far."""
        prompt, output, cached = (
            self.prompt_tokens,
            self.output_tokens,
            sum(self.cached_tokens.values()),
        )
        if groups is not None:
            prompt = sum(group[0].prompt_tokens for group in groups)
            cached = sum(group[0].cached_tokens for group in groups)
            output = sum(len(each.token_ids) for group in groups for each in group)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class ItemReply(Reply):
    """Writes an output as items of text and of calls; each starts, grows and ends by events.

    Attributes:
        items: the started items; the last may grow.
    """

    def __init__(self, submitted: Sequence[Submitted], use: ToolUse) -> None:
        super().__init__(submitted)
        self.items: list[dict[str, Any]] = []
        self.use = use
        self.reader = MessageReader(use)
        self._events: list[dict[str, Any]] = []
        self._is_open = False

    def read(self, text: str, status: str | None) -> list[dict[str, Any]]:
        """Add text; return its events.

        Args:
            status: status of the last item, with the last text; None before.
        """
        self._events = []
        for piece in self.reader.push(text, is_last=status is not None):
            match piece:
                case TextPiece():
                    if not (self._is_open and self.items[-1]["type"] in ("text", "message")):
                        self.begin_item(self.text_item())
                    self.add_text(self.items[-1], piece.text)
                case CallPiece():
                    self.begin_item(self.call_item(piece.name))
                case ArgumentsPiece():
                    self.add_arguments(self.items[-1], piece.text)
        if status is not None:
            self.finish(status)
        return self._events

    def finish(self, status: str) -> None:
        """End the output, and its last item with a status."""
        self._close_item(status)

    def begin_item(self, item: dict[str, Any]) -> None:
        self._close_item("completed")
        self._is_open = True
        self.items.append(item)
        self.begun(item)

    def _close_item(self, status: str) -> None:
        if self._is_open:
            self._is_open = False
            self.ended(self.items[-1], status)

    def emit(self, kind: str, **fields: object) -> None:
        self._events.append({"type": kind, **fields})

    @abstractmethod
    def text_item(self) -> dict[str, Any]: ...

    @abstractmethod
    def call_item(self, name: str) -> dict[str, Any]: ...

    @abstractmethod
    def begun(self, item: dict[str, Any]) -> None: ...

    @abstractmethod
    def add_text(self, item: dict[str, Any], text: str) -> None: ...

    @abstractmethod
    def add_arguments(self, item: dict[str, Any], text: str) -> None: ...

    @abstractmethod
    def ended(self, item: dict[str, Any], status: str) -> None: ...


class Chunks:
    """The chunks of requests as they arrive, those of a step together."""

    def __init__(self, submitted: Sequence[Submitted]) -> None:
        self._submitted = submitted
        self._merged = None if len(submitted) == 1 else self._merge()
        self._first: tuple[int, list[Chunk]] | None = None

    def cancel(self) -> None:
        """Cancel the requests; they end at the engine's next step."""
        for each in self._submitted:
            each.stream.cancel()

    async def begin(self) -> None:
        self._first = await self.next()

    async def next(self) -> tuple[int, list[Chunk]] | None:
        """Return the next chunks of a request, with its index; None after the last chunks."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._merged is not None:
            return await anext(self._merged, None)
        chunks = await self._submitted[0].stream.next_chunks()
        return (0, chunks) if chunks else None

    async def _merge(self) -> AsyncGenerator[tuple[int, list[Chunk]]]:
        streams = [each.stream for each in self._submitted]
        waiting = {asyncio.create_task(s.next_chunks()): index for index, s in enumerate(streams)}
        try:
            while waiting:
                ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in ready:
                    index = waiting.pop(task)
                    if chunks := task.result():
                        waiting[asyncio.create_task(streams[index].next_chunks())] = index
                        yield index, chunks
        finally:
            for task in waiting:
                task.cancel()


@dataclass(frozen=True)
class Sending:
    """Functions and limits for sending a stream.

    Attributes:
        on_thread: runs a function on a thread, for parts as long as a prompt or a whole output.
        named: rewrites an error with the client's field names.
        timeout_s: the most time to send a part, seconds.
    """

    on_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]]
    named: Callable[[Exception], Exception]
    timeout_s: float


class EventStream(Response):
    """A reply that is sent event by event, those of a step together.

    Args:
        chunks: the chunks, which are cancelled when the client disconnects.
        reply: writes the events.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: Chunks, reply: Reply, sending: Sending, headers: Mapping[str, str]
    ) -> None:
        fixed = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**fixed, **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._reply = reply
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
            # The server closes a connection with an incomplete reply.
            unread.task.uncancel()
            LOG.warning("a client did not read its stream for %s s", self._sending.timeout_s)
        finally:
            unread.close()
            watch.cancel()
            self._chunks.cancel()

    async def _send(self, send: Send, direct: Send, unread: _Unread) -> None:
        """Send the body: its first and last parts through all middleware, the others directly."""
        part, is_last, send_part = self._reply.begin(), False, send
        while not is_last:
            try:
                step = await self._chunks.next()
                is_last = step is None
                part += self._reply.end() if step is None else await self._step(*step)
            except Exception as error:
                part, is_last = part + self._reply.failed(self._sending.named(error)), True
            if part or is_last:
                message = {"type": "http.response.body", "body": part, "more_body": not is_last}
                unread.since_s = unread.loop.time()
                await (send if is_last else send_part)(message)
                unread.since_s = None
                part, send_part = b"", direct

    async def _step(self, index: int, chunks: Sequence[Chunk]) -> bytes:
        for chunk in chunks:
            is_whole = self._reply.repeats_output and chunk.completion is not None
            if chunk.prompt_logprobs or is_whole:  # as long as the prompt or the output
                return await self._sending.on_thread(partial(self._reply.step, index, chunks))
        return self._reply.step(index, chunks)


class _Unread:
    """Cancels its task when a part of the reply takes too long to send, with a single timer.

    Attributes:
        since_s: start of sending the present part, on the loop's clock; None between parts.
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
        self._timer.cancel()


async def _until_left(receive: Receive, leave: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


class CallBody(Protocol):
    """The body of a call."""

    model: str | None

    def names(self) -> FieldNames: ...


@dataclass(frozen=True)
class Call:
    """An HTTP request for the output of a model.

    Attributes:
        model: the model that the body names.
        names: the client's names of fields, for errors.
    """

    service: Service
    request: Request
    caller: Caller
    model: ServedModel
    names: FieldNames

    async def of(self, body: CallBody) -> Call:
        """Return the call of a body with its model, by default the base.

        ApiError: the caller has no model with the name.
        """
        model = self.model
        if body.model is not None:
            model = await self.service.part(Catalog).find(self.caller, body.model)
        return replace(self, model=model, names=body.names())

    @property
    def defaults(self) -> SamplingDefaults:
        return self.service.part(GenerationConfig).defaults

    def logprobs(self, as_ids: bool | None) -> LogprobWriter:
        """Return a writer of logprobs, with token ids in place of texts if `as_ids`."""
        return LogprobWriter(self.service.part(TokenTexts), bool(as_ids))

    async def submit(
        self,
        prompts: Sequence[Prompt],
        fields: RequestFields,
        reply_id: str,
        *,
        repeats_ids: bool = False,
    ) -> list[Submitted]:
        with self.names.naming():
            return await self.service.submit(
                self.caller, self.model, prompts, fields, reply_id, repeats_ids=repeats_ids
            )

    async def answer(
        self, submitted: Sequence[Submitted], reply: Reply, *, streams: bool | None
    ) -> Response:
        """Return the reply to requests: a stream after its first chunks, or the whole reply.

        Raises:
            ApiError: 503, the engine cancelled a request.
            PcgError: the engine refuses a request.
        """
        if not streams:
            groups = await self.completions(submitted)
            return await self.whole(lambda: json_bytes(reply.whole(groups)))
        chunks = Chunks(submitted)
        watch = asyncio.create_task(_until_left(self.request.receive, chunks.cancel))
        try:
            with self.names.naming():
                await chunks.begin()
        except BaseException:
            chunks.cancel()
            raise
        finally:
            watch.cancel()
        timeout_s = self.service.options.stream_timeout_s
        sending = Sending(self.on_thread, self.names.named, timeout_s)
        return EventStream(chunks, reply, sending, await self._headers())

    async def completions(self, submitted: Sequence[Submitted]) -> list[list[Completion]]:
        """Wait for the continuations of all prompts; cancel them if the client disconnects.

        Raises:
            ApiError: 503, the engine cancelled a request.
            PcgError: the engine refuses a request.
        """
        chunks = Chunks(submitted)
        watch = asyncio.create_task(_until_left(self.request.receive, chunks.cancel))
        try:
            with self.names.naming():
                groups = await asyncio.gather(*(each.stream.completions() for each in submitted))
                for group in groups:
                    for completion in group:
                        check_ended(completion)
        finally:
            watch.cancel()
            chunks.cancel()
        return groups

    async def whole(self, write: Callable[[], bytes]) -> Response:
        """Return a whole reply, which is written on a thread."""
        content = await self.on_thread(write)
        return Response(content, headers=await self._headers(), media_type="application/json")

    async def on_thread(self, write: Callable[[], bytes]) -> bytes:
        return await self.service.beside(self.caller, write)

    async def _headers(self) -> dict[str, str]:
        """Return headers with the adapter's version, and the load on request."""
        format = self.request.headers.get(ASKED)
        if format is None or not self.service.shows_engine(self.caller):
            return self.model.headers
        numbers = await asyncio.wrap_future(self.service.client.call(Numbers()))
        return {**self.model.headers, **load_headers(format, numbers)}


async def _call(
    request: Request,
    service: ServiceDependency,
    catalog: Annotated[Catalog, part(Catalog)],
    caller: Annotated[Caller, Depends(requires(KeyScope.INFER))],
) -> Call:
    return Call(service, request, caller, model=catalog.base, names=FieldNames())


CallDependency = Annotated[Call, Depends(_call)]
"""Parameter type of routes: a call of the base; see `Call.of`."""


class ChoiceReply(Reply):
    """Writes a reply of choices, as in OpenAI's completions and chats.

    Args:
        kind: object type of the reply.
        reply_id: id of the reply; the request may replace the part after the prefix.
    Attributes:
        head: the fields at the start of a reply and of all its events.
        logprobs: writes the logprobs.
        has_token_ids: True if the request asks for token ids.
        has_prompt_logprobs: True if the request asks for vLLM's logprobs of prompt tokens.
        has_usage: True for the usage in a stream's last event.
        has_running_usage: True for the usage in every event.
    """

    def __init__(
        self,
        call: Call,
        submitted: Sequence[Submitted],
        body: SamplingBody,
        options: StreamOptions | None,
        *,
        kind: str,
        reply_id: str,
    ) -> None:
        super().__init__(submitted)
        prefix, _, _ = reply_id.partition("-")
        self.head: dict[str, Any] = {
            "id": f"{prefix}-{body.request_id}" if body.request_id else reply_id,
            "object": kind,
            "created": int(time.time()),
            "model": call.model.name,
            "system_fingerprint": call.model.fingerprint,
            "choices": [],
        }
        options = options or StreamOptions()
        self.logprobs = call.logprobs(body.return_tokens_as_token_ids)
        self.has_token_ids = bool(body.return_token_ids)
        self.has_prompt_logprobs = body.prompt_logprobs is not None
        self.has_usage = bool(options.include_usage)
        self.has_running_usage = self.has_usage and bool(options.continuous_usage_stats)

    def end(self) -> bytes:
        usage = event({**self.head, "usage": self.usage()}) if self.has_usage else b""
        return usage + DONE
