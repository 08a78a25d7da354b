"""Endpoints of vLLM and SGLang that load and unload adapters, also for trainers.

`expected_version` (compare and swap), `owner` and `shared` (the adapter's owner) are extensions.
Replies have the loaded version in the headers `x-adapter-version` and `x-adapter-digest`.

External trainers use a server as their sampler: TRL's AsyncGRPO pauses the server, writes an
adapter, loads it under a new name and resumes the server. Requests wait during the pause
(docs/finetuning.md).
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from pcg.keys import Scope
from pcg.runtime.engine.commands import GoOn, Pause
from pcg.serve.adapters.catalog import Catalog, Load, invalid, version_headers
from pcg.serve.http.caller import Admin, Caller, requires
from pcg.serve.http.errors import ApiError, ErrorBody
from pcg.serve.http.service import LongBodyRoute, ServiceDependency, part
from pcg.serve.http.wire import WireModel

router = APIRouter(route_class=LongBodyRoute)

CatalogPart = Annotated[Catalog, part(Catalog)]
LongText = Annotated[str, Field(max_length=4096)]
PAUSE_S = 600.0
"""Longest pause, seconds; it bounds the effect of a client that never resumes."""


class _Owned(WireModel):
    """The owner of an adapter; with `shared`, all tenants may use it.

    The default is the owner of the present adapter with the name, else the key's tenant.
    """

    lora_name: LongText = ""

    owner: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    shared: bool | None = None

    def owner_for(self, catalog: Catalog, caller: Caller) -> str:
        """Return the tenant that owns the adapter; "" for the operator."""
        if self.shared and self.owner is not None:
            raise invalid("'shared' adapters have no 'owner'; leave one of them out.")
        if self.shared or self.owner is not None:
            return self.owner or ""
        is_private = self.shared is not None
        return caller.tenant if is_private else catalog.owner_of(caller, self.lora_name)


class LoadBody(_Owned):
    """An adapter to load. `is_3d_lora_weight` must be false."""

    lora_path: LongText = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    expected_version: Annotated[int, Field(ge=0)] | None = None


class UnloadBody(_Owned):
    """An adapter to unload. `lora_int_id` has no effect."""

    lora_int_id: int | None = None


class SglangLoad(WireModel):
    """An adapter to load. `pinned` has no effect: adapters loaded by name stay."""

    lora_name: LongText
    lora_path: LongText
    pinned: bool = False


class SglangUnload(WireModel):
    """An adapter to unload."""

    lora_name: LongText


class LoadedAdapters(BaseModel):
    """The result of a load or an unload, and the paths of the loaded adapters by name."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


class ModelConfig(BaseModel):
    """The base: name, dtype as torch names it, and maximum tokens."""

    model: str
    dtype: str
    max_model_len: int | None


class LoraConfig(BaseModel):
    """The most loaded adapters, and the highest rank."""

    max_lora_rank: int
    max_loras: int


class ParallelConfig(BaseModel):
    """A single engine, in which every loaded adapter is available."""

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1


class EngineConfig(BaseModel):
    """The parts of the configuration that trainers read.

    `lora_config` is None if no adapters can be loaded, without `--lora-roots`.
    """

    base: Annotated[ModelConfig, Field(serialization_alias="model_config")]
    lora_config: LoraConfig | None
    parallel_config: ParallelConfig
    weight_transfer_config: None = None


class ServerInfo(BaseModel):
    """The configuration, under vLLM's name."""

    vllm_config: EngineConfig


class State(BaseModel):
    """The state of the engine."""

    status: Literal["paused", "resumed"]


_PLAIN: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
_REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": LoadedAdapters | ErrorBody, "description": "The request is invalid."}
}


