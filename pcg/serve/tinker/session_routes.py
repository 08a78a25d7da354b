"""/tinker/api/v1: what a client needs to know, and its sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from pcg.keys import Scope
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.tinker.tinker import Tinker
from pcg.serve.tinker.wire import (
    Accepted,
    Capabilities,
    ClientConfig,
    ConfigBody,
    DynamicConfig,
    FinishBody,
    Health,
    Heartbeat,
    HeartbeatBody,
    Session,
    SessionBody,
    SupportedModel,
)

PREFIX = "/tinker/api/v1"
MOST_DATUMS = 1024
"""The most data of one request; the client cuts more into several."""
_BODY_SHARE = 0.9
"""The share of the largest body that the client's estimate of one may have."""

router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=LongBodyRoute)

Trainer = Annotated[Caller, Depends(requires(Scope.TRAIN))]


@router.get("/healthz")
async def healthz(_: Trainer) -> Health:
    """Say that the server lives."""
    return Health()


@router.post("/client/config")
async def client_config(
    body: ConfigBody, service: ServiceDependency, caller: Trainer, response: Response
) -> ClientConfig:
    """Tell a client how large its requests may be. A 400 where the server keeps nothing."""
    _, _, _ = body, service.part(Tinker), caller
    response.headers["connection"] = "close"  # the client leaves this one open
    return ClientConfig(
        fwdbwd_max_chunk_len=MOST_DATUMS,
        fwdbwd_max_chunk_bytes_count=int(service.options.max_body_bytes * _BODY_SHARE),
        sample_max_concurrent_requests=max(1, service.options.key_requests // 4),
    )


@router.post("/client/dynamic_config")
async def dynamic_config(body: ConfigBody, caller: Trainer) -> DynamicConfig:
    """Tell a client what may change while it runs."""
    _, _ = body, caller
    return DynamicConfig()


@router.get("/get_server_capabilities")
async def capabilities(service: ServiceDependency, caller: Trainer) -> Capabilities:
    """List the base, by each of its names."""
    _ = caller
    most = service.max_model_len
    names = service.part(Catalog).names
    return Capabilities(
        supported_models=[SupportedModel(model_name=one, max_context_length=most) for one in names]
    )


@router.post("/create_session")
async def create_session(body: SessionBody, service: ServiceDependency, caller: Trainer) -> Session:
    """Open a session, which has to beat."""
    made = await service.part(Tinker).sessions.create(caller.tenant, body)
    return Session(session_id=made.id)


@router.post("/session_heartbeat")
async def heartbeat(body: HeartbeatBody, service: ServiceDependency, caller: Trainer) -> Heartbeat:
    """Note that a session lives; 410 if it has ended."""
    service.part(Tinker).sessions.beat(caller.tenant, body.session_id)
    return Heartbeat()


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(
    session_id: str, body: FinishBody, service: ServiceDependency, caller: Trainer
) -> Response:
    """End a session; the first reason holds."""
    await service.part(Tinker).sessions.finish(caller.tenant, session_id, body.reason.type)
    return Response(status_code=204)


@router.post("/telemetry")
async def telemetry(request: Request, caller: Trainer) -> Accepted:
    """Take a client's telemetry, of which nothing is kept."""
    _ = caller
    await request.body()
    return Accepted()
