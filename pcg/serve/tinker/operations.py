"""Operations of a model: the engine's part of each verb, and its reply.

An operation changes the store only in the transaction that stores its result. So an operation that
a crash interrupts leaves no trace and can be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pcg.errors import FinetuneError, PcgError
from pcg.files import drop_files, sync_names
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
from pcg.serve.adapters.loader import Loader, Origin
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.http.errors import LOG, ApiError
from pcg.serve.store.contents import named_paths, note_removal
from pcg.serve.store.store import Store
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker.passes import call_of, loss_id_of, order_of, result_of
from pcg.serve.tinker.records import (
    CHECKPOINTS,
    CLOSED,
    EXTERNAL,
    JSON,
    LOSSES,
    MODELS,
    OPEN,
    PROTOBUF,
    SAMPLER,
    SAMPLERS,
    SESSIONS,
    WEIGHTS,
    CheckpointRecord,
    FutureRecord,
    ModelRecord,
    SamplerRecord,
    find_checkpoint,
    forget_requests,
    insert_sampler,
    path_of,
    surplus_sampler,
    used_by_weights,
)

CREATE, LOAD_MODEL, UNLOAD = "create_model", "load_model", "unload_model"
PASS, PASS_JSON = "forward_backward", "forward_backward_json"
FORWARD, FORWARD_JSON = "forward", "forward_json"
STEP, LOAD = "optim_step", "load_weights"
SAVE, SAVE_SAMPLER, SAVE_EXTERNAL = "save_weights", "save_weights_for_sampler", "save_external"
REPLAYED = (PASS, PASS_JSON, STEP)
"""The verbs that change a trainer's state; they are replayed after the last saved state."""

_KINDS = {SAVE: WEIGHTS, SAVE_SAMPLER: SAMPLER, SAVE_EXTERNAL: EXTERNAL}
_STATE_ALONE = ("optimizer.safetensors", "trainer_state.json")
"""Files of a training state that are not part of an adapter."""

Also = Callable[[sqlite3.Connection], None]


# ------------------------------------------------------------------------------------------ folders


def adapter_name(tenant: str, folder: str) -> str:
    """Return the engine's name of a tenant's adapter in a folder."""
    return engine_name(tenant, f"tinker-{hashlib.sha256(folder.encode()).hexdigest()[:32]}")


def checkpoint_origin() -> Origin:
    """Return the origin of a checkpoint's adapter, which may be unloaded to free a place."""
    return Origin("the checkpoint", now(), is_found=True)


class Folders:
    """The folders of states and checkpoints in a store: tinker/KEY/.

    Attributes:
        root: the folder of the store.
    """

    def __init__(self, store: Store) -> None:
        self.root = store.folder
        self._store = store
        (self.root / "tinker").mkdir(exist_ok=True)
        self._before = sorted((self.root / "tinker").iterdir())

    def new(self) -> str:
        return f"tinker/{secrets.token_hex(16)}"

    def path(self, folder: str) -> Path:
        return self.root / folder

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.path(folder), ignore_errors=True)

    def link(self, source: str, folder: str) -> None:
        """Hard-link a folder's files into a new folder. FinetuneError: the source is missing."""
        try:
            shutil.copytree(self.path(source), self.path(folder), copy_function=os.link)
        except (OSError, shutil.Error) as error:
            self.remove(folder)
            raise FinetuneError("the checkpoint is gone, or cannot be linked") from error
        sync_names(self.path(folder))

    def strip(self, folder: str) -> None:
        drop_files(self.path(folder), _STATE_ALONE)
        sync_names(self.path(folder))

    def size_bytes(self, folder: str) -> int:
        return sum(file.stat().st_size for file in self.path(folder).iterdir() if file.is_file())

    def without_paths(self, error: Exception) -> Exception:
        """Return an error without the server's paths in its text."""
        text = str(error)
        if not isinstance(error, PcgError) or str(self.root) not in text:
            return error
        return FinetuneError(text.replace(f"{self.root}/", "").replace(str(self.root), ""))

    async def sweep(self) -> None:
        """Remove folders from before the start that no row names, or move them to quarantine."""
        named = await self._store.read(named_paths)
        unnamed = [p for p in self._before if str(p.relative_to(self.root)) not in named]
        await asyncio.to_thread(self._store.discard, unnamed)


# --------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Outcome:
    """The result of an operation.

    Attributes:
        also: writes further rows with the result.
        folder: new folder, which is removed if the result cannot be written.
        state: folder of the saved state after the operation.
        stale: folder that no row names after the result is written.
        step: record row of an update, including `step`.
    """

    result: bytes
    media_type: str = JSON
    also: Also | None = None
    folder: str | None = None
    state: str | None = None
    stale: str | None = None
    step: Mapping[str, float] | None = None


