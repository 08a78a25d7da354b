"""/tinker/api/v1: training runs, checkpoints and sessions of their owner, and their files."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import FileResponse

from pcg.errors import FinetuneError
from pcg.files import check_sums
from pcg.peft.adapter_files import CONFIG
from pcg.peft.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from pcg.serve.http.caller import Caller, Trainer
from pcg.serve.http.errors import UNSUPPORTED, ApiError
from pcg.serve.http.service import LongBodyRoute, part
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker.records import (
    CHECKPOINTS,
    COPIES,
    EXTERNAL,
    LIVES,
    MODELS,
    SAMPLER,
    SAMPLERS,
    SESSIONS,
    WEIGHTS,
    CheckpointRecord,
    ModelRecord,
    newest,
)
from pcg.serve.tinker.routes import PREFIX, TinkerPart
from pcg.serve.tinker.tinker import LIFE_S, LINKS, Links, Tinker
from pcg.serve.tinker.wire import (
    KINDS,
    Checkpoint,
    Checkpoints,
    CopyBody,
    Cursor,
    ExternalUrls,
    SessionDetails,
    TrainingRun,
    TrainingRuns,
    TtlBody,
    moment,
    texts_of,
)

router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=LongBodyRoute)

LINK = f"{LINKS}/{{token}}/{{name}}"
"""Path of files that need an unguessable address in place of a key."""

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Access = Literal["owned", "accessible"]
Project = Annotated[str | None, Query(max_length=256)]
LinksPart = Annotated[Links, part(Links)]
_OF_RUN = "/training_runs/{run_id}/checkpoints"
_CHECKPOINT = f"{_OF_RUN}/{{kind}}/{{name}}"


@router.get("/training_runs")
async def list_training_runs(
    tinker: TinkerPart,
    caller: Trainer,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Access = "owned",
    project_id: Project = None,
) -> TrainingRuns:
    """List the tenant's models, the newest first; projects and shared models are not supported."""
    models, count = await tinker.store.read(newest, MODELS, limit, offset, caller.tenant)
    return TrainingRuns(
        training_runs=[await _run(tinker, model) for model in models],
        cursor=Cursor(offset=offset, limit=limit, total_count=count),
    )


@router.get("/training_runs/{run_id}")
async def get_training_run(run_id: str, tinker: TinkerPart, caller: Trainer) -> TrainingRun:
    """Return a model and its last checkpoints."""
    return await _run(tinker, await tinker.models.find(caller.tenant, run_id))


async def _run(tinker: Tinker, model: ModelRecord) -> TrainingRun:
    checkpoints = await _checkpoints_of(tinker, model)

    def last(kind: str) -> Checkpoint | None:
        return next((Checkpoint.of(row) for row in checkpoints if row.kind == kind), None)

    return TrainingRun(
        training_run_id=model.id,
        base_model=model.base_model,
        model_owner=model.tenant,
        lora_rank=model.order.rank,
        last_request_time=moment(model.asked_s),
        last_checkpoint=last(WEIGHTS),
        last_sampler_checkpoint=last(SAMPLER),
        user_metadata=texts_of(model.user_metadata),
    )


async def _checkpoints_of(tinker: Tinker, model: ModelRecord) -> list[CheckpointRecord]:
    order = "ORDER BY created_s DESC, rowid DESC"
    return await tinker.store.read(
        CHECKPOINTS.select, LIVES, (now(),), order, model=model.id, tenant=model.tenant
    )


@router.get(_OF_RUN)
async def list_checkpoints(run_id: str, tinker: TinkerPart, caller: Trainer) -> Checkpoints:
    """List the checkpoints of a model, the newest first."""
    rows = await _checkpoints_of(tinker, await tinker.models.find(caller.tenant, run_id))
    return Checkpoints(checkpoints=[Checkpoint.of(row) for row in rows])


@router.get("/checkpoints")
async def list_all_checkpoints(
    tinker: TinkerPart, caller: Trainer, limit: Limit = 100, offset: Offset = 0
) -> Checkpoints:
    """List the tenant's checkpoints, the newest first."""
    rows, count = await tinker.store.read(newest, CHECKPOINTS, limit, offset, caller.tenant)
    cursor = Cursor(offset=offset, limit=limit, total_count=count)
    return Checkpoints(checkpoints=[Checkpoint.of(row) for row in rows], cursor=cursor)


@router.delete(_CHECKPOINT, status_code=204)
async def delete_checkpoint(
    run_id: str, kind: KINDS, name: str, tinker: TinkerPart, caller: Trainer
) -> Response:
    """Delete a checkpoint."""
    path = _path(run_id, kind, name)
    deleted = await tinker.store.remove(CHECKPOINTS.delete, path=path, tenant=caller.tenant)
    if not deleted:
        raise _missing(path)
    await asyncio.to_thread(tinker.models.folders.remove, deleted[0].folder)
    return Response(status_code=204)


@router.post(f"{_CHECKPOINT}/publish", status_code=204)
async def publish_checkpoint(
    run_id: str, kind: KINDS, name: str, tinker: TinkerPart, caller: Trainer
) -> Response:
    """Let every tenant load a checkpoint and sample from it, by its path."""
    return await _change(tinker, caller, _path(run_id, kind, name), is_public=1)


