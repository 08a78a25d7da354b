"""/tinker/api/v1: sessions, futures of training and of samples, and their results.

A route validates a request, stores it as a future, and replies. Clients also number refused
requests, so the position of a refused request is recorded and later requests do not wait for it.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from pcg.errors import PcgError
from pcg.runtime.engine.commands import LoraOrder
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.http.caller import Caller, Trainer
from pcg.serve.http.errors import UNSUPPORTED, ApiError, as_api_error
from pcg.serve.http.service import Handler, LongBodyRoute, Service, ServiceDependency, part
from pcg.serve.http.wire import json_bytes
from pcg.serve.tinker import operations
from pcg.serve.tinker.passes import call_of, decompressed
from pcg.serve.tinker.proto import place_of
from pcg.serve.tinker.records import FAILED, JSON, PENDING, PROTOBUF
from pcg.serve.tinker.samplers import Samplers
from pcg.serve.tinker.tinker import Tinker, promise_of
from pcg.serve.tinker.wire import (
    Capabilities,
    ClientConfig,
    ConfigBody,
    CreateModelBody,
    CustomLossBody,
    DynamicConfig,
    FinishBody,
    HeartbeatBody,
    LoadBody,
    ModelBody,
    ModelData,
    ModelInfo,
    PathBody,
    PlacedBody,
    Promise,
    RetrieveBody,
    SampleBody,
    Sampler,
    SamplingSessionBody,
    SaveBody,
    SaveExternalBody,
    SaveSamplerBody,
    SessionBody,
    StepBody,
    SupportedModel,
    WeightsInfo,
)

PREFIX = "/tinker/api/v1"
MOST_DATUMS = 1024
"""The most data of a request; the client splits larger batches."""
POLL_S = 25.0
"""Longest wait of a `retrieve_future` request, seconds; the client's timeout is 45 s."""
_BODY_SHARE = 0.9
"""Share of the maximum body that the client's estimated body size may have."""
_REFUSALS = (400, 404, 415, 422)
"""Statuses of requests that clients do not retry."""

TinkerPart = Annotated[Tinker, part(Tinker)]
SamplersPart = Annotated[Samplers, part(Samplers)]
CatalogPart = Annotated[Catalog, part(Catalog)]


class PlacedRoute(LongBodyRoute):
    """A route that records the positions of requests that it refuses."""

    async def answer(self, handle: Handler, request: Request) -> Response:
        try:
            return await handle(request)
        except (RequestValidationError, ApiError, PcgError) as error:
            is_invalid = isinstance(error, RequestValidationError)
            if is_invalid or as_api_error(error).status_code in _REFUSALS:
                await _note(request)
            raise


async def _note(request: Request) -> None:
    service: Service = request.app.state.service
    caller: Caller = request.state.caller
    try:
        body = await _body_of(request)
    except (ApiError, PcgError):
        return
    place = await service.beside(caller, _place, body, is_json=not _is_protobuf(request))
    if place is not None:
        service.part(Tinker).models.refuse(caller.tenant, *place)


async def _body_of(request: Request) -> bytes:
    """Return a request's body, decompressed if necessary.

    Raises:
        ApiError: 415, its encoding is not zstd.
        DataError: it cannot be decompressed, or has too many bytes.
    """
    service: Service = request.app.state.service
    caller: Caller = request.state.caller
    body, encoding = await request.body(), request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        return await service.beside(caller, decompressed, body, service.options.max_body_bytes)
    if encoding != "identity":
        raise ApiError(
            415, f"The body is encoded by {encoding[:32]!r}; use zstd, or send it as is."
        )
    return body


def _is_protobuf(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip() == PROTOBUF


def _place(body: bytes, *, is_json: bool) -> tuple[str, int] | None:
    """Return the model that a body names, and the position; None if the body names none."""
    if not is_json:
        return place_of(body)
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return None
    fields = read if type(read) is dict else {}
    model, seq = fields.get("model_id"), fields.get("seq_id")
    return (model, seq) if type(model) is str and type(seq) is int else None


router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=PlacedRoute)


# ---------------------------------------------------------------------------- clients and sessions


@router.get("/healthz")
async def healthz(_: Trainer) -> dict[str, str]:
    """Reply that the server runs."""
    return {"status": "ok"}


