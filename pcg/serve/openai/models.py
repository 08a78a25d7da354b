"""/v1/models: the base, and the adapters that a caller may use."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from pcg.keys import Scope
from pcg.serve.adapters.catalog import Catalog, ServedModel
from pcg.serve.adapters.changes import delete
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.service import Service, ServiceDependency

router = APIRouter(prefix="/v1", tags=["models"])


class Permission(BaseModel):
    """The permissions of a model, as vLLM lists them."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class Model(BaseModel):
    """A model.

    `parent` is the base of an adapter, `version` counts the times that its name was loaded or
    published, and `digest` is of its weights and configuration.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pcg"
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[Permission]
    version: int | None
    digest: str | None


class ModelList(BaseModel):
    """Models, the base first."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/models")
async def list_models(
    service: ServiceDependency, caller: Annotated[Caller, Depends(requires(Scope.INFER))]
) -> ModelList:
    """List the models that the key may use."""
    found = await service.part(Catalog).listed(caller)
    return ModelList(data=[card(service, caller, model) for model in found])


@router.get("/models/{model:path}")
async def get_model(
    model: str,
    service: ServiceDependency,
    caller: Annotated[Caller, Depends(requires(Scope.INFER))],
) -> Model:
    """Return a model that the key may use."""
    return card(service, caller, await service.part(Catalog).find(caller, model))


class DeletedModel(BaseModel):
    """A model that is not served any more."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


@router.delete("/models/{model:path}")
async def delete_model(
    model: str,
    service: ServiceDependency,
    caller: Annotated[Caller, Depends(requires(Scope.TRAIN))],
) -> DeletedModel:
    """Unload an adapter of the key's tenant; requests that it answers end on it."""
    await delete(service, caller, model)
    return DeletedModel(id=model)


def card(service: Service, caller: Caller, model: ServedModel) -> Model:
    """Return a model as clients see it."""
    is_base, version = model.parent is None, model.version
    created = model.created_s
    permission = Permission(
        id=f"modelperm-{model.name}",
        created=created,
        allow_fine_tuning=Scope.TRAIN in caller.scopes,
    )
    return Model(
        id=model.name,
        created=created,
        root=model.root,
        parent=model.parent,
        max_model_len=service.max_model_len if is_base else None,
        permission=[permission],
        version=None if version is None else version.number,
        digest=None if version is None else version.known_digest,
    )