@router.post("/v1/load_lora_adapter", responses=_PLAIN, tags=["adapters"])
async def load_lora_adapter(
    body: LoadBody, caller: Admin, catalog: CatalogPart
) -> PlainTextResponse:
    """Load an adapter from a folder under the roots, or replace it in place."""
    if not body.lora_name or not body.lora_path:
        raise invalid("Both 'lora_name' and 'lora_path' must be provided.")
    if body.is_3d_lora_weight:
        raise invalid("'is_3d_lora_weight' is not supported; leave it out.")
    request = Load(
        body.lora_name,
        body.lora_path,
        body.owner_for(catalog, caller),
        is_replacing=body.load_inplace,
        expected_version=body.expected_version,
    )
    version = await catalog.load(request)
    text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
    return PlainTextResponse(text, headers=version_headers(version))


@router.post("/v1/unload_lora_adapter", responses=_PLAIN, tags=["adapters"])
async def unload_lora_adapter(
    body: UnloadBody, caller: Admin, catalog: CatalogPart
) -> PlainTextResponse:
    """Unload an adapter; running requests keep it."""
    if not body.lora_name:
        raise invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
    await catalog.unload(body.lora_name, body.owner_for(catalog, caller))
    text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
    return PlainTextResponse(text)


@router.post(
    "/load_lora_adapter",
    response_model=LoadedAdapters,
    responses=_REFUSED,
    tags=["adapters"],
    name="load_lora_adapter",
)
async def load_as_sglang(body: SglangLoad, caller: Admin, catalog: CatalogPart) -> Response:
    """Load an adapter from a folder under the roots."""
    try:
        owner = catalog.owner_of(caller, body.lora_name)
        await catalog.load(Load(body.lora_name, body.lora_path, owner))
    except ApiError as error:
        return _loaded(catalog, caller, error)
    return _loaded(catalog, caller)


@router.post(
    "/unload_lora_adapter",
    response_model=LoadedAdapters,
    responses=_REFUSED,
    tags=["adapters"],
    name="unload_lora_adapter",
)
async def unload_as_sglang(body: SglangUnload, caller: Admin, catalog: CatalogPart) -> Response:
    """Unload an adapter; running requests keep it."""
    try:
        await catalog.unload(body.lora_name, catalog.owner_of(caller, body.lora_name))
    except ApiError as error:
        return _loaded(catalog, caller, error)
    return _loaded(catalog, caller)


def _loaded(catalog: Catalog, caller: Caller, error: ApiError | None = None) -> Response:
    reply = LoadedAdapters(
        success=error is None,
        error_message="" if error is None else str(error.detail),
        loaded_adapters={model.name: model.root for model in catalog.visible(caller)[1:]},
    )
    status = 200 if error is None else 400
    return Response(reply.model_dump_json(), status, media_type="application/json")


@router.get("/server_info", dependencies=[Depends(requires(Scope.INFER))], tags=["server"])
async def server_info(
    service: ServiceDependency, catalog: CatalogPart, config_format: Literal["json"] = "json"
) -> ServerInfo:
    """Return the configuration in the shape that vLLM's trainers read."""
    facts, options = service.client.facts, service.options
    loads = LoraConfig(max_lora_rank=options.max_lora_rank, max_loras=options.max_cpu_loras)
    base = ModelConfig(
        model=catalog.base.name, dtype=facts.dtype, max_model_len=service.max_model_len
    )
    config = EngineConfig(
        base=base,
        lora_config=loads if options.lora_roots else None,
        parallel_config=ParallelConfig(),
    )
    return ServerInfo(vllm_config=config)


@router.post("/pause", dependencies=[Depends(requires(Scope.ADMIN))], tags=["server"])
async def pause(service: ServiceDependency, mode: Literal["keep"]) -> State:
    """Stop all steps until /resume. Requests and jobs are kept, and new requests wait.

    The pause ends by itself after ten minutes, and when the server drains.
    """
    await asyncio.wrap_future(service.client.call(Pause(PAUSE_S)))
    return State(status="paused")


@router.post("/resume", dependencies=[Depends(requires(Scope.ADMIN))], tags=["server"])
async def resume(service: ServiceDependency) -> State:
    """Run steps again."""
    await asyncio.wrap_future(service.client.call(GoOn()))
    return State(status="resumed")