@router.post("/client/config")
async def client_config(
    body: ConfigBody, service: ServiceDependency, _: TinkerPart, __: Trainer, response: Response
) -> ClientConfig:
    """Return the limits of a client's requests. 400 if the server has no data folder."""
    response.headers["connection"] = "close"  # the client would leave the connection open
    return ClientConfig(
        fwdbwd_max_chunk_len=MOST_DATUMS,
        fwdbwd_max_chunk_bytes_count=int(service.options.max_body_bytes * _BODY_SHARE),
        sample_max_concurrent_requests=max(1, service.options.key_requests // 4),
    )


@router.post("/client/dynamic_config")
async def dynamic_config(body: ConfigBody, _: Trainer) -> DynamicConfig:
    """Return the settings that may change while a client runs."""
    return DynamicConfig()


@router.get("/get_server_capabilities")
async def capabilities(
    service: ServiceDependency, catalog: CatalogPart, _: Trainer
) -> Capabilities:
    """List the base under each of its names."""
    most = service.max_model_len
    models = [SupportedModel(model_name=name, max_context_length=most) for name in catalog.names]
    return Capabilities(supported_models=models)


@router.post("/create_session")
async def create_session(body: SessionBody, tinker: TinkerPart, caller: Trainer) -> dict[str, str]:
    """Open a session; the client must send heartbeats."""
    session = await tinker.sessions.create(caller.tenant, body)
    return {"type": "create_session", "session_id": session.id}


@router.post("/session_heartbeat")
async def heartbeat(body: HeartbeatBody, tinker: TinkerPart, caller: Trainer) -> dict[str, str]:
    """Record a heartbeat; 410 if the session has ended."""
    tinker.sessions.beat(caller.tenant, body.session_id)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(
    session_id: str, body: FinishBody, tinker: TinkerPart, caller: Trainer
) -> Response:
    """End a session; only the first reason is stored."""
    await tinker.sessions.finish(caller.tenant, session_id, body.reason.type)
    return Response(status_code=204)


@router.post("/telemetry")
async def telemetry(request: Request, _: Trainer) -> dict[str, str]:
    """Accept and discard a client's telemetry."""
    await request.body()
    return {"status": "accepted"}


@router.post("/retrieve_future")
async def retrieve_future(body: RetrieveBody, tinker: TinkerPart, caller: Trainer) -> Response:
    """Return a result, its error, or that it is pending."""
    futures = tinker.futures
    future = await futures.retrieve(caller.tenant, body.request_id, POLL_S)
    if future.state == PENDING:
        if futures.is_closing:  # clients retry other replies than a 429 without a pause
            raise ApiError(429, "The server ends; retry after its restart.", code="ending")
        reply = {"type": "try_again", "request_id": future.id, "queue_state": "active"}
        return Response(json_bytes(reply), media_type=JSON)
    assert future.result is not None
    if future.state == FAILED:
        failure = {"error": future.result.decode(), "category": future.category}
        return Response(json_bytes(failure), media_type=JSON)
    return Response(future.result, media_type=future.media_type)


# ------------------------------------------------------------------------------------------ models


@router.post("/create_model")
async def create_model(
    body: CreateModelBody, tinker: TinkerPart, catalog: CatalogPart, caller: Trainer
) -> Promise:
    """Create a LoRA of the base, as a future."""
    _check_base(catalog, body.base_model)
    lora = body.lora_config.model_dump()
    if lora["seed"] is None:
        lora["seed"] = secrets.randbelow(2**31)
    place, order = (body.session_id, body.model_seq_id), msgspec.convert(lora, LoraOrder)
    request = operations.CREATE, b"{}"
    return promise_of(
        await tinker.models.create(
            caller.tenant, place, body.base_model, order, body.user_metadata, request
        )
    )


@router.post("/load_weights")
async def load_weights(
    body: LoadBody, tinker: TinkerPart, catalog: CatalogPart, caller: Trainer
) -> Promise:
    """Load a saved state into a model or a new model, as a future."""
    models, tenant = tinker.models, caller.tenant
    request = json.dumps({"path": body.path, "optimizer": body.optimizer}).encode()
    if body.model_id is not None:
        if body.session_id is not None or body.model_seq_id is not None:
            raise ApiError(400, "Give model_id, or session_id and model_seq_id.", param="model_id")
        return promise_of(
            await models.ask(tenant, body.model_id, body.seq_id, operations.LOAD, request)
        )
    if body.session_id is None or body.model_seq_id is None:
        raise ApiError(400, "Give model_id, or session_id and model_seq_id.", param="session_id")
    saved = await models.checkpoint(tenant, body.path)
    base, place = body.base_model or saved.base_model, (body.session_id, body.model_seq_id)
    _check_base(catalog, base)
    verb = operations.LOAD_MODEL, request
    return promise_of(
        await models.create(tenant, place, base, saved.order, body.user_metadata, verb)
    )


@router.post("/unload_model")
async def unload_model(body: ModelBody, tinker: TinkerPart, caller: Trainer) -> Promise:
    """Free a model after its earlier requests, as a future."""
    return promise_of(
        await tinker.models.ask(caller.tenant, body.model_id, None, operations.UNLOAD, b"{}")
    )


@router.post("/get_info")
async def get_info(
    body: ModelBody, service: ServiceDependency, tinker: TinkerPart, caller: Trainer
) -> ModelInfo:
    """Return the base and the rank of a model."""
    model = await tinker.models.find(caller.tenant, body.model_id)
    tokenizer = service.options.tinker_tokenizer
    return ModelInfo(
        model_id=model.id,
        model_name=model.base_model,
        model_data=ModelData(model_name=model.base_model, tokenizer_id=tokenizer),
        lora_rank=model.order.rank,
    )


@router.post("/weights_info")
async def weights_info(body: PathBody, tinker: TinkerPart, caller: Trainer) -> WeightsInfo:
    """Return the LoRA settings of a checkpoint."""
    saved = await tinker.models.checkpoint(caller.tenant, body.tinker_path)
    order = saved.order
    return WeightsInfo(
        base_model=saved.base_model,
        lora_rank=order.rank,
        train_unembed=order.train_unembed,
        train_mlp=order.train_mlp,
        train_attn=order.train_attn,
    )


def _check_base(catalog: Catalog, name: str) -> None:
    if name not in catalog.names:
        raise ApiError(
            400,
            f"There is no base model {name[:256]!r}; this server has {catalog.names[0]!r}.",
            param="base_model",
        )


# ---------------------------------------------------------------------------------------- training


@router.post("/forward_backward")
async def forward_backward(
    request: Request, service: ServiceDependency, tinker: TinkerPart, caller: Trainer
) -> Promise:
    """Compute a loss and its gradients, as a future.

    The body is protobuf, or JSON from clients before 0.25.
    """
    body, is_json = await _body_of(request), not _is_protobuf(request)
    call = await service.beside(caller, call_of, body, is_json=is_json)
    kind = operations.FORWARD if call.forward_only else operations.PASS
    if is_json:
        kind = operations.FORWARD_JSON if call.forward_only else operations.PASS_JSON
    seq = None if is_json and call.seq_id < 0 else call.seq_id
    return promise_of(await tinker.models.ask(caller.tenant, call.model_id, seq, kind, body))


@router.post("/forward")
async def forward(
    request: Request, service: ServiceDependency, tinker: TinkerPart, caller: Trainer
) -> Promise:
    """Compute a loss without gradients, as a future, for clients before 0.25."""
    return await forward_backward(request, service, tinker, caller)


@router.post("/create_custom_loss")
async def create_custom_loss(body: CustomLossBody, tinker: TinkerPart, caller: Trainer) -> Promise:
    """Store a loss graph, as a future; a 400 names an invalid node."""
    session, seq = body.session_id, body.custom_loss_seq_id
    return promise_of(await tinker.losses.create(caller.tenant, session, seq, body.loss()))


@router.post("/optim_step")
async def optim_step(body: StepBody, tinker: TinkerPart, caller: Trainer) -> Promise:
    """Update a model by AdamW, as a future."""
    return await _ask(tinker, caller, operations.STEP, body)


@router.post("/save_weights")
async def save_weights(body: SaveBody, tinker: TinkerPart, caller: Trainer) -> Promise:
    """Save a model's whole state under a path, as a future."""
    return await _ask(tinker, caller, operations.SAVE, body)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: SaveSamplerBody, tinker: TinkerPart, caller: Trainer
) -> Promise:
    """Save weights for sampling, under a path or for a sampling session, as a future."""
    if (body.path is None) == (body.sampling_session_seq_id is None):
        raise ApiError(400, "Give either path or sampling_session_seq_id.", param="path")
    if body.kind != "snapshot":
        words = "kind 'inflight' is not supported; use 'snapshot'."
        raise ApiError(400, words, param="kind", code=UNSUPPORTED)
    return await _ask(tinker, caller, operations.SAVE_SAMPLER, body)


