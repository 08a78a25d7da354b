"""The client of an engine in a process of its own.

In one process the engine's steps and the event loop take turns at the interpreter's lock. In two
they do not: a step's chunks come in one message, which the event loop reads.

The start of an engine's process, which imports nothing before the garbage collector rests.

Next to nothing of what is imported, traced and loaded becomes garbage; going through all of it
again and again took a fifth of the processor time of a start (`benchmarks/bench_startup.py`).
"""

from __future__ import annotations

import gc
import itertools
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from pcg.errors import DrainingError, EngineError, PcgError
from pcg.keys import Keys
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import AdapterStatus, EngineNumbers, EngineState, Health, JobStatus
from pcg.runtime.requests.request import Request, RequestFields, make_request
from pcg.runtime.requests.stream import Stream, Wakes
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.channel import Channel
from pcg.serve.engine.client import EngineStatus
from pcg.serve.engine.connection import Connection
from pcg.serve.engine.facts import ModelFacts
from pcg.serve.engine.jobs.news import JobEnd, JobOrder, Tell
from pcg.serve.engine.messages import (
    AdapterData,
    Cancel,
    ChunkData,
    Failed,
    Gone,
    Here,
    JobTold,
    Ready,
    Refused,
    Release,
    Report,
    StatusData,
    Step,
    ToServer,
    encode,
)
from pcg.serve.engine.numbers import numbers_of
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.remote_adapters import RemoteAdapter, RemoteAdapters
from pcg.serve.engine.split_base import SplitAccess
from pcg.serve.engine.trainer_orders import LoraOrder, TrainerOrder, TrainerReply
from pcg.serve.engine.translation import (
    PromptLogprobs,
    chunk_of,
    encoded,
    error_of,
    name_of,
    submit_of,
    tokenizer_of,
)
from pcg.serve.engine.watched_numbers import WatchedNumbers
from pcg.serve.engine.worker import SIGNALS

# -------------------------------------------------------------------------------------------- start


def start(*arguments: Any) -> None:
    """Run an engine; arguments as of `pcg.serve.engine.worker.run`, which has it collect again."""
    gc.disable()
    from pcg.serve.engine.worker import run

    run(*arguments)


# ------------------------------------------------------------------------------------------ process


Result = TypeVar("Result")


@dataclass
class _Sent:
    """A request that the engine has, and the logprobs of its prompt once they have come."""

    stream: Stream
    adapter: RemoteAdapter | None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class _Model:
    """A model, as requests see it."""

    tokenizer: Tokenizer | None
    vocabulary: int

    def adapters_of(self, count: int, adapter: Any) -> list[ServedAdapter | None]:
        return [adapter] * count


