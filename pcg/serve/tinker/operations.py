"""Operations of a model: what each kind of request has the engine do, and what it answers.

An operation changes the store only in the transaction that keeps its result. So one that a crash
cut off left nothing behind, and is done again as if it had never begun.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pcg.errors import FinetuneError
from pcg.runtime.engine.commands import BeginTrainer, EndTrainer, Train
from pcg.runtime.training.loss_graph import LossGraph
from pcg.runtime.training.trainer.commands import (
    LoadState,
    OptimStep,
    Publish,
    SaveState,
    TrainerCommands,
)
from pcg.runtime.training.trainer.datum import Scored, Stepped
from pcg.serve.adapters.loader import Loader
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.http.errors import LOG, ApiError
from pcg.serve.store.contents import note_removal
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker import checkpoint_records as checkpoints
from pcg.serve.tinker import future_records
from pcg.serve.tinker import loss_records as losses
from pcg.serve.tinker import sampler_records as samplers
from pcg.serve.tinker.checkpoint_records import EXTERNAL, SAMPLER, WEIGHTS, CheckpointRecord
from pcg.serve.tinker.folders import Folders, adapter_name, checkpoint_origin
from pcg.serve.tinker.future_records import JSON, PROTOBUF, FutureRecord
from pcg.serve.tinker.futures import Futures
from pcg.serve.tinker.model_records import CLOSED, MODELS, ModelRecord
from pcg.serve.tinker.passes import call_of, json_result, loss_id_of, order_of, proto_result
from pcg.serve.tinker.sampler_records import SamplerRecord
from pcg.serve.tinker.session_records import OPEN, SESSIONS

CREATE, LOAD_MODEL, UNLOAD = "create_model", "load_model", "unload_model"
PASS, PASS_JSON = "forward_backward", "forward_backward_json"
FORWARD, FORWARD_JSON = "forward", "forward_json"
STEP, LOAD = "optim_step", "load_weights"
SAVE, SAVE_SAMPLER, SAVE_EXTERNAL = "save_weights", "save_weights_for_sampler", "save_external"
REPLAYED = (PASS, PASS_JSON, STEP)
"""The kinds that a model's state depends on, unless a state behind them is kept."""

Also = Callable[[sqlite3.Connection], None]


@dataclass(frozen=True)
class Outcome:
    """The result of an operation.

    Attributes:
        also: what is written with it.
        folder: a folder that was made, which goes if it cannot be written.
        state: the folder of a state behind it, which is kept from now on.
        stale: a folder that nothing names once it is written.
        step: of an update, the numbers of its record, `step` among them.
    """

    result: bytes
    media_type: str = JSON
    also: Also | None = None
    folder: str | None = None
    state: str | None = None
    stale: str | None = None
    step: Mapping[str, float] | None = None


