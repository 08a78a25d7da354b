"""The client of an engine: the members by which a server uses an engine in any process.

Nothing else of an engine is known in `pcg.serve`. Everything that may take longer than a look at
this process's memory is a command and gives a future, so that the event loop never waits for the
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar, cast

from pcg.errors import EngineError
from pcg.kernels.devices import device_thread
from pcg.keys import Keys
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.commands import Command, settled
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import Health
from pcg.runtime.requests.request import Request, RequestFields
from pcg.runtime.requests.stream import Stream
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.facts import ModelFacts, facts_of
from pcg.serve.engine.messages import Tell
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.orders import Order, OrderedJobs
from pcg.split.base.base_executor import tokenizer_files
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.base.shared_base import SharedBase
from pcg.split.zeromq import ZeroMqEndpoint

# ------------------------------------------------------------------------------------ split clients


_LOG = logging.getLogger("pcg.split")


@dataclass(frozen=True)
class SplitAccess:
    """Facts that a server's base needs beside its options.

    Attributes:
        keys: the server's keys.
        directory: where the tokenizer's files are, which clients are sent; None for nowhere.
    """

    keys: Keys
    directory: Path | None


class ServedBase:
    """A base executor that runs on a thread of its own.

    Attributes:
        where: its address.
        keys: the keys that clients come with.
        ended: is done once it has ended.
    """

    def __init__(self, loop: BaseLoop, keys: Keys) -> None:
        self.where = loop.endpoint.where
        self.keys = keys
        self.ended: Future[None] = Future()
        self._loop = loop
        self._thread = device_thread(None, self._run, "pcg base")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception:
            _LOG.exception("the base executor at %s ended", self.where)
        self.ended.set_result(None)

    def drain(self) -> Future[None]:
        """Take no new clients, and end once those that are here have left."""
        self._loop.drain()
        return self.ended

    def close(self) -> None:
        """End it now."""
        self._loop.stop()
        self._thread.join()


@contextmanager
def split_endpoint(options: ServeOptions) -> Iterator[ZeroMqEndpoint]:
    """Listen for split clients, within a `with`. SplitError: the address cannot be listened at."""
    asked = _base_options(options)
    most = asked.max_request_mib * 2**20
    endpoint = ZeroMqEndpoint(asked.host, asked.port, most, asked.curve)
    try:
        yield endpoint
    finally:
        endpoint.close()


@contextmanager
def served_base(
    executor: Executor,
    engine: AsyncEngine,
    options: ServeOptions,
    access: SplitAccess,
    endpoint: ZeroMqEndpoint,
) -> Iterator[ServedBase]:
    """Serve split clients by an engine's weights, within a `with`."""
    base = SharedBase(executor, engine)
    files = tokenizer_files(access.directory)
    loop = BaseLoop(base, endpoint, _base_options(options), files, access.keys)
    served = ServedBase(loop, access.keys)
    try:
        yield served
    finally:
        served.close()


def _base_options(options: ServeOptions) -> BaseOptions:
    assert options.split_port is not None
    return BaseOptions(
        host=options.host,
        port=options.split_port,
        curve_key=options.split_curve_key,
        curve_clients=options.split_curve_clients,
        plaintext=options.split_plaintext,
        drain_s=options.shutdown_timeout_s,
    )


# ------------------------------------------------------------------------------------------ clients


Reply = TypeVar("Reply")


class EngineClient(Protocol):
    """An engine that serves a model; for one event loop, and for other threads."""

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it came without one."""

    @property
    def ended(self) -> EngineError | None:
        """The reason why nothing is served any more; None while it is."""

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        """The adapters that requests may name."""

    def version_of(self, adapter: ServedAdapter) -> AdapterVersion:
        """Return the version of an adapter that is, or was, in `adapters`."""

    def request(
        self, prompt: str | Sequence[int], adapter: ServedAdapter | None, fields: RequestFields
    ) -> Request:
        """Make a request, on any thread; a text is tokenized. Errors as `Executor.request`."""

    def submit(self, request: Request) -> Stream:
        """Submit a request; the stream raises the engine's refusal.

        Raises:
            EngineError: the engine takes no requests.
        """

    def call(self, command: Command[Reply], tell: Tell | None = None) -> Future[Reply]:
        """Have a command done; its error is the future's.

        Args:
            tell: is called with the events of the command, on any thread.
        """

    def health(self) -> Health:
        """Return whether the engine runs, and takes requests."""

    def wait(self, future: Future[Reply]) -> Reply:
        """Wait for a reply before the event loop runs."""

    def listening(self) -> AbstractContextManager[None]:
        """Have the running event loop hear the engine, within a `with`."""


class LocalClient:
    """An `EngineClient` of an engine on a thread of this process.

    Attributes:
        executor, engine: those of the model.
        base: the base executor of split clients; None without one.
        jobs: the jobs that the server began.
    """

    def __init__(
        self,
        executor: Executor,
        engine: AsyncEngine,
        options: ServeOptions,
        base: ServedBase | None = None,
    ) -> None:
        self.executor = executor
        self.engine = engine
        self.base = base
        self.jobs = OrderedJobs(executor, engine)
        facts = facts_of(executor, cast(Engine, engine.engine), options)
        self._facts = facts if base is None else replace(facts, split_address=base.where)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.executor.tokenizer

    @property
    def ended(self) -> EngineError | None:
        return self.engine.ended

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        return self.executor.adapters

    def version_of(self, adapter: ServedAdapter) -> AdapterVersion:
        version = self.executor.state.versions.of(cast(Adapter, adapter))
        assert version is not None
        return version

    def request(
        self, prompt: str | Sequence[int], adapter: ServedAdapter | None, fields: RequestFields
    ) -> Request:
        return self.executor.request(prompt, cast("Adapter | None", adapter), **fields)

    def submit(self, request: Request) -> Stream:
        return self.engine.submit_request(request)

    def call(self, command: Command[Reply], tell: Tell | None = None) -> Future[Reply]:
        if isinstance(command, Order):
            return settled(lambda: command.apply(self, tell))
        return settled(lambda: command.apply(self.engine))

    def health(self) -> Health:
        return self.engine.health()

    def wait(self, future: Future[Reply]) -> Reply:
        return future.result()

    def listening(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def local_client(
    load: Callable[[], Executor],
    options: ServeOptions,
    tenants: int,
    split: SplitAccess | None = None,
) -> Iterator[LocalClient]:
    """Load a model and run its engine, on a thread, until the end of the `with`.

    Args:
        load: loads it.
        tenants: the number of tenants that may ask.
        split: the access of split clients to its weights; None for none.
    """
    with ExitStack() as stack:
        # The address is taken first, so that an address in use is refused at once.
        endpoint = None if split is None else stack.enter_context(split_endpoint(options))
        executor, base = load(), None
        engine = stack.enter_context(Engine(executor.state, options.engine(tenants)).start())
        if split is not None and endpoint is not None:
            serving = served_base(executor, engine, options, split, endpoint)
            base = stack.enter_context(serving)
        client = LocalClient(executor, engine, options, base)
        stack.callback(client.jobs.close)
        yield client
