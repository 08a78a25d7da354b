"""The client interface through which the server uses an engine in any process.

`pcg.serve` uses nothing else of an engine. Every operation that may take longer than a read of this
process's memory is a command and returns a future, so the event loop never waits for the engine.
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
from pcg.serve.engine.messages import Emit
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
    """Settings of a server's base executor besides its options.

    Attributes:
        keys: the server's keys.
        directory: folder of the tokenizer files, which are sent to clients; None without them.
    """

    keys: Keys
    directory: Path | None


class ServedBase:
    """A base executor on a separate thread.

    Attributes:
        where: its address.
        keys: the keys that clients may use.
        ended: completes when the executor has ended.
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
        """Refuse new clients; complete when the connected clients have left."""
        self._loop.drain()
        return self.ended

    def close(self) -> None:
        """End the executor now."""
        self._loop.stop()
        self._thread.join()


@contextmanager
def split_endpoint(options: ServeOptions) -> Iterator[ZeroMqEndpoint]:
    """Listen for split clients within a `with`. SplitError: cannot listen at the address."""
    base = _base_options(options)
    most = base.max_request_mib * 2**20
    endpoint = ZeroMqEndpoint(base.host, base.port, most, base.curve)
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
    """Serve split clients with an engine's weights within a `with`."""
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
    """An engine that serves a model, for a single event loop and for other threads."""

    @property
    def facts(self) -> ModelFacts:
        """The model's facts."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None."""

    @property
    def ended(self) -> EngineError | None:
        """The error that ended the engine; None while it runs."""

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        """Adapters that requests may use, by name."""

    def version_of(self, adapter: ServedAdapter) -> AdapterVersion:
        """Return the version of an adapter that is or was in `adapters`."""

    def request(
        self, prompt: str | Sequence[int], adapter: ServedAdapter | None, fields: RequestFields
    ) -> Request:
        """Create a request, on any thread; tokenize a text. Errors as `Executor.request`."""

    def submit(self, request: Request) -> Stream:
        """Submit a request; the stream raises the engine's refusal.

        Raises:
            EngineError: the engine takes no requests.
        """

    def call(self, command: Command[Reply], emit: Emit | None = None) -> Future[Reply]:
        """Execute a command. The future holds its reply or its error.

        Args:
            emit: receives the command's events, on any thread.
        """

    def health(self) -> Health:
        """Return whether the engine runs and takes requests."""

    def wait(self, future: Future[Reply]) -> Reply:
        """Wait for a reply before the event loop runs."""

    def listening(self) -> AbstractContextManager[None]:
        """Receive the engine's messages on the running event loop within a `with`."""


class LocalClient:
    """An `EngineClient` of an engine on a thread of this process.

    Attributes:
        executor, engine: those of the model.
        base: the base executor of split clients, or None.
        jobs: the jobs that the server started.
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

    def call(self, command: Command[Reply], emit: Emit | None = None) -> Future[Reply]:
        if isinstance(command, Order):
            return settled(lambda: command.apply(self, emit))
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
    """Load a model and run its engine on a thread within a `with`.

    Args:
        load: loads the model.
        tenants: number of tenants.
        split: access of split clients to the weights; None without split clients.
    """
    with ExitStack() as stack:
        # Listen before loading, so that an address in use is refused immediately.
        endpoint = None if split is None else stack.enter_context(split_endpoint(options))
        executor, base = load(), None
        engine = stack.enter_context(Engine(executor.state, options.engine(tenants)).start())
        if split is not None and endpoint is not None:
            serving = served_base(executor, engine, options, split, endpoint)
            base = stack.enter_context(serving)
        client = LocalClient(executor, engine, options, base)
        stack.callback(client.jobs.close)
        yield client
