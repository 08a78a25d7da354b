"""Custom losses of clients: checked once, kept, and named by the passes of their session."""

from __future__ import annotations

import json
import sqlite3

import msgspec

from pcg.runtime.training.loss_graph import LossGraph
from pcg.serve.http.errors import ApiError
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker import future_records
from pcg.serve.tinker import loss_records as records
from pcg.serve.tinker.future_records import JSON, FutureRecord
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.loss_records import LossRecord
from pcg.serve.tinker.sessions import Sessions

CREATE_LOSS = "create_custom_loss"
MOST_BYTES = 2**16
"""The most bytes of a graph as JSON."""


class Losses:
    """The custom losses of all sessions; for one event loop."""

    def __init__(self, futures: Futures, sessions: Sessions) -> None:
        self._futures = futures
        self._sessions = sessions

    async def begin(self) -> None:
        """Settle what was promised when the server ended."""
        pending = await self._futures.read(lambda one: future_records.pending(one, CREATE_LOSS))
        for id, tenant in pending:
            await self._settle(await self._futures.retrieve(tenant, id, 0))

    async def create(self, tenant: str, session: str, seq: int, graph: LossGraph) -> FutureRecord:
        """Promise a loss of a session; a second one of a number is the first.

        Raises:
            ApiError: there is no such session, or the graph or their number is too large.
            FinetuneError: the graph may not run; names the node, and why.
        """
        self._sessions.find(tenant, session)
        graph.check()
        text = msgspec.json.encode(graph).decode()
        if len(text) > MOST_BYTES:
            raise ApiError(
                400, f"The loss has {len(text)} bytes; use at most {MOST_BYTES}.", param="graph"
            )
        record = LossRecord(new_key("loss-"), tenant, session, seq, text, now())

        def beside(connection: sqlite3.Connection) -> None:
            records.insert(connection, record)

        future, is_new = await self._futures.promise(
            tenant, session, f"{session}:losses", seq, CREATE_LOSS, b"", None, beside
        )
        if is_new:
            await self._settle(future)
        return future

    async def _settle(self, future: FutureRecord) -> None:
        def act(connection: sqlite3.Connection) -> LossRecord | None:
            return records.LOSSES.find(connection, session=future.session, seq=future.seq)

        found = await self._futures.read(act)
        assert found is not None  # it was written with the promise
        told = {"loss_id": found.id, "type": CREATE_LOSS}

        def forget(connection: sqlite3.Connection) -> None:
            future_records.forget_requests(connection, future.stream, future.seq, future.seq)

        await self._futures.resolve(future, json.dumps(told).encode(), JSON, forget)
