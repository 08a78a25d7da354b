"""The client of an engine that runs on a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from pcg.errors import EngineError
from pcg.kernels.devices import device_pool
from pcg.keys import Keys
from pcg.peft.adapter import Adapter
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.status import EngineNumbers, Health, JobStatus
from pcg.runtime.requests.request import Request, RequestFields
from pcg.runtime.requests.stream import Stream
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.client import EngineStatus
from pcg.serve.engine.facts import ModelFacts, facts_of
from pcg.serve.engine.jobs.news import JobOrder, Tell
from pcg.serve.engine.jobs.orders import OrderedJobs
from pcg.serve.engine.options import ServeOptions
from pcg.serve.engine.split_base import ServedBase, SplitAccess, served_base, split_endpoint
from pcg.serve.engine.trainer_orders import (
    LoraOrder,
    OrderedTrainers,
    TrainerOrder,
    TrainerReply,
)

Result = TypeVar("Result")


class LocalClient:
    """An `EngineClient` that calls the engine.

    Attributes:
        executor, engine: those of the model.
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
        self._base = base
        facts = facts_of(executor, cast(Engine, engine.engine), options)
        self._facts = facts if base is None else replace(facts, split_address=base.where)
        self._hashing = device_pool(executor.device, 1, "pcg digests")
        self._jobs = OrderedJobs(executor, engine, self._hashing)
        self._trainers = OrderedTrainers(executor, engine)

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

    def hash(self, versions: Iterable[AdapterVersion]) -> Future[None]:
        unknown = [version for version in versions if version.known_digest is None]
        if not unknown:
            return _done(None)

        def compute() -> None:
            for version in unknown:
                _ = version.digest

        return self._hashing.submit(compute)

    # ------------------------------------------------------------------------------- requests

    def request(
        self, prompt: str | Sequence[int], adapter: ServedAdapter | None, fields: RequestFields
    ) -> Request:
        return self.executor.request(prompt, cast("Adapter | None", adapter), **fields)

    def submit(self, request: Request) -> Stream:
        return self.engine.submit_request(request)

    def taken(self) -> Future[None]:
        return self.engine.call(lambda: None)  # calls come in their order

    def most_tokens(self, adapter: ServedAdapter | None) -> Future[int]:
        return _done(self.engine.most_tokens(cast("Adapter | None", adapter)))

    # ------------------------------------------------------------------------------- adapters

    def add_adapter(
        self, name: str, path: Path, *, replace: bool = False, expected_version: int | None = None
    ) -> Future[ServedAdapter]:
        found = self.engine.add_adapter(
            name, path, replace=replace, expected_version=expected_version
        )
        return cast("Future[ServedAdapter]", found)

    def remove_adapter(self, name: str) -> Future[None]:
        return self.engine.remove_adapter(name)

    # ------------------------------------------------------------------------------- jobs

    def begin_job(self, order: JobOrder, tell: Tell) -> Future[None]:
        self._jobs.begin(order, tell)
        return _done(None)

    def end_job(self, adapter: str, *, interrupts: bool) -> Future[None]:
        self._jobs.end(adapter, interrupts=interrupts)
        return _done(None)

    def put_grades(
        self, adapter: str, rewards: Sequence[float], error: str | None = None
    ) -> Future[None]:
        self._jobs.put_grades(adapter, rewards, error)
        return _done(None)

    def begin_trainer(self, name: str, order: LoraOrder) -> Future[None]:
        return self._trainers.begin(name, order)

    def train(self, name: str, order: TrainerOrder) -> Future[TrainerReply]:
        return self._trainers.run(name, order)

    def end_trainer(self, name: str) -> Future[None]:
        return self._trainers.end(name)

    # ------------------------------------------------------------------------------- status

    def numbers(self) -> Future[EngineNumbers]:
        return _done(self.engine.numbers())

    def jobs(self) -> Future[list[JobStatus]]:
        return _done(self.engine.jobs())

    def status(self) -> Future[EngineStatus]:
        engine = self.engine
        found = (engine.numbers(), engine.adapters(), engine.running(), engine.jobs())
        return _done(EngineStatus(*found))

    def health(self) -> Health:
        return self.engine.health()

    # ------------------------------------------------------------------------------- its life

    def wait(self, future: Future[Result]) -> Result:
        return future.result()

    def listening(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pause(self, timeout_s: float) -> Future[None]:
        return self.engine.pause(timeout_s)

    def go_on(self) -> Future[None]:
        return self.engine.go_on()

    def set_keys(self, keys: Keys) -> Future[None]:
        if self._base is not None:
            self._base.keys.become(keys)
        return _done(None)

    def drain(self, timeout_s: float) -> Future[None]:
        drained = self.engine.drain(timeout_s)
        return drained if self._base is None else _both(drained, self._base.drain())

    def close(self) -> None:
        """End its own thread, once nobody asks any more."""
        self._hashing.shutdown(cancel_futures=True)


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
        split: who may use its weights by split execution; None for nobody.
    """
    with ExitStack() as stack:
        # The address is taken first, so that one which cannot be is an answer at once.
        endpoint = None if split is None else stack.enter_context(split_endpoint(options))
        executor, base = load(), None
        engine = stack.enter_context(Engine(executor.state, options.engine(tenants)).start())
        if split is not None and endpoint is not None:
            serving = served_base(executor, engine, options, split, endpoint)
            base = stack.enter_context(serving)
        client = LocalClient(executor, engine, options, base)
        stack.callback(client.close)
        yield client


def _both(one: Future[None], other: Future[None]) -> Future[None]:
    """Return what is done once two futures are."""
    both: Future[None] = Future()

    def next_one(_: Future[None]) -> None:
        other.add_done_callback(lambda _: both.set_result(None))

    one.add_done_callback(next_one)
    return both


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future
