"""The work of a rank that follows: the first rank's orders, in their order."""

from __future__ import annotations

from collections.abc import Callable

from pcg.errors import ParallelError
from pcg.parallel.ranks.line import Line
from pcg.peft.adapter import Adapter
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
from pcg.runtime.metrics.events import Kind
from pcg.runtime.model.state import ModelState
from pcg.runtime.requests.plain import request_of_plain
from pcg.runtime.training.options import JobArguments

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
            adapter = None if order.adapter is None else self._kept.adapter(order.adapter)
            request = request_of_plain(order.prompt_ids, order.params, adapter, order.own)
            engine.submit(request, order.submitted_s)
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
