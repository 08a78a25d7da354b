"""The engine of any rank but the first: does what the first one orders, until that is closed.

with executor.engine(limits).start() as running:  # on every rank
    if executor.ranks.rank == 0:
        …                                         # the others wait at the end of the `with`

The work of a rank that follows: the first rank's orders, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from pcg.errors import EngineError, ParallelError
from pcg.peft.adapter import Adapter
from pcg.ranks.line import Line
from pcg.runtime.data.limits import DataLimits
from pcg.runtime.engine.jobs import Job
from pcg.runtime.engine.loop import EngineLoop
from pcg.runtime.engine.ranks.adapter_order import adapter_of, put_adapter
from pcg.runtime.engine.ranks.job_order import given_by
from pcg.runtime.engine.ranks.known_versions import KeptVersions
from pcg.runtime.engine.ranks.orders import (
    Add,
    Cancel,
    Change,
    Drop,
    End,
    Message,
    Order,
    Prepare,
    Put,
    Remove,
    Step,
    Submit,
    message_of,
    names_of,
    order_of,
)
from pcg.runtime.engine.ranks.ranked_engine import RankedEngine
from pcg.runtime.metrics.events import Kind
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.request import Chunk, Request
from pcg.runtime.requests.stream import Stream
from pcg.runtime.training.options import JobArguments

# ----------------------------------------------------------------------------------------- follower


_CHANGES = ("cancel_job", "interrupt_job", "pause_job", "resume_job")


class Follower:
    """Follows the first rank; called by the engine's thread alone."""

    def __init__(
        self,
        line: Line,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
    ) -> None:
        self._line = line
        self._engine = engine
        self._state = state
        self._prepare_job = prepare_job
        self._kept = KeptVersions(state)
        self._prepared: dict[str, Job] = {}
        self._done = 0
        self._failed: set[int] = set()
        self._failed_there: set[int] = set()
        self._end: End | None = None
        state.versions.agreed = self._alive

    def follow(self) -> str:
        """Do what is ordered, and return why it ended.

        Raises:
            RankLostError: another rank is gone.
            ParallelError: an order has failed on one of the two ranks alone.
        """
        while self._end is None:
            message = message_of(self._line.receive())
            self._compare(message)
            for encoded in message.orders:
                self._try(order_of(encoded))
            for name in message.released:
                self._kept.release(name)
        return self._end.text

    def close(self) -> None:
        """Follow nobody any more."""
        self._state.versions.agreed = None
        self._kept.close()
        for job in self._prepared.values():
            job.cancel()

    def _compare(self, message: Message) -> None:
        """Compare which orders of earlier messages have failed here and there."""
        self._failed_there.update(message.failed)
        earlier = {number for number in self._failed_there if number < self._done}
        if earlier != self._failed:
            number = min(earlier ^ self._failed)
            place = "on this rank alone" if number in self._failed else "on rank 0 alone"
            raise ParallelError(
                f"rank {self._line.rank} of {self._line.size} is not as rank 0 is: order {number} "
                f"has failed {place}. All ranks have to start again"
            )
        self._failed.clear()
        self._failed_there -= earlier

    def _try(self, order: Order) -> None:
        number, self._done = self._done, self._done + 1
        try:
            self._do(order)
        except Exception:
            if isinstance(order, Step):  # of which no rank goes on
                raise
            self._failed.add(number)

    def _do(self, order: Order) -> None:
        engine, state = self._engine, self._state
        if isinstance(order, Step):
            engine.step()
        elif isinstance(order, Submit):
            name = order.request.adapter
            adapter = None if name is None else self._kept.adapter(name)
            engine.submit(order.request.request(adapter), order.submitted_s)
        elif isinstance(order, Cancel):
            engine.cancel(order.request, Kind(order.kind))
        elif isinstance(order, Put):
            put_adapter(state, order.name, lambda: adapter_of(order, state))
        elif isinstance(order, Remove):
            state.remove_adapter(order.name)
        elif isinstance(order, Prepare):
            job = self._prepare_job(given_by(order))
            self._prepared[job.name] = job
        elif isinstance(order, Add):
            engine.add_job(self._prepared.pop(order.name))
        elif isinstance(order, Drop):
            engine.drop_job(self._prepared.pop(order.name))
        elif isinstance(order, Change):
            if order.method not in _CHANGES:
                raise ParallelError(f"rank 0 orders {order.method!r}, which no rank does")
            getattr(engine, order.method)(order.name)
        else:
            self._end = order

    def _alive(self, _: list[Adapter]) -> list[Adapter]:
        """Return the adapters that are alive on the first rank."""
        return [self._kept.adapter(name) for name in names_of(self._line.receive())]


# --------------------------------------------------------------------------------- following engine


Result = TypeVar("Result")


class FollowingEngine(RankedEngine):
    """The async engine of a rank that follows: it can be waited for, and tells how it goes."""

    def __init__(
        self,
        engine: EngineLoop,
        state: ModelState,
        prepare_job: Callable[[JobArguments], Job],
        line: Line,
        free: Callable[[], None],
    ) -> None:
        self._follower = Follower(line, engine, state, prepare_job)
        super().__init__(engine, state, prepare_job, DataLimits(), line, free)

    def follow(self) -> None:
        """Wait until the first rank closes its engine.

        Raises:
            EngineError: it ended by an error, as where a rank is lost; the engine is over here.
        """
        error = self.join()
        if error.__cause__ is not None:
            raise error

    def close(self) -> None:
        """Wait until the first rank closes its engine. EngineError: as of `follow`."""
        self.follow()

    def __exit__(self, *raised: object) -> None:
        self._leave(raised[1])

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self._leave, raised[1])

    def _leave(self, raised: object) -> None:
        """Wait for the end; after an error on this rank, tell the others that it has left."""
        if raised is None:
            self.follow()
        else:
            self._line.leave_word(f"{type(raised).__name__}: {raised}")

    def _run_steps(self) -> None:
        rank = self._line.rank
        try:
            why = self._follower.follow()
            ended = EngineError(f"rank 0, which rank {rank} follows, ended its engine: {why}")
        except BaseException as error:
            ended = EngineError(
                f"the engine's thread on rank {rank} ended by {type(error).__name__}: {error}"
            )
            ended.__cause__ = error
        self._follower.close()
        self._end(ended)

    # ------------------------------------------------------------------------------- refused

    def _refuse(self) -> NoReturn:
        if self.ended is not None:
            raise self.ended
        raise EngineError(
            f"this is rank {self._line.rank} of an engine over {self._line.size} ranks, which "
            "follows rank 0 and takes nothing itself; make the call on rank 0 alone, and follow() "
            "on the others"
        )

    def _check_open(self) -> None:
        self._refuse()

    def submit_request(self, request: Request, make: Any = Stream) -> Stream:
        self._refuse()

    def call(self, act: Callable[[], Result]) -> Future[Result]:
        self._refuse()

    def stream_all(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        self._refuse()

    def remove_adapter(self, name: str) -> Future[None]:
        self._refuse()

    def drain(self, timeout_s: float | None = None) -> Future[None]:
        self._refuse()
