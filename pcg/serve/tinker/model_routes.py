"""/tinker/api/v1: models, and what is known of them and of checkpoints."""

from __future__ import annotations

import json
import secrets

from fastapi import APIRouter

from pcg.runtime.engine.commands import LoraOrder
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import Service, ServiceDependency
from pcg.serve.tinker.model_wire import (
    CreateModelBody,
    LoadBody,
    ModelBody,
    ModelData,
    ModelInfo,
    PathBody,
    WeightsInfo,
)
from pcg.serve.tinker.operations import CREATE, LOAD, LOAD_MODEL, UNLOAD
from pcg.serve.tinker.session_routes import PREFIX, Trainer
from pcg.serve.tinker.tinker import Tinker, promise_of
from pcg.serve.tinker.training_routes import PlacedRoute
from pcg.serve.tinker.wire import Promise

router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=PlacedRoute)


@router.post("/create_model")
async def create_model(
    body: CreateModelBody, service: ServiceDependency, caller: Trainer
) -> Promise:
    """Promise a LoRA of the base."""
    tinker, given = service.part(Tinker), body.lora_config
    _check_base(service, body.base_model)
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    lora = LoraOrder(given.rank, seed, given.train_attn, given.train_mlp, given.train_unembed)
    place = body.session_id, body.model_seq_id
    future = await tinker.models.create(
        caller.tenant, place, body.base_model, lora, body.user_metadata, (CREATE, b"{}")
    )
    return promise_of(future)


@router.post("/load_weights")
async def load_weights(body: LoadBody, service: ServiceDependency, caller: Trainer) -> Promise:
    """Promise to go on from a saved state: in a model, or in one that is made for it."""
    models = service.part(Tinker).models
    request = json.dumps({"path": body.path, "optimizer": body.optimizer}).encode()
    if body.model_id is not None:
        if body.session_id is not None or body.model_seq_id is not None:
            raise ApiError(400, "Give model_id, or session_id and model_seq_id.", param="model_id")
        asked = await models.ask(caller.tenant, body.model_id, body.seq_id, LOAD, request)
        return promise_of(asked)
    if body.session_id is None or body.model_seq_id is None:
        raise ApiError(400, "Give model_id, or session_id and model_seq_id.", param="session_id")
    saved = await models.checkpoint(caller.tenant, body.path)
    base = body.base_model or saved.base_model
    _check_base(service, base)
    place = body.session_id, body.model_seq_id
    future = await models.create(
        caller.tenant, place, base, saved.order, body.user_metadata, (LOAD_MODEL, request)
    )
    return promise_of(future)


@router.post("/unload_model")
async def unload_model(body: ModelBody, service: ServiceDependency, caller: Trainer) -> Promise:
    """Promise to free a model, behind all that was asked of it."""
    models = service.part(Tinker).models
    future = await models.ask(caller.tenant, body.model_id, None, UNLOAD, b"{}")
    return promise_of(future)


@router.post("/get_info")
async def get_info(body: ModelBody, service: ServiceDependency, caller: Trainer) -> ModelInfo:
    """Tell what a model is."""
    model = await service.part(Tinker).models.find(caller.tenant, body.model_id)
    tokenizer = service.options.tinker_tokenizer
    return ModelInfo(
        model_id=model.id,
        model_name=model.base_model,
        model_data=ModelData(model_name=model.base_model, tokenizer_id=tokenizer),
        lora_rank=model.order.rank,
    )


@router.post("/weights_info")
async def weights_info(body: PathBody, service: ServiceDependency, caller: Trainer) -> WeightsInfo:
    """Tell what a checkpoint is."""
    saved = await service.part(Tinker).models.checkpoint(caller.tenant, body.tinker_path)
    order = saved.order
    return WeightsInfo(
        base_model=saved.base_model,
        lora_rank=order.rank,
        train_unembed=order.train_unembed,
        train_mlp=order.train_mlp,
        train_attn=order.train_attn,
    )


def _check_base(service: Service, name: str) -> None:
    names = service.part(Catalog).names
    if name not in names:
        raise ApiError(
            400,
            f"There is no base model {name[:256]!r}; this server has {names[0]!r}.",
            param="base_model",
        )