class Operations:
    """The operations of all models.

    Args:
        most: the most checkpoints of a tenant, and their bytes.
    """

    def __init__(
        self, client: EngineClient, loader: Loader, store: Store, most: tuple[int, int]
    ) -> None:
        self._client = client
        self._loader = loader
        self._store = store
        self._most = most
        self.folders = Folders(store)
        self._acts: Mapping[str, Callable[[ModelRecord, FutureRecord], Awaitable[Outcome]]] = {
            CREATE: self._create,
            LOAD_MODEL: self._load_model,
            LOAD: self._load,
            UNLOAD: self._unload,
            STEP: self._step,
            **dict.fromkeys((PASS, PASS_JSON, FORWARD, FORWARD_JSON), self._pass),
            **dict.fromkeys((SAVE, SAVE_SAMPLER, SAVE_EXTERNAL), self._save),
        }

    async def do(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        """Execute an operation. Raises a PcgError or an ApiError if it is impossible."""
        return await self._acts[future.kind](model, future)

    async def begin(self, model: ModelRecord) -> None:
        """Create a model's trainer in the engine with the last durable state."""
        name = engine_name(model.tenant, model.id)
        await asyncio.wrap_future(self._client.call(BeginTrainer(name, model.tenant, model.order)))
        if model.state is None:
            return
        try:
            await self._run(model, LoadState(self.folders.path(model.state)))
        except FinetuneError as error:
            order = "ORDER BY created_s DESC, rowid DESC LIMIT 1"
            saved = await self._store.read(
                CHECKPOINTS.select, order=order, model=model.id, kind=WEIGHTS
            )
            fix = f"create a model from {saved[0].path}" if saved else "create another model"
            reason = str(error).partition(";")[0]
            raise FinetuneError(f"the model cannot continue: {reason}; {fix}") from error

    async def end(self, model: ModelRecord) -> None:
        name = engine_name(model.tenant, model.id)
        await asyncio.wrap_future(self._client.call(EndTrainer(name)))

    async def keep_state(self, model: ModelRecord) -> str:
        """Save a model's state. Return its folder."""
        folder = self.folders.new()
        await self._store.write(note_removal, folder)
        try:
            await self._run(model, SaveState(self.folders.path(folder)))
        except BaseException:
            self.folders.remove(folder)
            raise
        return folder

    async def _run(self, model: ModelRecord, command: TrainerCommands) -> Any:
        name = engine_name(model.tenant, model.id)
        return await asyncio.wrap_future(self._client.call(Train(name, command)))

    async def _create(self, model: ModelRecord, _: FutureRecord) -> Outcome:
        await self.begin(model)
        return _reply({"model_id": model.id, "type": CREATE})

    async def _load_model(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        await self.begin(model)
        try:
            return await self._load(model, future)
        except BaseException:
            await self.end(model)
            raise

    async def _load(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        body = future.body
        saved = await self.checkpoint(model.tenant, body["path"])
        if saved.kind != WEIGHTS:
            raise FinetuneError(f"{saved.path} is not a training state; load one of save_weights")
        if _shape(saved) != _shape(model):
            raise FinetuneError(
                f"{saved.path} is of a LoRA of rank {saved.order.rank}, and the model has rank "
                f"{model.order.rank} or other modules; create the model from the checkpoint"
            )
        path = self.folders.path(saved.folder)
        await self._run(model, LoadState(path, optimizer=bool(body["optimizer"])))
        state = await self.keep_state(model)
        outcome = _reply({"path": saved.path, "model_id": model.id, "type": LOAD})
        return replace(outcome, folder=state, state=state, stale=model.state)

    async def _unload(self, model: ModelRecord, _: FutureRecord) -> Outcome:
        await self.end(model)
        return _reply({"model_id": model.id, "type": UNLOAD})

    async def checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        """Return a checkpoint that a tenant may load. FinetuneError: there is none."""
        saved = await self._store.read(find_checkpoint, path, tenant)
        if saved is None:
            raise FinetuneError(f"there is no checkpoint {path[:256]}, or it has expired")
        return saved

    async def _pass(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        assert future.request is not None
        is_json = future.kind in (PASS_JSON, FORWARD_JSON)
        call = await asyncio.to_thread(call_of, future.request, is_json=is_json)
        loss_id = loss_id_of(call)
        graph = None if loss_id is None else await self._graph(model, loss_id)
        order = await asyncio.to_thread(order_of, call, graph, trains=future.kind in REPLAYED)
        scored: Scored = await self._run(model, order)
        result = await asyncio.to_thread(result_of, call, scored, is_json=is_json)
        return Outcome(result, JSON if is_json else PROTOBUF)

    async def _graph(self, model: ModelRecord, loss_id: str) -> LossGraph:
        loss = await self._store.read(LOSSES.find, id=loss_id, session=model.session)
        if loss is None:
            raise FinetuneError(
                f"there is no custom loss {loss_id[:128]!r} in this session; make one by "
                "create_custom_loss"
            )
        return loss.loss

    async def _step(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        body = future.body
        betas = body.pop("beta1"), body.pop("beta2")
        clip = body.pop("grad_clip_norm") or None
        command = OptimStep(**body, betas=betas, grad_clip_norm=clip)
        stepped: Stepped = await self._run(model, command)
        metrics = {"grad_norm:mean": stepped.gradient_norm, "step:max": float(stepped.step)}
        numbers = {**vars(stepped), "learning_rate": body["learning_rate"]}
        return replace(_reply({"metrics": metrics}), step=numbers)

    # ------------------------------------------------------------------------------- saving

    async def _save(self, model: ModelRecord, future: FutureRecord) -> Outcome:
        body, kind = future.body, _KINDS[future.kind]
        name = body["path"] or f"{future.seq:06d}"
        path = path_of(model.id, kind, name)
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
        ttl, metadata = body["ttl_seconds"], body.get("user_metadata")
        record = CheckpointRecord(
            path, model.tenant, model.id, kind, name, folder, model.base_model, model.lora,
            None if metadata is None else json.dumps(metadata), size, now(),
            None if ttl is None else now() + ttl,
        )  # fmt: skip
        reply: dict[str, Any] = {"path": path, "type": future.kind}
        if kind == EXTERNAL:
            reply = {"path": path, "size_bytes": size, "type": "save_weights_external"}
        # An expired checkpoint of the path may not have been removed yet.
        before = await self._store.read(find_checkpoint, path, model.tenant, 0)

        def also(connection: sqlite3.Connection) -> None:
            self.put(connection, record, overwrites=body.get("overwrite", False))

        stale = None if before is None else before.folder
        return replace(_reply(reply), also=also, folder=folder, stale=stale)

    async def _for_sampler(self, model: ModelRecord, seq: int, folder: str, size: int) -> Outcome:
        """Return the outcome of weights for a new ephemeral sampling session."""
        sampler = SamplerRecord(
            new_key("smp-"), model.tenant, model.session, seq, model.base_model, None, folder,
            now(), size,
        )  # fmt: skip
        oldest = await self._store.read(surplus_sampler, model.session)
        try:
            await self._serve(model, folder)
        except BaseException:
            self.folders.remove(folder)
            raise

        def also(connection: sqlite3.Connection) -> None:
            # The end of a session removes its weights.
            if not SESSIONS.count(connection, id=model.session, status=OPEN):
                raise FinetuneError("the session has ended; open another session")
            if insert_sampler(connection, sampler) != sampler:
                raise FinetuneError(f"the session has a sampling session {seq} already")
            if oldest is not None:
                SAMPLERS.delete(connection, id=oldest.id)
            self._check_used(connection, model.tenant)

        outcome = _reply({"sampling_session_id": sampler.id, "type": SAVE_SAMPLER})
        stale = None if oldest is None else oldest.folder
        return replace(outcome, also=also, folder=folder, stale=stale)

    async def _serve(self, model: ModelRecord, folder: str) -> None:
        """Serve the trainer's weights in the engine under the name of their folder's adapter."""
        name = adapter_name(model.tenant, folder)

        async def serve() -> None:
            await self._run(model, Publish(name))

        try:
            await self._loader.take(name, checkpoint_origin(), serve)
        except ApiError as error:  # no free place: the folder is loaded later
            LOG.info("weights of %s are not served yet: %s", model.id, error.detail)

    def put(
        self, connection: sqlite3.Connection, record: CheckpointRecord, *, overwrites: bool
    ) -> None:
        """Add a checkpoint. FinetuneError: the path exists, or the tenant has too many."""
        if not overwrites and find_checkpoint(connection, record.path, record.tenant):
            raise FinetuneError(
                f"there is a checkpoint {record.path} already; use another name, or overwrite=True"
            )
        CHECKPOINTS.insert(connection, record, "OR REPLACE")
        self._check_used(connection, record.tenant)

    def _check_used(self, connection: sqlite3.Connection, tenant: str) -> None:
        count, size = used_by_weights(connection, tenant)
        most_count, most_size = self._most
        if count > most_count or size > most_size:
            raise FinetuneError(
                f"you would have {count} checkpoints of {size} bytes; a tenant may have "
                f"{most_count} checkpoints and {most_size} bytes; delete some"
            )


def _shape(record: ModelRecord | CheckpointRecord) -> object:
    """Return a LoRA's settings without its seed, on which no state depends."""
    order = record.order
    return order.rank, order.train_attn, order.train_mlp, order.train_unembed


def settle_row(model: ModelRecord, future: FutureRecord, outcome: Outcome | None) -> Also:
    """Return the write of a model's row with a result; the outcome is None for a failure."""

    def act(connection: sqlite3.Connection) -> None:
        if outcome is not None and outcome.also is not None:
            outcome.also(connection)
        columns: dict[str, str | int | None] = {"done_seq": future.seq}
        if outcome is not None and outcome.state is not None:
            columns |= {"state": outcome.state, "state_seq": future.seq}
            forget_requests(connection, model.id, 0, future.seq)
        elif outcome is not None and future.kind == UNLOAD:
            columns |= {"status": CLOSED, "state": None}
            forget_requests(connection, model.id, 0, future.seq)
        elif outcome is None or future.kind not in REPLAYED:
            forget_requests(connection, model.id, future.seq, future.seq)
        MODELS.change(connection, columns, id=model.id)

    return act


def _reply(content: object) -> Outcome:
    return Outcome(json.dumps(content).encode())