@router.post("/save_weights_external")
async def save_weights_external(
    body: SaveExternalBody, tinker: TinkerPart, caller: Trainer
) -> Promise:
    """Save an adapter in peft's format for export, as a future."""
    return await _ask(tinker, caller, operations.SAVE_EXTERNAL, body)


async def _ask(tinker: Tinker, caller: Caller, kind: str, body: PlacedBody) -> Promise:
    models = tinker.models
    future = await models.ask(caller.tenant, body.model_id, body.seq_id, kind, body.request())
    return promise_of(future)


# ---------------------------------------------------------------------------------------- sampling


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: SamplingSessionBody, samplers: SamplersPart, caller: Trainer
) -> dict[str, str]:
    """Open a sampling session of the base or of a checkpoint."""
    sampler = await samplers.create(caller.tenant, body)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, samplers: SamplersPart, caller: Trainer) -> Sampler:
    """Return the model of a sampling session."""
    sampler = await samplers.find(caller.tenant, sampler_id)
    return Sampler(sampler_id=sampler.id, base_model=sampler.base_model, model_path=sampler.path)


@router.post("/asample")
async def asample(
    body: SampleBody, request: Request, samplers: SamplersPart, caller: Trainer
) -> Promise:
    """Sample, as a future."""
    return promise_of(await samplers.sample(caller, body, await request.body()))
