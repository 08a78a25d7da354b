"""Liveness, version and load of the server, and the OpenAPI schema with its security."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from pcg.keys import Scope
from pcg.runtime.engine.commands import Numbers
from pcg.runtime.metrics.status import EngineState
from pcg.serve.http.caller import Infer, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import ServiceDependency
from pcg.version import __version__

# ------------------------------------------------------------------------------------------- schema


_KEYS: dict[str, dict[str, str]] = {
    "basic": {"type": "http", "scheme": "basic"},
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
"""The alternative ways to send a key."""


def schema_of(app: FastAPI, public: Collection[str]) -> dict[str, Any]:
    """Return the OpenAPI schema of an application, with its keys.

    Args:
        public: the paths that need no key.
    """
    schema = app.openapi()
    paths: dict[str, Any] = {
        path: {method: {**operation, "security": []} for method, operation in operations.items()}
        if path in public
        else operations
        for path, operations in schema["paths"].items()
    }
    components = {**schema.get("components", {}), "securitySchemes": _KEYS}
    security: list[dict[str, list[str]]] = [{name: []} for name in _KEYS]
    return {**schema, "paths": paths, "components": components, "security": security}


# ------------------------------------------------------------------------------------------- health


router = APIRouter(tags=["server"])


class Status(BaseModel):
    """The state of the server."""

    status: str


class Version(BaseModel):
    """The version of pcg."""

    version: str


class Load(BaseModel):
    """The load of the server, as in vLLM: the running and waiting requests."""

    server_load: int


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(service: ServiceDependency) -> Status:
    """Answer 200 while requests are taken, else 503."""
    engine = service.client.health()
    if engine.state is not EngineState.RUNNING:
        raise ApiError(503, f"The engine is {engine.state.value}.", code=engine.state.value)
    return Status(status=engine.state.value)


@router.get("/ping", dependencies=[Depends(requires(Scope.INFER))])
@router.post("/ping", dependencies=[Depends(requires(Scope.INFER))])
async def ping(service: ServiceDependency) -> Status:
    """Answer as /health, but require a key."""
    return await health(service)


@router.get("/version", dependencies=[Depends(requires(Scope.INFER))])
async def version() -> Version:
    """Return the version of pcg."""
    return Version(version=__version__)


@router.get("/load")
async def load(service: ServiceDependency, caller: Infer) -> Load:
    """Return the number of requests in the engine, for keys that may see other tenants' use."""
    if not service.shows_engine(caller):
        raise ApiError(
            403,
            f"The key {caller.key!r} lacks the scope 'metrics'.",
            code="insufficient_permissions",
        )
    numbers = await asyncio.wrap_future(service.client.call(Numbers()))
    return Load(server_load=numbers.running + numbers.queued)


@router.get("/openapi.json", dependencies=[Depends(requires(Scope.INFER))])
async def openapi(request: Request) -> JSONResponse:
    """Return the schema of this API."""
    return JSONResponse(schema_of(request.app, request.app.state.public))
