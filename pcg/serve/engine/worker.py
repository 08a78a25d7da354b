"""The engine's process: it loads the model, and does what the server's messages say.

Signals are the server's: Ctrl-C and SIGTERM go to all processes of a terminal or a service, and the
server drains. When the server is gone, however that came, this process ends at once.

The ranks of a server's engine: processes beside the engine's own, which is the first rank.

They load the same model, make the same engine, and follow the first one's; where that process ends,
the system ends them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pcg.errors import AdapterNotFoundError, PcgError
from pcg.kernels.devices import device_thread
from pcg.keys import Key, Keys
from pcg.parent_process import end_with_parent
from pcg.peft.adapter import Adapter
from pcg.ranks.launch import LOOPBACK, mute_others
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.ranks.following_engine import FollowingEngine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import JobStatus
from pcg.serve.engine.channel import Channel
from pcg.serve.engine.jobs.news import JobNews, JobOrder
from pcg.serve.engine.local import LocalClient, local_client
from pcg.serve.engine.messages import (
    AdapterData,
    AdapterStatusData,
    Answer,
    Call,
    Cancel,
    Ended,
    Failed,
    Gone,
    Here,
    JobTold,
    Ready,
    Release,
    StatusData,
    Submit,
    ToEngine,
    VersionName,
    Watch,
    decoder,
    encode,
)
from pcg.serve.engine.numbers import plain
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.outbox import Outbox
from pcg.serve.engine.reports import Reports
from pcg.serve.engine.split_base import SplitAccess
from pcg.serve.engine.trainer_orders import LoraOrder, TrainerOrder, TrainerReply, then
from pcg.serve.engine.translation import fault_of, name_of, request_of, tokenizer_data

# -------------------------------------------------------------------------------------------- ranks


class Ranks:
    """The other ranks of an engine, which this process has started, as the first one.

    Attributes:
        threads: the number of threads for tensors that each rank has.
    """

    def __init__(
        self,
        degree: int,
        begin: Callable[[], None],
        load: Callable[[], Executor],
        options: ServeOptions,
        tenants: int,
        threads: int,
    ) -> None:
        """Start them.

        Args:
            degree: the number of ranks, with this process.
            begin: called first in each of them.
            load: loads the model; it is pickled, as what multiprocessing starts is.
            options, tenants: those of the engine.
            threads: the number of threads of all ranks together.
        """
        self.threads = max(1, threads // degree)
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        context = get_context("spawn")
        for rank in range(1, degree):
            environment = _environment(rank, degree, self._store.port)
            arguments = (begin, environment, load, options, tenants, self.threads)
            name = f"pcg rank {rank}"
            context.Process(target=_follow, args=arguments, name=name, daemon=True).start()
        os.environ.update(_environment(0, degree, self._store.port))


def _environment(rank: int, degree: int, port: int) -> dict[str, str]:
    """Return torchrun's environment of a rank, with a store that is there already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(degree),
        "LOCAL_WORLD_SIZE": str(degree),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _follow(
    begin: Callable[[], None],
    environment: Mapping[str, str],
    load: Callable[[], Executor],
    options: ServeOptions,
    tenants: int,
    threads: int,
) -> None:
    """Follow the first rank to its end; its process says what went wrong."""
    begin()
    os.environ.update(environment)
    mute_others()
    torch.set_num_threads(threads)
    code = 0
    try:
        engine = Engine(load().state, options.engine(tenants)).start()
        assert isinstance(engine, FollowingEngine)
        engine.follow()
    except Exception as error:
        if not isinstance(error, PcgError):
            traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads that still hash are not waited for