class Operations:
    """Does operations, of all models.

    Args:
        most: the most checkpoints of a tenant, and their bytes.
    """

    def __init__(
        self,
        client: EngineClient,
        loader: Loader,
        futures: Futures,
        folders: Folders,
        most: tuple[int, int],
    ) -> None:
        self._client = client
        self._loader = loader
        self._futures = futures
        self._most = most
        self.folders = folders
        self._acts: Mapping[str, Callable[[ModelRecord, FutureRecord], Awaitable[Outcome]]] = {
            CREATE: self._create,
            LOAD_MODEL: self._load_model,
            LOAD: self._load,
            UNLOAD: self._unload,
            PASS: self._pass,
            PASS_JSON: self._pass,
            FORWARD: self._pass,
            FORWARD_JSON: self._pass,
            STEP: self._step,
            SAVE: self._save,
            SAVE_SAMPLER: self._save,
            SAVE_EXTERNAL: self._save,
        }

    async def do(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        """Do an operation; a PcgError or an ApiError says why it cannot be."""
        return await self._acts[future.kind](model, future)

    async def begin(self, model: ModelRecord) -> None:
        """Have the engine make a model's trainer, with the state that is kept."""
        name = engine_name(model.tenant, model.id)
        await asyncio.wrap_future(self._client.call(BeginTrainer(name, model.tenant, model.order)))
        if model.state is None:
            return
        try:
            await self._run(model, LoadState(self.folders.path(model.state)))
        except FinetuneError as error:
            found = await self._futures.read(lambda one: checkpoints.last(one, model.id))
            fix = "make another one" if found is None else f"make another one from {found}"
            what = str(error).partition(";")[0]
            raise FinetuneError(f"the model cannot go on: {what}; {fix}") from error

    async def end(self, model: ModelRecord) -> None:
        """Have the engine free what it has of a model."""
        name = engine_name(model.tenant, model.id)
        await asyncio.wrap_future(self._client.call(EndTrainer(name)))

    async def keep_state(self, model: ModelRecord) -> str:
        """Write a model's state; returns its folder."""
        folder = self.folders.new()
        await self._futures.write(lambda one: note_removal(one, folder))
        try:
            await self._run(model, SaveState(self.folders.path(folder)))
        except BaseException:
            self.folders.remove(folder)
            raise
        return folder

    async def _run(self, model: ModelRecord, command: TrainerCommands) -> Any:
        name = engine_name(model.tenant, model.id)
        return await asyncio.wrap_future(self._client.call(Train(name, command)))

    # ------------------------------------------------------------------------------- models

    async def _create(self, model: ModelRecord, _: FutureRecord) -> Outcome:
        await self.begin(model)
        return _json({"model_id": model.id, "type": CREATE})

    async def _load_model(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        await self.begin(model)
        try:
            return await self._load(model, future)
        except BaseException:
            await self.end(model)
            raise

    async def _load(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        body = _body(future)
        saved = await self.checkpoint(model.tenant, body["path"])
        if saved.kind != WEIGHTS:
            raise FinetuneError(f"{saved.path} is no state to train on; load one of save_weights")
        if _shape(saved) != _shape(model):
            raise FinetuneError(
                f"{saved.path} is of a LoRA of rank {saved.order.rank}, and the model has rank "
                f"{model.order.rank} or other modules; create the model from the checkpoint"
            )
        path = self.folders.path(saved.folder)
        await self._run(model, LoadState(path, optimizer=bool(body["optimizer"])))
        state = await self.keep_state(model)
        told = {"path": saved.path, "model_id": model.id, "type": LOAD}
        return replace(_json(told), folder=state, state=state, stale=model.state)

    async def _unload(self, model: ModelRecord, _: FutureRecord) -> Outcome:
        await self.end(model)
        return _json({"model_id": model.id, "type": UNLOAD})

    async def checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        """Return a checkpoint that a tenant may load. FinetuneError: there is none."""
        found = await self._futures.read(lambda one: checkpoints.find(one, path, tenant, now()))
        if found is None:
            raise FinetuneError(f"there is no checkpoint {path[:256]}, or none any more")
        return found

    # ------------------------------------------------------------------------------- training

    async def _pass(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        assert future.request is not None
        is_json = future.kind in (PASS_JSON, FORWARD_JSON)
        call = await asyncio.to_thread(call_of, future.request, is_json=is_json)
        loss_id = loss_id_of(call)
        graph = None if loss_id is None else await self._graph(model, loss_id)
        order = await asyncio.to_thread(order_of, call, graph, trains=future.kind in REPLAYED)
        scored: Scored = await self._run(model, order)
        if is_json:
            return Outcome(await asyncio.to_thread(json_result, call, scored))
        return Outcome(await asyncio.to_thread(proto_result, call, scored), PROTOBUF)

    async def _graph(self, model: ModelRecord, loss_id: str) -> LossGraph:
        found = await self._futures.read(
            lambda one: losses.LOSSES.find(one, id=loss_id, session=model.session)
        )
        if found is None:
            raise FinetuneError(
                f"there is no custom loss {loss_id[:128]!r} in this session; make one by "
                "create_custom_loss"
            )
        return found.loss

    async def _step(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        body = _body(future)
        betas = body.pop("beta1"), body.pop("beta2")
        clip = body.pop("grad_clip_norm") or None
        command = OptimStep(**body, betas=betas, grad_clip_norm=clip)
        stepped: Stepped = await self._run(model, command)
        metrics = {"grad_norm:mean": stepped.gradient_norm, "step:max": float(stepped.step)}
        numbers = {**vars(stepped), "learning_rate": body["learning_rate"]}
        return replace(_json({"metrics": metrics}), step=numbers)

    # ------------------------------------------------------------------------------- saving

    async def _save(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        body = _body(future)
        kind = {SAVE: WEIGHTS, SAVE_SAMPLER: SAMPLER, SAVE_EXTERNAL: EXTERNAL}[future.kind]
        name = body["path"] or f"{future.seq:06d}"
        path = checkpoints.path_of(model.id, kind, name)
        folder = await self.keep_state(model)
        try:
            if kind != WEIGHTS:
                await asyncio.to_thread(self.folders.strip, folder)
            size = await asyncio.to_thread(self.folders.size_bytes, folder)
        except BaseException:
            self.folders.remove(folder)
            raise
        if body.get("sampling_session_seq_id") is not None:
            return await self._for_sampler(model, body["sampling_session_seq_id"], folder, size)
        ttl, metadata = body["ttl_seconds"], body["user_metadata"]
        record = CheckpointRecord(
            path, model.tenant, model.id, kind, name, folder, model.base_model, model.lora,
            None if metadata is None else json.dumps(metadata), size, now(),
            None if ttl is None else now() + ttl,
        )  # fmt: skip
        told: dict[str, Any] = {"path": path, "type": future.kind}
        if kind == EXTERNAL:
            told = {"path": path, "size_bytes": size, "type": "save_weights_external"}
        there = await self._futures.read(  # or one that has expired, and is there still
            lambda one: checkpoints.find(one, path, model.tenant, 0)
        )
        stale = None if there is None else there.folder

        def also(connection: sqlite3.Connection) -> None:
            self.put(connection, record, overwrites=body["overwrite"])

        return replace(_json(told), also=also, folder=folder, stale=stale)

    async def _for_sampler(self, model: ModelRecord, seq: int, folder: str, size: int) -> Outcome:
        """Return the outcome of weights for one sampling session, which is opened with them."""
        record = SamplerRecord(
            new_key("smp-"), model.tenant, model.session, seq, model.base_model, None, folder,
            now(), size,
        )  # fmt: skip
        oldest = await self._futures.read(lambda one: samplers.surplus(one, model.session))
        try:
            await self._serve(model, folder)
        except BaseException:
            self.folders.remove(folder)
            raise

        def also(connection: sqlite3.Connection) -> None:
            # A session that ended took them with it.
            if not SESSIONS.count(connection, id=model.session, status=OPEN):
                raise FinetuneError("the session has ended, and weights for it with it")
            if samplers.insert(connection, record) != record:
                raise FinetuneError(f"the session has a sampling session {seq} already")
            if oldest is not None:
                samplers.SAMPLERS.delete(connection, id=oldest.id)
            self._check_used(connection, model.tenant)

        told = {"sampling_session_id": record.id, "type": SAVE_SAMPLER}
        stale = None if oldest is None else oldest.folder
        return replace(_json(told), also=also, folder=folder, stale=stale)

    async def _serve(self, model: ModelRecord, folder: str) -> None:
        """Have the engine serve the trainer's weights, as those of a folder that has them."""
        name = adapter_name(model.tenant, folder)

        async def serve() -> None:
            await self._run(model, Publish(name))

        try:
            await self._loader.take(name, checkpoint_origin(), serve)
        except ApiError as error:  # others have all places: the folder is read once one is free
            LOG.info("weights of %s are not served yet: %s", model.id, error.detail)

    def put(
        self, connection: sqlite3.Connection, record: CheckpointRecord, *, overwrites: bool
    ) -> None:
        """Add a checkpoint. FinetuneError: there is one of its path, or the tenant has too many."""
        if not overwrites and checkpoints.find(connection, record.path, record.tenant, now()):
            raise FinetuneError(
                f"there is a checkpoint {record.path} already; use another name, or overwrite=True"
            )
        checkpoints.insert(connection, record)
        self._check_used(connection, record.tenant)

    def _check_used(self, connection: sqlite3.Connection, tenant: str) -> None:
        """Refuse weights of a tenant that keeps too many."""
        count, size = checkpoints.used(connection, tenant)
        most_count, most_size = self._most
        if count > most_count or size > most_size:
            raise FinetuneError(
                f"you would keep {count} checkpoints of {size} bytes, and this server keeps "
                f"{most_count} and {most_size} bytes of a tenant; delete some"
            )


def _shape(record: ModelRecord | CheckpointRecord) -> object:
    """Return a LoRA but for its seed, which no state depends on."""
    order = record.order
    return order.rank, order.train_attn, order.train_mlp, order.train_unembed


def settle_row(model: ModelRecord, future: FutureRecord, outcome: Outcome | None) -> Also:
    """Return what is written of a model when one of its requests is settled; None is a failure."""

    def act(connection: sqlite3.Connection) -> None:
        if outcome is not None and outcome.also is not None:
            outcome.also(connection)
        columns: dict[str, str | int | None] = {"done_seq": future.seq}
        if outcome is not None and outcome.state is not None:
            columns |= {"state": outcome.state, "state_seq": future.seq}
            future_records.forget_requests(connection, model.id, 0, future.seq)
        elif outcome is not None and future.kind == UNLOAD:
            columns |= {"status": CLOSED, "state": None}
            future_records.forget_requests(connection, model.id, 0, future.seq)
        elif outcome is None or future.kind not in REPLAYED:
            future_records.forget_requests(connection, model.id, future.seq, future.seq)
        MODELS.change(connection, columns, id=model.id)

    return act


def _body(future: FutureRecord) -> dict[str, Any]:
    assert future.request is not None
    found: dict[str, Any] = json.loads(future.request)
    return found


def _json(content: object) -> Outcome:
    return Outcome(json.dumps(content).encode())
