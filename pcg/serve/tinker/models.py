"""The models that clients train: creation, requests, copies and closing, each with a stream."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from pcg.errors import FinetuneError
from pcg.runtime.engine.commands import LoraOrder
from pcg.serve.adapters.loader import Loader
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.errors import LOG, ApiError
from pcg.serve.store.store import Store
from pcg.serve.store.tables import now
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.operations import Operations
from pcg.serve.tinker.records import (
    CHECKPOINTS,
    CLOSED,
    MODELS,
    OPEN,
    USER,
    CheckpointRecord,
    FutureRecord,
    ModelRecord,
    SessionRecord,
    end_left,
    find_checkpoint,
    forget_requests,
    path_of,
)
from pcg.serve.tinker.sessions import Sessions
from pcg.serve.tinker.streams import ModelStream

_MOST_AHEAD = 4096
"""The most positions that a request may be ahead of the last settled request."""


class Models:
    """The models of all tenants; for a single event loop.

    Attributes:
        folders: states and checkpoints.

    Args:
        do: runs a coroutine in the background.
    """

    def __init__(
        self,
        client: EngineClient,
        loader: Loader,
        store: Store,
        futures: Futures,
        sessions: Sessions,
        options: ServeOptions,
        do: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._client = client
        self._store = store
        self._futures = futures
        self._sessions = sessions
        self._most = options.tenant_trainers
        quota = options.tenant_files, options.tenant_files_bytes
        self._operations = Operations(client, loader, store, quota)
        self.folders = self._operations.folders
        self._do = do
        self._streams: dict[str, ModelStream] = {}
        self._ready = asyncio.Event()
        sessions.on_end.append(self._session_ended)

    async def begin(self) -> None:
        """Resume the models of an earlier run of the server."""
        await self._store.remove(end_left)
        models = await self._store.read(MODELS.select, order="ORDER BY id", status=OPEN)
        await self.folders.sweep()
        for model in models:
            stream = self._begin(model)
            await stream.recover()
            self._start(stream)
        self._ready.set()

    def _begin(self, model: ModelRecord) -> ModelStream:
        stream = ModelStream(model, self._client, self._store, self._futures, self._operations)
        self._streams[model.id] = stream
        return stream

    def _start(self, stream: ModelStream) -> None:
        if not self._sessions.is_open(stream.model.session):  # it ended during an await
            stream.close()
        self._do(self._run(stream))

    async def _run(self, stream: ModelStream) -> None:
        """Run a stream, then close its model."""
        if not await stream.run():  # the engine ends
            return
        self._streams.pop(stream.model.id, None)

        def act(connection: sqlite3.Connection) -> None:
            id, last = stream.model.id, stream.model.done_seq
            MODELS.change(connection, {"status": CLOSED, "state": None}, id=id)
            forget_requests(connection, id, 0, last)

        await self._store.remove(act)
        if stream.model.state is not None:
            await asyncio.to_thread(self.folders.remove, stream.model.state)

    async def _session_ended(self, session: SessionRecord) -> None:
        for stream in list(self._streams.values()):
            if stream.model.session == session.id:
                stream.close()

    # ------------------------------------------------------------------------------- requests

    async def create(
        self,
        tenant: str,
        place: tuple[str, int],
        base_model: str,
        lora: LoraOrder,
        metadata: dict[str, Any] | None,
        request: tuple[str, bytes],
    ) -> FutureRecord:
        """Create a model, as a future; a repeated position returns the first future.

        Args:
            place: the session, and the model's number in it.
            request: the verb that creates the model, and its body.
        Raises:
            ApiError: the session has ended, or the tenant trains too many models.
        """
        await self._ready.wait()
        session, seq = place
        self._sessions.beat(tenant, session)
        id = f"{session}:train:{seq}"
        words = None if metadata is None else json.dumps(metadata)
        model = ModelRecord(
            id, tenant, session, seq, base_model, msgspec.json.encode(lora).decode(), words, now(),
            now(),
        )  # fmt: skip

        def also(connection: sqlite3.Connection) -> None:
            count = MODELS.count(connection, tenant=tenant, status=OPEN)
            if count >= self._most:
                raise ApiError(
                    400,
                    f"You train {count} models, and --tenant-trainers is {self._most}; finish a "
                    "session, or unload a model.",
                    code="too_many_models",
                )
            if MODELS.find(connection, id=id, tenant=tenant) is not None:
                raise ApiError(400, f"{id} is a copy of a checkpoint.", param="model_seq_id")
            MODELS.insert(connection, model)

        kind, body = request
        future, is_new = await self._futures.promise(
            tenant, session, id, 0, kind, body, {"model_id": id}, also
        )
        if is_new:
            stream = self._begin(model)
            stream.put(future.seq)
            self._start(stream)
        return future

    async def ask(
        self, tenant: str, model_id: str, seq: int | None, kind: str, body: bytes
    ) -> FutureRecord:
        """Request an operation of a model, as a future; a repeated position returns the first.

        Args:
            seq: position of the request; None for the next.
        Raises:
            ApiError: 404, the model does not exist; 410, it is closed; 400, the position is
                invalid.
        """
        await self._ready.wait()
        model = await self.find(tenant, model_id)
        stream = self._streams.get(model_id)
        if stream is None or stream.is_closing or model.status != OPEN:
            raise ApiError(
                410, f"The model {model_id} is closed; create another one.", param="model_id"
            )
        self._sessions.beat(tenant, model.session)
        done_seq = stream.model.done_seq
        place = stream.behind if seq is None else seq
        if seq is not None and not 0 < seq <= max(done_seq, 0) + _MOST_AHEAD:
            raise ApiError(
                400,
                f"seq_id {place}, and the model is at {done_seq}; use the next number.",
                param="seq_id",
            )

        def also(connection: sqlite3.Connection) -> None:
            if place <= stream.model.done_seq:  # settled, and its result was removed
                raise ApiError(410, f"The request {place} has expired.", code="expired")
            MODELS.change(connection, {"asked_s": now()}, id=model_id)

        with stream.coming(place):
            future, is_new = await self._futures.promise(
                tenant, model.session, model_id, place, kind, body, {"model_id": model_id}, also
            )
            if is_new:
                stream.put(future.seq)
        if is_new and self._streams.get(model_id) is not stream:  # it ended during an await
            await self._futures.fail(future, "the model is closed", USER)
        return future

    def refuse(self, tenant: str, model_id: str, seq: int) -> None:
        """Record a refused request of a model, so that later requests do not wait for it.

        Do nothing if the tenant has no such model, or the position is invalid.
        """
        stream = self._streams.get(model_id)
        if stream is None or stream.model.tenant != tenant:
            return
        if 0 < seq <= max(stream.model.done_seq, 0) + _MOST_AHEAD:
            stream.refuse(seq)

    async def find(self, tenant: str, model_id: str) -> ModelRecord:
        model = await self._store.read(MODELS.find, id=model_id, tenant=tenant)
        if model is None:
            raise ApiError(404, f"There is no model {model_id[:256]}.", param="model_id")
        return model

    async def checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        try:
            return await self._operations.checkpoint(tenant, path)
        except FinetuneError as error:
            raise ApiError(404, str(error), param="path") from None

    # -------------------------------------------------------------------------------- copies

    async def copy(
        self, tenant: str, source: str, place: tuple[str, int], ttl_s: int | None
    ) -> str:
        """Copy a checkpoint to a new closed model by hard links. Return the copy's path.

        A repeated copy to the same place returns the first.

        Args:
            place: the caller's session, and the model's number in it; session ids without a client
                start with `COPIES`.
        Raises:
            ApiError: the checkpoint does not exist, or another model has the place.
            FinetuneError: the tenant has too many checkpoints.
        """
        saved = await self.checkpoint(tenant, source)
        session, seq = place
        id = f"{session}:train:{seq}"
        path, folder = path_of(id, saved.kind, saved.name), self.folders.new()
        await asyncio.to_thread(self.folders.link, saved.folder, folder)
        model = ModelRecord(
            id, tenant, session, seq, saved.base_model, saved.lora, None, now(), now(), CLOSED
        )
        copy = replace(
            saved, path=path, tenant=tenant, model=id, folder=folder, created_s=now(),
            expires_s=None if ttl_s is None else now() + ttl_s, is_public=0,
        )  # fmt: skip

        def act(connection: sqlite3.Connection) -> bool:
            before = MODELS.find(connection, id=id, tenant=tenant)
            if before is None:
                MODELS.insert(connection, model)
                self._operations.put(connection, copy, overwrites=False)
                return True
            is_copy = before.status == CLOSED and before.done_seq < 0
            if not is_copy or find_checkpoint(connection, path, tenant) is None:
                raise ApiError(400, f"There is a model {id} already.", param="model_seq_id")
            return False

        is_new = False
        try:
            is_new = await self._store.write(act)
        finally:
            if not is_new:
                await asyncio.to_thread(self.folders.remove, folder)
        return path

    async def expire(self) -> None:
        expired = await self._store.remove(CHECKPOINTS.delete, "expires_s <= ?", (now(),))
        for checkpoint in expired:
            await asyncio.to_thread(self.folders.remove, checkpoint.folder)
        if expired:
            LOG.info("%s checkpoints have expired", len(expired))
