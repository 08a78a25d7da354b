"""The engine's process: it loads the model, and does what the server's messages say.

Signals are the server's: Ctrl-C and SIGTERM go to all processes of a terminal or a service, and the
server drains. When the server is gone for any reason, this process ends at once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pcg.errors import AdapterNotFoundError, PcgError
from pcg.kernels.devices import device_thread
from pcg.parent_process import end_with_parent
from pcg.peft.adapter import Adapter
from pcg.ranks.launch import LOOPBACK, mute_others
from pcg.runtime.adapters.versions import VersionName
from pcg.runtime.engine.commands import command_types, settled
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.stream import Stream, Wakes
from pcg.serve.engine.channel import Channel
from pcg.serve.engine.client import LocalClient, SplitAccess, local_client
from pcg.serve.engine.messages import (
    AdapterData,
    Answer,
    Call,
    Cancel,
    ChunkData,
    Ended,
    Event,
    Failed,
    Gone,
    Here,
    JobNews,
    Ready,
    Refused,
    Release,
    Report,
    Step,
    Submit,
    ToEngine,
    Watch,
    data_of,
    decoder,
    encode,
    fault_of,
)
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.reports import Reports

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that the server obeys, and this process does not."""


@dataclass(frozen=True)
class Launch:
    """The arguments of an engine's process; it is pickled.

    Attributes:
        load: loads the model.
        tenants: the number of tenants that may ask.
        split: the access of split clients to its weights; None for none.
        degree: the number of ranks, the first of which is the engine's process.
        threads: the number of threads for tensors of all ranks together.
    """

    load: Callable[[], Executor]
    options: ServeOptions
    tenants: int
    split: SplitAccess | None
    degree: int
    threads: int

    def begin(self) -> None:
        """Begin in a new process: follow the process that started it, and bound the threads."""
        _follow_parent()
        torch.set_num_threads(max(1, self.threads // self.degree))


def run(end: socket.socket, launch: Launch) -> None:
    """Serve what comes over a socket until the server says to end, or is gone."""
    launch.begin()
    channel = Channel(end)
    worker = Worker(channel)
    device_thread(None, worker.read, "pcg messages").start()
    store = _start_ranks(launch) if launch.degree > 1 else None
    try:
        with local_client(launch.load, launch.options, launch.tenants, launch.split) as client:
            worker.begin(client)
            ended = client.engine.join()
        channel.send(encode(Ended(str(ended))))
    except Exception as error:
        if not isinstance(error, PcgError | OSError | MemoryError | torch.OutOfMemoryError):
            traceback.print_exc()
        channel.send(encode(Failed(fault_of(error))))
    channel.close()
    sys.stdout.flush()
    sys.stderr.flush()
    del store  # where the ranks met, until now
    os._exit(0)  # threads that still compile or hash are not waited for


def _start_ranks(launch: Launch) -> TCPStore:
    """Start the other ranks, which load the same model and follow this one; returns their store.

    Where this process ends, the system ends them.
    """
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    for rank in range(1, launch.degree):
        get_context("spawn").Process(
            target=_follow, args=(launch, rank, store.port), name=f"pcg rank {rank}", daemon=True
        ).start()
    _join(launch, 0, store.port)
    return store


def _join(launch: Launch, rank: int, port: int) -> None:
    """Set torchrun's environment of a rank, with a store that is there already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(launch.degree),
        LOCAL_WORLD_SIZE=str(launch.degree),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def _follow(launch: Launch, rank: int, port: int) -> None:
    """Follow the first rank to its end; its process reports errors."""
    launch.begin()
    _join(launch, rank, port)
    mute_others()
    code = 0
    try:
        Engine(launch.load().state, launch.options.engine(launch.tenants)).start().follow()
    except Exception as error:
        if not isinstance(error, PcgError):
            traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads that still hash are not waited for


def _follow_parent() -> None:
    """Leave signals to the server, and end when it ends."""
    for number in SIGNALS:
        signal.signal(number, _pass)  # and not SIG_IGN, which processes of jobs would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)


def _pass(_: int, __: FrameType | None) -> None:
    """Leave a signal to the server."""


class Worker:
    """Does what messages say, on one thread, and sends what comes of it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox = Outbox(channel)
        self._client: LocalClient | None = None
        self._named: dict[VersionName, Adapter] = {}
        self._decode = decoder(ToEngine)
        self._command = decoder(command_types())

    def begin(self, client: LocalClient) -> None:
        """Tell the server what there is, and take its messages."""
        self._client = client
        self._reports = Reports(client.engine, self._outbox.report)
        client.executor.state.versions.listen(self._tell)
        for name, adapter in client.executor.adapters.items():
            self._tell(name, adapter)
        # What is loaded stays: full collections need not go through it.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._channel.send(encode(Ready(client.facts, client.tokenizer)))

    def _tell(self, name: str, adapter: Adapter | None) -> None:
        """Tell the server which adapter has a name; it is kept until the server releases it."""
        if adapter is None:
            self._channel.send(encode(Gone(name)))
        else:
            self._channel.send(encode(Here(self._data_of(adapter))))

    def _data_of(self, adapter: Adapter) -> AdapterData:
        version = self._local.version_of(adapter)
        self._named[version.key] = adapter
        return AdapterData(version, adapter.size_bytes, adapter.prompt_tokens)

    @property
    def _local(self) -> LocalClient:
        assert self._client is not None
        return self._client

    def read(self) -> None:
        """Do what messages say, until the server is gone."""
        try:
            while (messages := self._channel.read(waits=True)) is not None:
                for message in messages:
                    self._take(self._decode(message))
        except BaseException:  # whose request it was is not known, so none may wait for ever
            traceback.print_exc()
        os._exit(1)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._outbox.cancel(message.number)
        elif isinstance(message, Release):
            self._named.pop(message.version, None)
        elif isinstance(message, Watch):
            self._reports.watch(message)
        else:
            self._call(message)

    def _submit(self, message: Submit) -> None:
        number, name = message.number, message.request.adapter
        try:
            adapter = None if name is None else self._named.get(name)
            if name is not None and adapter is None:
                raise AdapterNotFoundError(
                    f"there is no adapter {name.name}@{name.number} any more"
                )
            request = message.request.request(adapter)
            self._local.engine.submit_request(request, partial(self._outbox.open, number))
        except Exception as error:
            self._outbox.forget(number)
            self._outbox.refuse(number, error)

    def _call(self, message: Call) -> None:
        """Apply a command, and send its reply when it is there."""
        tell = partial(self._send_event, message.number)
        reply = settled(lambda: self._local.call(self._command(message.command), tell))
        reply.add_done_callback(partial(self._answer, message.number))

    def _send_event(self, number: int, news: JobNews) -> None:
        self._channel.send(encode(Event(number, news)))

    def _answer(self, number: int, reply: Future[Any]) -> None:
        fault, data = None, b"\xc0"  # None
        try:
            result = reply.result()
            data = encode(self._data_of(result) if isinstance(result, Adapter) else result)
        except Exception as error:
            fault = fault_of(error)
        self._channel.send(encode(Answer(number, msgspec.Raw(data), fault)))


# ------------------------------------------------------------------------------------------ outbox


class Outbox:
    """Sends chunks, all of a step in one message, and the errors of requests that end without."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._chunks: list[ChunkData] = []
        self._reports: list[bytes] = []
        self._streams: dict[int, SentStream] = {}

    def open(
        self, number: int, cancel: Callable[[Stream], None], request_id: str | None
    ) -> SentStream:
        """Return the stream of the request of that number."""
        stream = self._streams[number] = SentStream(self, number, cancel, request_id)
        return stream

    def cancel(self, number: int) -> None:
        """End a request, if it has not ended."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.cancel()

    def add(self, stream: SentStream, chunk: Chunk) -> None:
        """Send a chunk with the others of its step, on the engine's thread."""
        self._chunks.append(data_of(stream.number, chunk, knows_prompt=stream.has_sent_prompt))
        if chunk.prompt_logprobs is not None:
            stream.has_sent_prompt = True

    def report(self, report: Report, wakes: Wakes | None) -> None:
        """Send a report, on the engine's thread.

        Args:
            wakes: sends it now; None to send it with the next chunks, or the next report that is.
        """
        self._reports.append(encode(report))
        if wakes is not None:
            wakes.call(self.flush)

    def flush(self) -> None:
        """Send the chunks of the step."""
        messages, self._reports = self._reports, []
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            messages.append(encode(Step(chunks)))
        self._channel.send(*messages)

    def refuse(self, number: int, error: BaseException) -> None:
        """Send why a request ends without a last chunk; from any thread."""
        self._channel.send(encode(Refused(number, fault_of(error))))

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)


class SentStream(Stream):
    """A stream that is read in another process.

    Attributes:
        number: the server's number of the request.
        has_sent_prompt: True once the logprobs of the prompt were sent.
    """

    def __init__(
        self,
        outbox: Outbox,
        number: int,
        cancel: Callable[[Stream], None],
        request_id: str | None,
    ) -> None:
        super().__init__(cancel, request_id)
        self.number = number
        self.has_sent_prompt = False
        self._outbox = outbox

    def put(self, chunk: Chunk, wakes: Wakes) -> None:
        self._outbox.add(self, chunk)
        wakes.call(self._outbox.flush)
        if chunk.is_last or chunk.error is not None:
            self.is_over = True
            self._outbox.forget(self.number)

    def fail(self, error: BaseException) -> None:
        if not self.is_over:
            self.is_over = True
            self._outbox.forget(self.number)
            self._outbox.refuse(self.number, error)
