"""/tinker/api/v1: training runs, checkpoints and sessions of their owner."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import FileResponse

from pcg.errors import FinetuneError
from pcg.files import check_sums
from pcg.peft.adapter_files import CONFIG
from pcg.peft.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.tinker import listing_records as records
from pcg.serve.tinker import sampler_records
from pcg.serve.tinker.checkpoint_records import EXTERNAL, SAMPLER, WEIGHTS, CheckpointRecord
from pcg.serve.tinker.links import LIFE_S, LINKS, Links
from pcg.serve.tinker.model_records import ModelRecord
from pcg.serve.tinker.rest_wire import (
    KINDS,
    Checkpoints,
    Cursor,
    ExternalUrls,
    SessionDetails,
    SessionIds,
    TrainingRun,
    TrainingRuns,
    TtlBody,
    checkpoint_of,
    moment,
    texts_of,
)
from pcg.serve.tinker.session_records import SESSIONS
from pcg.serve.tinker.session_routes import PREFIX, Trainer
from pcg.serve.tinker.tinker import Tinker

router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=LongBodyRoute)

LINK = f"{LINKS}/{{token}}/{{name}}"
"""The path of files that need no key, but an address that nobody can guess."""

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Access = Literal["owned", "accessible"]
Project = Annotated[str | None, Query(max_length=256)]
_OF_RUN = "/training_runs/{run_id}/checkpoints"
_ONE = f"{_OF_RUN}/{{kind}}/{{name}}"


@router.get("/training_runs")
async def list_training_runs(
    service: ServiceDependency,
    caller: Trainer,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Access = "owned",
    project_id: Project = None,
) -> TrainingRuns:
    """List the tenant's models, the newest first; there are no projects, and no shared models."""
    _ = access_scope, project_id
    futures = service.part(Tinker).futures
    found, count = await futures.read(lambda one: records.models(one, caller.tenant, limit, offset))
    runs = [await _run(service, caller, one) for one in found]
    return TrainingRuns(
        training_runs=runs, cursor=Cursor(offset=offset, limit=limit, total_count=count)
    )


@router.get("/training_runs/{run_id}")
async def get_training_run(run_id: str, service: ServiceDependency, caller: Trainer) -> TrainingRun:
    """Return what is known of a model."""
    model = await service.part(Tinker).models.find(caller.tenant, run_id)
    return await _run(service, caller, model)


async def _run(service: Service, caller: Caller, model: ModelRecord) -> TrainingRun:
    found = await service.part(Tinker).futures.read(
        lambda one: records.of_model(one, model.id, caller.tenant)
    )

    def last(kind: str) -> CheckpointRecord | None:
        return next((one for one in found if one.kind == kind), None)

    state, sampler = last(WEIGHTS), last(SAMPLER)
    return TrainingRun(
        training_run_id=model.id,
        base_model=model.base_model,
        model_owner=caller.tenant,
        lora_rank=model.order.rank,
        last_request_time=moment(model.asked_s),
        last_checkpoint=None if state is None else checkpoint_of(state),
        last_sampler_checkpoint=None if sampler is None else checkpoint_of(sampler),
        user_metadata=texts_of(model.user_metadata),
    )


@router.get(_OF_RUN)
async def list_checkpoints(run_id: str, service: ServiceDependency, caller: Trainer) -> Checkpoints:
    """List the checkpoints of a model, the newest first."""
    model = await service.part(Tinker).models.find(caller.tenant, run_id)
    found = await service.part(Tinker).futures.read(
        lambda one: records.of_model(one, model.id, caller.tenant)
    )
    return Checkpoints(checkpoints=[checkpoint_of(one) for one in found])


@router.get("/checkpoints")
async def list_all_checkpoints(
    service: ServiceDependency, caller: Trainer, limit: Limit = 100, offset: Offset = 0
) -> Checkpoints:
    """List the tenant's checkpoints, the newest first."""
    found, count = await service.part(Tinker).futures.read(
        lambda one: records.checkpoints(one, caller.tenant, limit, offset)
    )
    cursor = Cursor(offset=offset, limit=limit, total_count=count)
    return Checkpoints(checkpoints=[checkpoint_of(one) for one in found], cursor=cursor)


@router.delete(_ONE, status_code=204)
async def delete_checkpoint(
    run_id: str, kind: KINDS, name: str, service: ServiceDependency, caller: Trainer
) -> Response:
    """Delete a checkpoint."""
    path = _path(run_id, kind, name)
    tinker = service.part(Tinker)
    folder = await tinker.futures.write(
        lambda one: records.delete(one, path, caller.tenant), may_use_reserve=True
    )
    if folder is None:
        raise _missing(path)
    await asyncio.to_thread(tinker.models.folders.remove, folder)
    return Response(status_code=204)