# ------------------------------------------------------------------------------------------- worker


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that the server obeys, and this process does not."""


def run(
    end: socket.socket,
    load: Callable[[], Executor],
    options: ServeOptions,
    tenants: int,
    threads: int,
    split: SplitAccess | None = None,
    degree: int = 1,
) -> None:
    """Serve what comes over a socket until the server says to end, or is gone.

    Args:
        load: loads the model.
        tenants: the number of tenants that may ask.
        threads: the number of threads for tensors.
        split: who may use its weights by split execution; None for nobody.
        degree: the number of ranks, the first of which this process is.
    """
    _follow_parent()
    channel = Channel(end)
    worker = Worker(channel)
    device_thread(None, worker.read, "pcg messages").start()
    if degree > 1:  # which is kept, as it has the store that they meet at
        ranks = Ranks(degree, _follow_parent, load, options, tenants, threads)
        threads = ranks.threads
    torch.set_num_threads(threads)
    try:
        with local_client(load, options, tenants, split) as client:
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
    os._exit(0)  # threads that still compile or hash are not waited for


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

    def begin(self, client: LocalClient) -> None:
        """Tell the server what there is, and take its messages."""
        self._client = client
        self._reports = Reports(client.engine, self._outbox.report)
        client.executor.state.versions.listen(self._tell)
        for name, adapter in client.executor.adapters.items():
            self._tell(name, adapter)
        tokenizer = client.tokenizer
        data = None if tokenizer is None else tokenizer_data(tokenizer)
        # What is loaded stays: full collections need not go through it.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._channel.send(encode(Ready(client.facts, data)))

    def _tell(self, name: str, adapter: Adapter | None) -> None:
        """Tell which adapter has a name; it is kept until the server releases it."""
        if adapter is None:
            self._channel.send(encode(Gone(name)))
        else:
            self._channel.send(encode(Here(self._data_of(adapter))))

    def _data_of(self, adapter: Adapter) -> AdapterData:
        version = self._local.version_of(adapter)
        named = name_of(version)
        self._named[named] = adapter
        digest = version.known_digest
        return AdapterData(named, adapter.size_bytes, adapter.prompt_tokens, digest)

    @property
    def _local(self) -> LocalClient:
        assert self._client is not None
        return self._client

    # ------------------------------------------------------------------------------- messages

    def read(self) -> None:
        """Do what messages say, until the server is gone."""
        try:
            while (found := self._channel.read(waits=True)) is not None:
                for message in found:
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

    def _submit(self, asked: Submit) -> None:
        number = asked.number
        try:
            request = request_of(asked, self._adapter(asked.adapter))
            make = partial(self._outbox.open, number)
            self._local.engine.submit_request(request, make)
        except Exception as error:
            self._outbox.forget(number)
            self._outbox.refuse(number, error)

    def _adapter(self, named: VersionName | None) -> Adapter | None:
        if named is None:
            return None
        adapter = self._named.get(named)
        if adapter is None:
            raise AdapterNotFoundError(f"there is no adapter {named.name}@{named.number} any more")
        return adapter

    # ------------------------------------------------------------------------------- calls

    def _call(self, asked: Call) -> None:
        """Call a function, and send its result when it is there."""
        try:
            found = _FUNCTIONS[asked.function](self, **asked.arguments)
        except Exception as error:
            self._answer(asked.id, None, error)
            return
        if isinstance(found, Future):
            found.add_done_callback(partial(self._answer_later, asked.id))
        else:
            self._answer(asked.id, found)

    def _answer_later(self, id: int, done: Future[Any]) -> None:
        error = done.exception()
        self._answer(id, None if error else done.result(), error)

    def _answer(self, id: int, result: Any, error: BaseException | None = None) -> None:
        fault = None if error is None else fault_of(error)
        raw = msgspec.Raw(encode(result))
        self._channel.send(encode(Answer(id, raw, fault)))

    def taken(self) -> Future[None]:
        return self._local.taken()

    def most_tokens(self, version: list[Any] | None) -> int:
        named = None if version is None else VersionName(*version)
        return self._local.most_tokens(self._adapter(named)).result()

    def hash(self, versions: list[list[Any]]) -> Future[list[str | None]]:
        adapters = [self._named.get(VersionName(*one)) for one in versions]
        found = [None if one is None else self._local.version_of(one) for one in adapters]
        known = [one for one in found if one is not None]

        def digests(_: None) -> list[str | None]:
            return [None if one is None else one.known_digest for one in found]

        return then(self._local.hash(known), digests)

    def add_adapter(
        self, name: str, path: str, replace: bool, expected_version: int | None
    ) -> Future[AdapterData]:
        added = self._local.engine.add_adapter(
            name, Path(path), replace=replace, expected_version=expected_version
        )
        return then(added, self._data_of)

    def remove_adapter(self, name: str) -> Future[None]:
        return self._local.remove_adapter(name)

    def begin_job(self, number: int, order: dict[str, Any]) -> None:
        def tell(news: JobNews) -> None:
            self._channel.send(encode(JobTold(number, news)))

        self._local.begin_job(msgspec.convert(order, JobOrder), tell)

    def end_job(self, adapter: str, interrupts: bool) -> None:
        self._local.end_job(adapter, interrupts=interrupts)

    def put_grades(self, adapter: str, rewards: list[float], error: str | None) -> None:
        self._local.put_grades(adapter, rewards, error)

    def begin_trainer(self, name: str, order: dict[str, Any]) -> Future[None]:
        return self._local.begin_trainer(name, msgspec.convert(order, LoraOrder))

    def train(self, name: str, order: dict[str, Any]) -> Future[TrainerReply]:
        return self._local.train(name, msgspec.convert(order, TrainerOrder))

    def end_trainer(self, name: str) -> Future[None]:
        return self._local.end_trainer(name)

    def numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = plain(self._local.engine.numbers())
        return found

    def jobs(self) -> list[JobStatus]:
        return self._local.engine.jobs()

    def status(self) -> StatusData:
        engine = self._local.engine
        adapters = [
            AdapterStatusData(
                name_of(one.version),
                one.version.known_digest,
                one.method,
                one.size_bytes,
                one.running,
                one.pages,
                one.is_trained,
            )
            for one in engine.adapters()
        ]
        return StatusData(self.numbers(), adapters, engine.running(), engine.jobs())

    def pause(self, timeout_s: float) -> Future[None]:
        return self._local.pause(timeout_s)

    def go_on(self) -> Future[None]:
        return self._local.go_on()

    def set_keys(self, keys: list[dict[str, Any]]) -> Future[None]:
        return self._local.set_keys(Keys(msgspec.convert(keys, list[Key])))

    def drain(self, timeout_s: float) -> Future[None]:
        return self._local.drain(timeout_s)

    def close(self) -> None:
        self._local.engine.close()


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        Worker.taken,
        Worker.most_tokens,
        Worker.hash,
        Worker.add_adapter,
        Worker.remove_adapter,
        Worker.begin_job,
        Worker.end_job,
        Worker.put_grades,
        Worker.begin_trainer,
        Worker.train,
        Worker.end_trainer,
        Worker.numbers,
        Worker.jobs,
        Worker.status,
        Worker.set_keys,
        Worker.drain,
        Worker.go_on,
        Worker.pause,
        Worker.close,
    )
}
"""The functions that the server may call."""
