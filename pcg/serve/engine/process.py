"""The client of an engine in another process, and the start of that process.

In the same process, the engine's steps and the event loop would compete for the interpreter lock.
Between two processes, a step's chunks are a single message for the event loop.

Before and after the event loop runs, the caller that waits for an answer reads the messages; while
it runs, the loop reads them. Messages of an iteration of the loop are sent together.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar, cast

import msgspec
import torch

from pcg.errors import DrainingError, EngineError, PcgError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion, VersionName
from pcg.runtime.engine.commands import Close, Command, settled
from pcg.runtime.engine.thread_switching import switching_every
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import EngineState, Health
from pcg.runtime.requests.plain import PlainRequest
from pcg.runtime.requests.request import Request, RequestFields, make_request
from pcg.runtime.requests.stream import Stream, Wakes
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.channel import AtRest, Channel
from pcg.serve.engine.client import SplitAccess
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.engine.messages import (
    AdapterData,
    Added,
    Answer,
    Call,
    Cancel,
    ChunkData,
    Emit,
    Ended,
    Event,
    Failed,
    JobEnd,
    PromptLogprobs,
    Ready,
    Refused,
    Release,
    Removed,
    Report,
    Step,
    Submit,
    ToServer,
    chunk_of,
    decoder,
    encode,
    encoded,
    error_of,
)
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.orders import Drain
from pcg.serve.engine.reports import WatchedNumbers
from pcg.serve.engine.worker import SIGNALS, Launch, run

Result = TypeVar("Result")

_CLOSING_S = 5.0
"""Time for the engine to end after its present step, seconds."""
_ENDING_S = 1.0
"""Longest time for a process to exit after its socket closed, seconds."""
_SWITCH_S = 1e-4
"""Python's thread switch interval in the server: a tokenizing thread must not hold the event loop
for 5 ms."""


# ---------------------------------------------------------------------------------------- adapters


@dataclass(eq=False)
class RemoteAdapter:
    """An adapter in the engine's process.

    Attributes:
        served: its version.
        version: a number that is unique in this process.
    """

    served: AdapterVersion
    size_bytes: int
    prompt_tokens: int
    version: int

    @property
    def name(self) -> str:
        return self.served.name


class RemoteAdapters:
    """The adapters that requests may use, by name.

    A replaced or removed adapter stays in the engine while an object of this process refers to it,
    so that submitted requests use the version that they name.
    """

    def __init__(self) -> None:
        self._released: deque[VersionName] = deque()
        self._here: dict[str, RemoteAdapter] = {}
        self._known: weakref.WeakValueDictionary[VersionName, RemoteAdapter]
        self._known = weakref.WeakValueDictionary()
        self._versions = itertools.count(1)

    @property
    def here(self) -> Mapping[str, RemoteAdapter]:
        return self._here.copy()

    def put(self, data: AdapterData) -> None:
        """Assign an adapter to its name."""
        self._here[data.version.name] = self.known(data)

    def known(self, data: AdapterData) -> RemoteAdapter:
        """Return the adapter of a version."""
        key = data.version.key
        adapter = self._known.get(key)
        if adapter is None:
            number = next(self._versions)
            adapter = RemoteAdapter(data.version, data.size_bytes, data.prompt_tokens, number)
            self._known[key] = adapter
            weakref.finalize(adapter, self._released.append, key).atexit = False
        return adapter

    def remove(self, name: str) -> None:
        """Remove the adapter of a name."""
        self._here.pop(name, None)

    def take_released(self) -> list[VersionName]:
        """Return the versions without any references, each once."""
        names = []
        while self._released:
            names.append(self._released.popleft())
        return names


# ------------------------------------------------------------------------------------------ client


@dataclass
class _Sent:
    """A submitted request, and the logprobs of its prompt once they are received."""

    stream: Stream
    adapter: RemoteAdapter | None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass
class _Called:
    """A call without an answer yet."""

    future: Future[Any]
    kind: Any


@dataclass(frozen=True)
class _Model:
    """The parts of a model that `make_request` uses."""

    tokenizer: Tokenizer | None
    vocabulary: int

    def adapters_of(self, count: int, adapter: Any) -> list[ServedAdapter | None]:
        return [adapter] * count


class ProcessClient:
    """The `EngineClient` of a process that `process_client` started."""

    def __init__(self, channel: Channel, process: SpawnProcess) -> None:
        self._channel = channel
        self._process = process
        self._ended: EngineError | None = None
        self._decode = decoder(ToServer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._unsent: list[bytes] = []
        self._remote = RemoteAdapters()
        self._ready: Ready | Failed | None = None
        self._streams: dict[int, _Sent] = {}
        self._calls: dict[int, _Called] = {}
        self._events: dict[int, Emit] = {}
        self._numbers = itertools.count()
        self._wakes = Wakes()
        self._refusal: DrainingError | None = None
        self._watched = WatchedNumbers(self._post)

    def begin(self) -> None:
        """Wait until the engine runs.

        Raises:
            PcgError: the engine cannot start.
        """
        while self._ready is None and self.ended is None:
            self._hear(waits=True)
        if self._ready is None:
            raise EngineError(
                f"{self.ended} before it had loaded the model; the system may have run out of "
                "memory"
            )
        if isinstance(self._ready, Failed):
            error = error_of(self._ready.fault)
            if isinstance(error, PcgError):
                raise error
            raise EngineError(f"the engine cannot start: {error}")
        self._facts = self._ready.facts
        self._model = _Model(self._ready.tokenizer, self._facts.vocabulary)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._model.tokenizer

    @property
    def ended(self) -> EngineError | None:
        return self._ended

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        return self._remote.here

    def version_of(self, adapter: ServedAdapter) -> AdapterVersion:
        return cast(RemoteAdapter, adapter).served

    def request(
        self, prompt: str | Sequence[int], adapter: ServedAdapter | None, fields: RequestFields
    ) -> Request:
        return make_request(self._model, prompt, adapter, fields)

    def submit(self, request: Request) -> Stream:
        error = self.ended or self._refusal
        if error is not None:
            raise error
        number, adapter = next(self._numbers), cast("RemoteAdapter | None", request.adapter)
        version = None if adapter is None else adapter.served.key
        message = encoded(Submit(number, PlainRequest.of(request, version)))
        stream = Stream(partial(self._cancel, number), request.request_id or None)
        self._streams[number] = _Sent(stream, adapter)
        self._post(message)
        return stream

    def _cancel(self, number: int, _: Stream) -> None:
        self._post(encode(Cancel(number)))

    def call(self, command: Command[Result], emit: Emit | None = None) -> Future[Result]:
        if self.ended is not None:
            future: Future[Result] = Future()
            future.set_exception(self.ended)
            return future
        reply = self._watched.reply(command)
        if reply is not None:
            return settled(lambda: reply)
        if isinstance(command, Drain):
            self._refusal = DrainingError("the engine ends its work and takes nothing new")
        number, future = next(self._numbers), Future()
        future.set_running_or_notify_cancel()
        message = encode(Call(number, msgspec.Raw(encode(command))))
        self._calls[number] = _Called(future, command.reply_type)
        if emit is not None:
            self._events[number] = emit
        self._post(message)
        return future

    def health(self) -> Health:
        if self.ended is not None:
            return Health(EngineState.ENDED, str(self.ended), None)
        state = EngineState.RUNNING if self._refusal is None else EngineState.DRAINING
        return Health(state, None, None)

    def wait(self, future: Future[Result]) -> Result:
        while not future.done():
            self._hear(waits=True)
        return future.result()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive the engine's messages on the running event loop within a `with`."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._loop.add_reader(self._channel.fileno(), self._hear)
        try:
            with switching_every(_SWITCH_S):
                yield
        finally:
            self._loop.remove_reader(self._channel.fileno())
            self._flush()
            self._loop = None

    def close(self) -> None:
        """Let the engine's process end after its step, else kill it. No event loop may run."""
        until = time.monotonic()
        if isinstance(self._ready, Ready):
            self.call(Close())
            until += _CLOSING_S
        while self._ended is None and self._channel.can_read(max(0.0, until - time.monotonic())):
            self._hear(waits=True)
        if self._ended is None:
            self._process.kill()
        self._channel.close()
        self._process.join()
        self._process.close()

    # ------------------------------------------------------------------------------- messages

    def _post(self, message: bytes) -> None:
        """Send a message without blocking, from any thread.

        Release the versions without references before it.
        """
        released = [encode(Release(name)) for name in self._remote.take_released()]
        if self._loop is None or threading.get_ident() != self._thread:
            self._channel.send(*released, message)
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += [*released, message]

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages:
            self._channel.send(*messages)

    def _hear(self, *, waits: bool = False) -> None:
        """Process the received messages."""
        if self._ended is not None:
            return
        received = self._channel.read(waits=waits)
        if received is None:
            self._end(EngineError(f"the engine's process ended{self._cause()}"))
            return
        try:
            messages = [self._decode(message) for message in received]
        except msgspec.MsgspecError as error:
            self._end(EngineError(f"the engine's process sent an invalid message: {error}"))
            return
        last = messages[-1] if messages else None
        self._take(messages)
        if isinstance(last, Ended):
            self._end(EngineError(last.text))

    def _take(self, messages: list[ToServer]) -> None:
        """Process messages, wake the readers of the chunks, then complete the calls."""
        answers: list[Answer] = []
        for message in messages:
            if isinstance(message, Step):
                for data in message.chunks:
                    self._put(data)
            elif isinstance(message, Report):
                self._watched.take(message)
            elif isinstance(message, Refused):
                sent = self._streams.pop(message.number, None)
                if sent is not None:
                    sent.stream.fail(error_of(message.fault))
            elif isinstance(message, Added):
                self._remote.put(message.adapter)
            elif isinstance(message, Removed):
                self._remote.remove(message.name)
            elif isinstance(message, Event):
                is_last = isinstance(message.event, JobEnd)
                emit = (self._events.pop if is_last else self._events.__getitem__)(message.number)
                emit(message.event)
            elif isinstance(message, Ready | Failed):
                self._ready = message
            elif isinstance(message, Answer):
                answers.append(message)
        self._wakes.send()
        for answer in answers:
            self._settle(answer)

    def _settle(self, answer: Answer) -> None:
        """Complete a call with its reply or error."""
        called = self._calls.pop(answer.number)
        try:
            if answer.fault is not None:
                raise error_of(answer.fault)
            if called.kind is ServedAdapter:
                reply: Any = self._remote.known(decoder(AdapterData)(answer.reply))
            else:
                reply = decoder(called.kind)(answer.reply)
        except Exception as error:
            self._events.pop(answer.number, None)
            called.future.set_exception(error)
        else:
            called.future.set_result(reply)

    def _put(self, data: ChunkData) -> None:
        """Add a chunk to its stream."""
        sent = self._streams.get(data.number)
        if sent is None:
            return
        if data.chunk.prompt_logprobs is not None:
            sent.prompt_logprobs = data.chunk.prompt_logprobs
        chunk = chunk_of(data, sent.prompt_logprobs)
        version = chunk.adapter_version
        if sent.adapter is not None and version == sent.adapter.served and version.known_digest:
            sent.adapter.served.learn(version.known_digest)
        if chunk.is_last or chunk.error is not None:
            del self._streams[data.number]
        sent.stream.put(chunk, self._wakes)

    def _end(self, error: EngineError) -> None:
        """Record that the engine has ended, and fail all open requests and calls."""
        self._ended = error
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
        streams, self._streams = self._streams, {}
        for sent in streams.values():
            sent.stream.fail(error)
        calls, self._calls = self._calls, {}
        for called in calls.values():
            called.future.set_exception(error)

    def _cause(self) -> str:
        """Return how the process ended, as the end of a sentence."""
        self._process.join(_ENDING_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return "" if not code else f" with {code}"
        return f" by {signal.Signals(-code).name}"


# ------------------------------------------------------------------------------------------- start


@contextmanager
def process_client(
    load: Callable[[], Executor],
    options: ServeOptions,
    tenants: int,
    split: SplitAccess | None = None,
    *,
    degree: int = 1,
) -> Iterator[ProcessClient]:
    """Load a model in a new process and run its engine there within a `with`.

    Args:
        load: loads the model; it is pickled.
        tenants: number of tenants.
        split: access of split clients to the weights; None without split clients.
        degree: number of ranks that run the model, each in its own process.
    Raises:
        PcgError: the model cannot be loaded, or the engine cannot start.
    """
    ours, theirs = socket.socketpair()
    launch = Launch(load, options, tenants, split, degree, torch.get_num_threads())
    engine = AtRest(partial(run, launch=launch))
    process = get_context("spawn").Process(target=engine, args=(theirs,), name="pcg engine")
    # The process starts with the signals blocked; it ignores them later.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    client = ProcessClient(Channel(ours), process)
    try:
        client.begin()
        yield client
    finally:
        client.close()
