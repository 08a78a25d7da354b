"""SGLang's endpoints that load and unload adapters, with its replies."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from pcg.serve.adapters.catalog import Catalog
from pcg.serve.adapters.changes import Load, load, owner_of, unload
from pcg.serve.adapters.routes import Admin, LongText
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError, ErrorBody
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.http.wire import WireModel

router = APIRouter(tags=["adapters"], route_class=LongBodyRoute)


class SglangLoad(WireModel):
    """An adapter to load. `pinned` has no effect: what is loaded by name stays."""

    lora_name: LongText
    lora_path: LongText
    pinned: bool = False


class SglangUnload(WireModel):
    """An adapter to unload."""

    lora_name: LongText


class LoadedAdapters(BaseModel):
    """The end of a load or an unload, and the adapters that are there, by name with their paths."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


_REPLIES: dict[int | str, dict[str, Any]] = {
    400: {"model": LoadedAdapters | ErrorBody, "description": "It cannot be."}
}


@router.post("/load_lora_adapter", response_model=LoadedAdapters, responses=_REPLIES)
async def load_lora_adapter(
    body: SglangLoad, service: ServiceDependency, caller: Admin
) -> Response:
    """Load an adapter from a folder under the roots."""
    try:
        owner = owner_of(service, caller, body.lora_name)
        await load(service, Load(body.lora_name, body.lora_path, owner))
    except ApiError as error:
        return _reply(service, caller, error)
    return _reply(service, caller)


@router.post("/unload_lora_adapter", response_model=LoadedAdapters, responses=_REPLIES)
async def unload_lora_adapter(
    body: SglangUnload, service: ServiceDependency, caller: Admin
) -> Response:
    """Unload an adapter; requests that it answers end on it."""
    try:
        await unload(service, body.lora_name, owner_of(service, caller, body.lora_name))
    except ApiError as error:
        return _reply(service, caller, error)
    return _reply(service, caller)


def _reply(service: Service, caller: Caller, error: ApiError | None = None) -> Response:
    there = service.part(Catalog).visible(caller)[1:]
    reply = LoadedAdapters(
        success=error is None,
        error_message="" if error is None else str(error.detail),
        loaded_adapters={model.name: model.root for model in there},
    )
    status = 200 if error is None else 400
    return Response(reply.model_dump_json(), status, media_type="application/json")