class ProcessClient:
    """An `EngineClient` of a process that `process_client` started."""

    def __init__(self, channel: Channel, process: SpawnProcess) -> None:
        self._connection = Connection(channel, process, self._take, self._lose)
        self._remote = RemoteAdapters()
        self._ready: Ready | Failed | None = None
        self._streams: dict[int, _Sent] = {}
        self._jobs: dict[int, Tell] = {}
        self._numbers = itertools.count()
        self._wakes = Wakes()
        self._refusal: DrainingError | None = None
        self._watched = WatchedNumbers(self._post)

    def begin(self) -> None:
        """Wait until the engine runs.

        Raises:
            PcgError: why it cannot be made.
        """
        while self._ready is None and self.ended is None:
            self._connection.hear(waits=True)
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
        data = self._ready.tokenizer
        tokenizer = None if data is None else tokenizer_of(data)
        self._facts = self._ready.facts
        self._model = _Model(tokenizer, self._facts.vocabulary)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._model.tokenizer

    @property
    def ended(self) -> EngineError | None:
        return self._connection.ended

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        return self._remote.here

    def version_of(self, adapter: ServedAdapter) -> AdapterVersion:
        return cast(RemoteAdapter, adapter).served

    def hash(self, versions: Iterable[AdapterVersion]) -> Future[None]:
        asked = list(versions)

        def learn(digests: list[str | None]) -> None:
            for version, digest in zip(asked, digests, strict=True):
                version.learn(digest)

        named = [name_of(version) for version in asked]
        return self._call("hash", list[str | None], learn, versions=named)

    # ------------------------------------------------------------------------------- requests

    def request(
        self, prompt: str | Sequence[int], adapter: ServedAdapter | None, fields: RequestFields
    ) -> Request:
        return make_request(self._model, prompt, adapter, fields)

    def submit(self, request: Request) -> Stream:
        error = self.ended or self._refusal
        if error is not None:
            raise error
        number, adapter = next(self._numbers), cast("RemoteAdapter | None", request.adapter)
        version = None if adapter is None else adapter.served
        message = encoded(submit_of(number, request, version))
        stream = Stream(partial(self._cancel, number), request.request_id or None)
        self._streams[number] = _Sent(stream, adapter)
        self._post(message)
        return stream

    def _cancel(self, number: int, _: Stream) -> None:
        self._post(encode(Cancel(number)))

    def taken(self) -> Future[None]:
        return self._call("taken", type(None), _same)

    def most_tokens(self, adapter: ServedAdapter | None) -> Future[int]:
        named = None if adapter is None else name_of(self.version_of(adapter))
        return self._call("most_tokens", int, _same, version=named)

    # ------------------------------------------------------------------------------- adapters

    def add_adapter(
        self, name: str, path: Path, *, replace: bool = False, expected_version: int | None = None
    ) -> Future[ServedAdapter]:
        asked = {"replace": replace, "expected_version": expected_version}
        known: Callable[[AdapterData], ServedAdapter] = self._remote.known
        return self._call("add_adapter", AdapterData, known, name=name, path=str(path), **asked)

    def remove_adapter(self, name: str) -> Future[None]:
        return self._call("remove_adapter", type(None), _same, name=name)

    # ------------------------------------------------------------------------------- jobs

    def begin_job(self, order: JobOrder, tell: Tell) -> Future[None]:
        number = next(self._numbers)
        self._jobs[number] = tell
        return self._call("begin_job", type(None), _same, number=number, order=order)

    def end_job(self, adapter: str, *, interrupts: bool) -> Future[None]:
        return self._call("end_job", type(None), _same, adapter=adapter, interrupts=interrupts)

    def put_grades(
        self, adapter: str, rewards: Sequence[float], error: str | None = None
    ) -> Future[None]:
        given = {"adapter": adapter, "rewards": list(rewards), "error": error}
        return self._call("put_grades", type(None), _same, **given)

    def begin_trainer(self, name: str, order: LoraOrder) -> Future[None]:
        return self._call("begin_trainer", type(None), _same, name=name, order=order)

    def train(self, name: str, order: TrainerOrder) -> Future[TrainerReply]:
        return self._call("train", TrainerReply, _same, name=name, order=order)

    def end_trainer(self, name: str) -> Future[None]:
        return self._call("end_trainer", type(None), _same, name=name)

    # ------------------------------------------------------------------------------- status

    def numbers(self) -> Future[EngineNumbers]:
        found = None if self.ended else self._watched.numbers()
        return self._call("numbers", dict[str, Any], numbers_of) if found is None else _done(found)

    def jobs(self) -> Future[list[JobStatus]]:
        found = None if self.ended else self._watched.jobs()
        return self._call("jobs", list[JobStatus], _same) if found is None else _done(found)

    def status(self) -> Future[EngineStatus]:
        return self._call("status", StatusData, _status_of)

    def health(self) -> Health:
        if self.ended is not None:
            return Health(EngineState.ENDED, str(self.ended), None)
        state = EngineState.RUNNING if self._refusal is None else EngineState.DRAINING
        return Health(state, None, None)

    # ------------------------------------------------------------------------------- its life

    def wait(self, future: Future[Result]) -> Result:
        return self._connection.wait(future)

    def listening(self) -> AbstractContextManager[None]:
        return self._connection.listening()

    def pause(self, timeout_s: float) -> Future[None]:
        return self._call("pause", type(None), _same, timeout_s=timeout_s)

    def go_on(self) -> Future[None]:
        return self._call("go_on", type(None), _same)

    def set_keys(self, keys: Keys) -> Future[None]:
        return self._call("set_keys", type(None), _same, keys=list(keys))

    def drain(self, timeout_s: float) -> Future[None]:
        self._refusal = DrainingError("the engine ends its work and takes nothing new")
        return self._call("drain", type(None), _same, timeout_s=timeout_s)

    def close(self) -> None:
        """End the engine's process, once no event loop runs."""
        self._connection.close(at_once=not isinstance(self._ready, Ready))

    # ------------------------------------------------------------------------------- messages

    def _call(
        self, function: str, kind: Any, then: Callable[[Any], Result], **arguments: Any
    ) -> Future[Result]:
        self._release()
        return self._connection.call(function, kind, then, arguments)

    def _post(self, message: bytes) -> None:
        self._release()
        self._connection.post(message)

    def _release(self) -> None:
        """Tell the engine which versions nothing here refers to any more."""
        released = self._remote.released
        while released:
            self._connection.post(encode(Release(released.popleft())))

    def _take(self, messages: list[ToServer]) -> None:
        """Take messages, and wake those that wait for chunks of them."""
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
            elif isinstance(message, Here):
                self._remote.put(message.adapter)
            elif isinstance(message, Gone):
                self._remote.remove(message.name)
            elif isinstance(message, JobTold):
                self._tell_of_job(message)
            elif isinstance(message, Ready | Failed):
                self._ready = message
        self._wakes.send()

    def _tell_of_job(self, told: JobTold) -> None:
        """Tell who ordered a job what came of it."""
        tell = self._jobs[told.number]
        if isinstance(told.news, JobEnd):
            del self._jobs[told.number]
        tell(told.news)

    def _put(self, data: ChunkData) -> None:
        """Give a chunk to its stream."""
        sent = self._streams.get(data.number)
        if sent is None:
            return
        if data.prompt_logprobs is not None:
            sent.prompt_logprobs = data.prompt_logprobs
        version = None if sent.adapter is None else sent.adapter.answering(data)
        chunk = chunk_of(data, version, sent.prompt_logprobs)
        if chunk.is_last or chunk.error is not None:
            del self._streams[data.number]
        sent.stream.put(chunk, self._wakes)

    def _lose(self, error: EngineError) -> None:
        streams, self._streams = self._streams, {}
        for sent in streams.values():
            sent.stream.fail(error)


