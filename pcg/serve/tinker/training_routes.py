"""Routes of training.

Routes of requests that have a place among those of a model.

A client counts a request that is refused: the next one comes behind it. So a refusal is noted with
its place, and what comes behind does not wait for it.

/tinker/api/v1: what is done with a model, each a promise in its stream.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from pcg.errors import PcgError
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import UNSUPPORTED, ApiError, as_api_error
from pcg.serve.http.service import Handler, LongBodyRoute, Service, ServiceDependency
from pcg.serve.tinker.future_records import PROTOBUF
from pcg.serve.tinker.model_wire import (
    CustomLossBody,
    SaveBody,
    SaveExternalBody,
    SaveSamplerBody,
    StepBody,
)
from pcg.serve.tinker.operations import (
    FORWARD,
    FORWARD_JSON,
    PASS,
    PASS_JSON,
    SAVE,
    SAVE_EXTERNAL,
    SAVE_SAMPLER,
    STEP,
)
from pcg.serve.tinker.passes import call_of, decompressed
from pcg.serve.tinker.proto import place_of
from pcg.serve.tinker.session_routes import PREFIX, Trainer
from pcg.serve.tinker.tinker import Tinker, promise_of
from pcg.serve.tinker.wire import Promise

# ------------------------------------------------------------------------------------- placed route


_REFUSALS = (400, 404, 415, 422)
"""The statuses of requests that clients do not send again."""


class PlacedRoute(LongBodyRoute):
    """A route that notes the places of requests which it refuses."""

    async def answer(self, handle: Handler, request: Request) -> Response:
        try:
            return await handle(request)
        except RequestValidationError:
            await _note(request)
            raise
        except (ApiError, PcgError) as error:
            if as_api_error(error).status_code in _REFUSALS:
                await _note(request)
            raise


async def _note(request: Request) -> None:
    service: Service = request.app.state.service
    caller: Caller = request.state.caller
    is_json = not is_protobuf(request)
    try:
        body = await body_of(request)
    except (ApiError, PcgError):
        return
    found = await service.beside(caller, _place, body, is_json=is_json)
    if found is not None:
        service.part(Tinker).models.refuse(caller.tenant, *found)


async def body_of(request: Request) -> bytes:
    """Return a request's body, decompressed if need be.

    Raises:
        ApiError: 415, it is compressed otherwise than by zstd.
        DataError: it is no such thing, or has too many bytes.
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


def is_protobuf(request: Request) -> bool:
    """Return True if a request says that its body is protobuf."""
    return request.headers.get("content-type", "").partition(";")[0].strip() == PROTOBUF


def _place(body: bytes, *, is_json: bool) -> tuple[str, int] | None:
    """Return the model that a body names, and its number there; None if it names none."""
    if not is_json:
        return place_of(body)
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model, seq = (
        (read.get(name) for name in ("model_id", "seq_id")) if type(read) is dict else ("", "")
    )
    return (model, seq) if type(model) is str and type(seq) is int else None


# ------------------------------------------------------------------------------------------- routes


router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=PlacedRoute)


@router.post("/forward_backward")
async def forward_backward(
    request: Request, service: ServiceDependency, caller: Trainer
) -> Promise:
    """Promise a loss and its gradients; the body is protobuf, or JSON of clients before 0.25."""
    return await _pass(request, service, caller)


@router.post("/forward")
async def forward(request: Request, service: ServiceDependency, caller: Trainer) -> Promise:
    """Promise a loss without gradients, for clients before 0.25."""
    return await _pass(request, service, caller)


async def _pass(request: Request, service: Service, caller: Caller) -> Promise:
    models, body = service.part(Tinker).models, await body_of(request)
    is_json = not is_protobuf(request)
    call = await service.beside(caller, call_of, body, is_json=is_json)
    if call.forward_only:
        kind = FORWARD_JSON if is_json else FORWARD
    else:
        kind = PASS_JSON if is_json else PASS
    seq = None if is_json and call.seq_id < 0 else call.seq_id
    return promise_of(await models.ask(caller.tenant, call.model_id, seq, kind, body))


@router.post("/create_custom_loss")
async def create_custom_loss(
    body: CustomLossBody, service: ServiceDependency, caller: Trainer
) -> Promise:
    """Promise a loss that is a graph; a 400 names the node that may not run."""
    losses, session, seq = service.part(Tinker).losses, body.session_id, body.custom_loss_seq_id
    return promise_of(await losses.create(caller.tenant, session, seq, body.loss()))


@router.post("/optim_step")
async def optim_step(body: StepBody, service: ServiceDependency, caller: Trainer) -> Promise:
    """Promise an update by AdamW."""
    request = body.adam_params.model_dump()
    return await _ask(service, caller, (body.model_id, body.seq_id, STEP), request)


@router.post("/save_weights")
async def save_weights(body: SaveBody, service: ServiceDependency, caller: Trainer) -> Promise:
    """Promise to keep a model's whole state under a path."""
    request = {
        "path": body.path, "ttl_seconds": body.ttl_seconds, "overwrite": body.overwrite,
        "user_metadata": body.user_metadata,
    }  # fmt: skip
    return await _ask(service, caller, (body.model_id, body.seq_id, SAVE), request)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: SaveSamplerBody, service: ServiceDependency, caller: Trainer
) -> Promise:
    """Promise to keep weights to sample by, under a path or for one sampling session."""
    if (body.path is None) == (body.sampling_session_seq_id is None):
        raise ApiError(400, "Give either path or sampling_session_seq_id.", param="path")
    if body.kind != "snapshot":
        said = "kind 'inflight' is not supported; use 'snapshot'."
        raise ApiError(400, said, param="kind", code=UNSUPPORTED)
    request = {
        "path": body.path, "ttl_seconds": body.ttl_seconds, "overwrite": False,
        "user_metadata": body.user_metadata,
        "sampling_session_seq_id": body.sampling_session_seq_id,
    }  # fmt: skip
    return await _ask(service, caller, (body.model_id, body.seq_id, SAVE_SAMPLER), request)


@router.post("/save_weights_external")
async def save_weights_external(
    body: SaveExternalBody, service: ServiceDependency, caller: Trainer
) -> Promise:
    """Promise to keep an adapter for others to load, in peft's format."""
    request = {
        "path": body.path, "ttl_seconds": body.ttl_seconds, "overwrite": False,
        "user_metadata": None,
    }  # fmt: skip
    return await _ask(service, caller, (body.model_id, body.seq_id, SAVE_EXTERNAL), request)


async def _ask(
    service: Service, caller: Caller, place: tuple[str, int | None, str], request: dict[str, Any]
) -> Promise:
    model, seq, kind = place
    models = service.part(Tinker).models
    return promise_of(
        await models.ask(caller.tenant, model, seq, kind, json.dumps(request).encode())
    )
