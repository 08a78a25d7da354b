"""The engine's process: it loads the model and executes the server's messages.

The process ignores signals: a terminal or a service sends Ctrl-C and SIGTERM to all processes, and
the server drains. If the server exits for any reason, this process exits immediately.
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
    Added,
    Answer,
    Call,
    Cancel,
    ChunkData,
    Ended,
    Event,
    Failed,
    JobEvent,
    Ready,
    Refused,
    Release,
    Removed,
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
"""Signals that the server handles and this process ignores."""


@dataclass(frozen=True)
class Launch:
    """The picklable arguments of an engine process.

    Attributes:
        load: loads the model.
        tenants: number of tenants.
        split: access of split clients to the weights; None without split clients.
        degree: number of ranks; rank 0 runs in the engine's process.
        threads: number of tensor threads of all ranks together.
    """

    load: Callable[[], Executor]
    options: ServeOptions
    tenants: int
    split: SplitAccess | None
    degree: int
    threads: int

    def begin(self) -> None:
        """Set up a new process: exit with the parent process and limit the threads."""
        _follow_parent()
        torch.set_num_threads(max(1, self.threads // self.degree))


def run(end: socket.socket, launch: Launch) -> None:
    """Serve messages from a socket until the server ends the engine or exits."""
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
    del store  # the ranks' rendezvous had to live until now
    os._exit(0)  # without waiting for threads that compile or hash


def _start_ranks(launch: Launch) -> TCPStore:
    """Start the other ranks, which load the same model and follow rank 0. Return their store.

    The system ends the other ranks when this process ends.
    """
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    for rank in range(1, launch.degree):
        get_context("spawn").Process(
            target=_follow, args=(launch, rank, store.port), name=f"pcg rank {rank}", daemon=True
        ).start()
    _join(launch, 0, store.port)
    return store


def _join(launch: Launch, rank: int, port: int) -> None:
    """Set torchrun's environment variables for a rank, with an existing store."""
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
    """Follow rank 0 until it ends. Rank 0's process reports errors."""
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
    os._exit(code)  # without waiting for threads that hash


def _follow_parent() -> None:
    """Ignore signals and exit when the server exits."""
    for number in SIGNALS:
        signal.signal(number, _pass)  # jobs' processes would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)


def _pass(_: int, __: FrameType | None) -> None:
    """Ignore a signal."""


class Worker:
    """Executes the server's messages on a thread and sends the replies."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox = Outbox(channel)
        self._client: LocalClient | None = None
        self._named: dict[VersionName, Adapter] = {}
        self._decode = decoder(ToEngine)
        self._command = decoder(command_types())

    def begin(self, client: LocalClient) -> None:
        """Report the adapters and the model's facts to the server, then accept its messages."""
        self._client = client
        self._reports = Reports(client.engine, self._outbox.report)
        client.executor.state.versions.listen(self._report_adapter)
        for name, adapter in client.executor.adapters.items():
            self._report_adapter(name, adapter)
        # The loaded objects live until the end, so full collections can skip them.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._channel.send(encode(Ready(client.facts, client.tokenizer)))

    def _report_adapter(self, name: str, adapter: Adapter | None) -> None:
        """Report which adapter a name has. Keep the adapter until the server releases it."""
        if adapter is None:
            self._channel.send(encode(Removed(name)))
        else:
            self._channel.send(encode(Added(self._data_of(adapter))))

    def _data_of(self, adapter: Adapter) -> AdapterData:
        version = self._local.version_of(adapter)
        self._named[version.key] = adapter
        return AdapterData(version, adapter.size_bytes, adapter.prompt_tokens)

    @property
    def _local(self) -> LocalClient:
        assert self._client is not None
        return self._client

    def read(self) -> None:
        """Execute messages until the server exits."""
        try:
            while (messages := self._channel.read(waits=True)) is not None:
                for message in messages:
                    self._take(self._decode(message))
        except BaseException:  # the failed request is unknown: exit, so that none waits for ever
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
                    f"the adapter {name.name}@{name.number} no longer exists"
                )
            request = message.request.request(adapter)
            self._local.engine.submit_request(request, partial(self._outbox.open, number))
        except Exception as error:
            self._outbox.forget(number)
            self._outbox.refuse(number, error)

    def _call(self, message: Call) -> None:
        """Apply a command and send its reply when it is ready."""
        emit = partial(self._send_event, message.number)
        reply = settled(lambda: self._local.call(self._command(message.command), emit))
        reply.add_done_callback(partial(self._answer, message.number))

    def _send_event(self, number: int, event: JobEvent) -> None:
        self._channel.send(encode(Event(number, event)))

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
    """Sends each step's chunks as a message, and the errors of failed requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._chunks: list[ChunkData] = []
        self._reports: list[bytes] = []
        self._streams: dict[int, SentStream] = {}

    def open(
        self, number: int, cancel: Callable[[Stream], None], request_id: str | None
    ) -> SentStream:
        """Create the stream of a request."""
        stream = self._streams[number] = SentStream(self, number, cancel, request_id)
        return stream

    def cancel(self, number: int) -> None:
        """End a request unless it has ended."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.cancel()

    def add(self, stream: SentStream, chunk: Chunk) -> None:
        """Queue a chunk for the message of its step, on the engine's thread."""
        self._chunks.append(data_of(stream.number, chunk, knows_prompt=stream.has_sent_prompt))
        if chunk.prompt_logprobs is not None:
            stream.has_sent_prompt = True

    def report(self, report: Report, wakes: Wakes | None) -> None:
        """Queue a report, on the engine's thread.

        Args:
            wakes: schedules the send; None to wait for the next chunks or the next urgent report.
        """
        self._reports.append(encode(report))
        if wakes is not None:
            wakes.call(self.flush)

    def flush(self) -> None:
        """Send the queued reports and the chunks of the step."""
        messages, self._reports = self._reports, []
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            messages.append(encode(Step(chunks)))
        self._channel.send(*messages)

    def refuse(self, number: int, error: BaseException) -> None:
        """Send the error of a request that ends without a last chunk, from any thread."""
        self._channel.send(encode(Refused(number, fault_of(error))))

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)


class SentStream(Stream):
    """The sending end of a stream that another process reads.

    Attributes:
        number: the server's number of the request.
        has_sent_prompt: True once the prompt's logprobs were sent.
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