@contextmanager
def process_client(
    load: Callable[[], Executor],
    options: ServeOptions,
    tenants: int,
    split: SplitAccess | None = None,
    *,
    degree: int = 1,
) -> Iterator[ProcessClient]:
    """Load a model in a new process and run its engine there, until the end of the `with`.

    Args:
        load: loads it; it is pickled.
        tenants: the number of tenants that may ask.
        split: who may use its weights by split execution; None for nobody.
        degree: the number of ranks that run it, each in a process of its own.
    Raises:
        PcgError: the model cannot be loaded, or the engine not be made.
    """
    ours, theirs = socket.socketpair()
    arguments = (theirs, load, options, tenants, torch.get_num_threads(), split, degree)
    process = get_context("spawn").Process(target=start, args=arguments, name="pcg engine")
    # It is born without the signals that it will ignore.
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


def _same(found: Any) -> Any:
    return found


def _done(found: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(found)
    return future


def _status_of(data: StatusData) -> EngineStatus:
    adapters = [
        AdapterStatus(
            one.version.name,
            AdapterVersion(one.version.name, one.version.number, digest=one.digest),
            one.method,
            one.size_bytes,
            one.running,
            one.pages,
            one.is_trained,
        )
        for one in data.adapters
    ]
    return EngineStatus(numbers_of(data.numbers), adapters, data.running, data.jobs)