@router.delete(f"{_CHECKPOINT}/publish", status_code=204)
async def unpublish_checkpoint(
    run_id: str, kind: KINDS, name: str, tinker: TinkerPart, caller: Trainer
) -> Response:
    """Withdraw other tenants' access to a checkpoint."""
    return await _change(tinker, caller, _path(run_id, kind, name), is_public=0)


@router.put(f"{_CHECKPOINT}/ttl", status_code=204)
async def set_ttl(
    run_id: str, kind: KINDS, name: str, body: TtlBody, tinker: TinkerPart, caller: Trainer
) -> Response:
    """Set the remaining lifetime of a checkpoint."""
    life_s = body.ttl_seconds
    expires_s = None if life_s is None else now() + life_s
    return await _change(tinker, caller, _path(run_id, kind, name), expires_s=expires_s)


async def _change(tinker: Tinker, caller: Caller, path: str, **columns: Any) -> Response:
    """Change a checkpoint of a caller. ApiError: the caller has no such checkpoint."""
    count = await tinker.store.write(CHECKPOINTS.change, columns, path=path, tenant=caller.tenant)
    if not count:
        raise _missing(path)
    return Response(status_code=204)


@router.post("/copy_weights")
async def copy_weights(
    body: CopyBody, request: Request, tinker: TinkerPart, caller: Trainer
) -> dict[str, str]:
    """Copy a checkpoint that the caller may load; a repeated request returns the first copy."""
    if "x-tinker-weights-access-token" in request.headers:
        words = "Access tokens of other accounts are not supported; publish the checkpoint."
        raise ApiError(400, words, code=UNSUPPORTED)
    if body.session_id is not None and body.model_seq_id is not None:
        tinker.sessions.find(caller.tenant, body.session_id)
        place = body.session_id, body.model_seq_id
    else:  # the client sends the same key with all attempts
        attempt = request.headers.get("x-idempotency-key") or new_key("")
        parts = f"{caller.tenant}\0{attempt}\0{body.source_path}"
        place = f"{COPIES}{hashlib.sha256(parts.encode()).hexdigest()[:32]}", 0
    path = await tinker.models.copy(caller.tenant, body.source_path, place, body.ttl_seconds)
    return {"tinker_path": path}


@router.get(f"{_CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run_id: str,
    kind: KINDS,
    name: str,
    request: Request,
    tinker: TinkerPart,
    links: LinksPart,
    caller: Trainer,
) -> ExternalUrls:
    """Return addresses of a checkpoint's files in peft's format."""
    path, folders = _path(run_id, kind, name), tinker.models.folders
    saved = await tinker.store.read(
        CHECKPOINTS.find, LIVES, (now(),), path=path, tenant=caller.tenant
    )
    if saved is None:
        raise _missing(path)
    if kind != EXTERNAL:
        raise ApiError(400, f"{path} is for this server; save it by save_weights_external.")
    folder = folders.path(saved.folder)
    try:
        await asyncio.to_thread(check_sums, folder, (CONFIG, ADAPTER_WEIGHTS), FinetuneError)
    except FinetuneError as error:
        raise folders.without_paths(error) from None
    files = await asyncio.to_thread(lambda: sorted(p for p in folder.iterdir() if p.is_file()))
    base = str(request.base_url).rstrip("/")
    urls = {file.name: base + links.make(caller.tenant, file) for file in files}
    return ExternalUrls(urls=urls, expires=datetime.now(UTC) + timedelta(seconds=LIFE_S))


@router.get(
    LINK.removeprefix(PREFIX),
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def external_file(token: str, name: str, request: Request, links: LinksPart) -> FileResponse:
    """Return a file by its unguessable address."""
    link = links.find(request.url.path)
    if link is None or not await asyncio.to_thread(link.file.is_file):
        raise ApiError(404, "There is no such file, or it has expired.")
    headers = {"x-content-type-options": "nosniff"}
    return FileResponse(link.file, headers=headers, media_type="application/octet-stream")


@router.get("/sessions")
async def list_sessions(
    tinker: TinkerPart,
    caller: Trainer,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Access = "owned",
) -> dict[str, list[str]]:
    """List the tenant's sessions, the newest first."""
    order = f"ORDER BY id DESC LIMIT {limit} OFFSET {offset}"
    rows = await tinker.store.read(SESSIONS.read, "id", order=order, tenant=caller.tenant)
    return {"sessions": [id for (id,) in rows]}


@router.get("/sessions/{session_id}")
async def get_session(session_id: str, tinker: TinkerPart, caller: Trainer) -> SessionDetails:
    """Return a session, with its models and samplers."""
    store, tenant, order = tinker.store, caller.tenant, "ORDER BY seq"
    session = await store.read(SESSIONS.find, id=session_id, tenant=tenant)
    if session is None:
        raise ApiError(404, f"There is no session {session_id[:128]}.")
    models = await store.read(MODELS.read, "id", order=order, session=session_id, tenant=tenant)
    samplers = await store.read(SAMPLERS.read, "id", order=order, session=session_id)
    return SessionDetails(
        training_run_ids=[id for (id,) in models],
        sampler_ids=[id for (id,) in samplers],
        user_metadata=texts_of(session.user_metadata),
        display_name=session.display_name,
    )


def _path(run: str, kind: str, name: str) -> str:
    return f"tinker://{run}/{kind}/{name}"


def _missing(path: str) -> ApiError:
    return ApiError(404, f"There is no checkpoint {path[:256]}.")