@router.post(f"{_ONE}/publish", status_code=204)
async def publish_checkpoint(
    run_id: str, kind: KINDS, name: str, service: ServiceDependency, caller: Trainer
) -> Response:
    """Have every tenant load a checkpoint and sample from it, by its path."""
    return await _publish(service, caller, _path(run_id, kind, name), is_public=True)


@router.delete(f"{_ONE}/publish", status_code=204)
async def unpublish_checkpoint(
    run_id: str, kind: KINDS, name: str, service: ServiceDependency, caller: Trainer
) -> Response:
    """Have a checkpoint be its owner's alone."""
    return await _publish(service, caller, _path(run_id, kind, name), is_public=False)


async def _publish(service: Service, caller: Caller, path: str, *, is_public: bool) -> Response:
    is_there = await service.part(Tinker).futures.write(
        lambda one: records.publish(one, path, caller.tenant, is_public=is_public)
    )
    if not is_there:
        raise _missing(path)
    return Response(status_code=204)


@router.put(f"{_ONE}/ttl", status_code=204)
async def set_ttl(
    run_id: str,
    kind: KINDS,
    name: str,
    body: TtlBody,
    service: ServiceDependency,
    caller: Trainer,
) -> Response:
    """Say how long a checkpoint stays from now on."""
    path = _path(run_id, kind, name)
    life = body.ttl_seconds
    expires_s = None if life is None else int(datetime.now(UTC).timestamp()) + life
    is_there = await service.part(Tinker).futures.write(
        lambda one: records.set_expiry(one, path, caller.tenant, expires_s)
    )
    if not is_there:
        raise _missing(path)
    return Response(status_code=204)


@router.get(f"{_ONE}/external_weights_urls")
async def external_weights_urls(
    run_id: str,
    kind: KINDS,
    name: str,
    request: Request,
    service: ServiceDependency,
    caller: Trainer,
) -> ExternalUrls:
    """Return addresses of a checkpoint's files in peft's format."""
    path = _path(run_id, kind, name)
    tinker = service.part(Tinker)
    found = await tinker.futures.read(lambda one: records.own(one, path, caller.tenant))
    if found is None:
        raise _missing(path)
    if kind != EXTERNAL:
        raise ApiError(400, f"{path} is for this server; save it by save_weights_external.")
    folder = tinker.models.folders.path(found.folder)
    try:
        await asyncio.to_thread(check_sums, folder, (CONFIG, ADAPTER_WEIGHTS), FinetuneError)
    except FinetuneError as error:
        raise tinker.models.folders.without_paths(error) from None
    files = await asyncio.to_thread(lambda: sorted(p for p in folder.iterdir() if p.is_file()))
    base = str(request.base_url).rstrip("/")
    expires = datetime.now(UTC) + timedelta(seconds=LIFE_S)
    urls = {one.name: base + service.part(Links).make(caller.tenant, one) for one in files}
    return ExternalUrls(urls=urls, expires=expires)


@router.get(
    LINK.removeprefix(PREFIX),
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def external_file(
    token: str, name: str, request: Request, service: ServiceDependency
) -> FileResponse:
    """Return a file by an address that was made for it."""
    _ = token, name
    found = service.part(Links).find(request.url.path)
    if found is None or not await asyncio.to_thread(found.file.is_file):
        raise ApiError(404, "There is no such file, or none any more.")
    headers = {"x-content-type-options": "nosniff"}
    return FileResponse(found.file, headers=headers, media_type="application/octet-stream")


@router.get("/sessions")
async def list_sessions(
    service: ServiceDependency,
    caller: Trainer,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Access = "owned",
) -> SessionIds:
    """List the tenant's sessions, the newest first."""
    _ = access_scope
    found = await service.part(Tinker).futures.read(
        lambda one: records.sessions(one, caller.tenant, limit, offset)
    )
    return SessionIds(sessions=found)


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, service: ServiceDependency, caller: Trainer
) -> SessionDetails:
    """Return what was made in a session."""
    futures, tenant = service.part(Tinker).futures, caller.tenant
    found = await futures.read(lambda one: SESSIONS.find(one, id=session_id, tenant=tenant))
    if found is None:
        raise ApiError(404, f"There is no session {session_id[:128]}.")
    return SessionDetails(
        training_run_ids=await futures.read(
            lambda one: records.of_session(one, session_id, tenant)
        ),
        sampler_ids=await futures.read(lambda one: sampler_records.of_session(one, session_id)),
        user_metadata=texts_of(found.user_metadata),
        display_name=found.display_name,
    )


def _path(run: str, kind: str, name: str) -> str:
    return f"tinker://{run}/{kind}/{name}"


def _missing(path: str) -> ApiError:
    return ApiError(404, f"There is no checkpoint {path[:256]}.")
