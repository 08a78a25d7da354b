"""/v1/fine_tuning/checkpoints: the tenants, OpenAI's projects, that may use a model too."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from pcg.keys import Scope
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.adapters.kept_models import KeptModels
from pcg.serve.files.files import Files
from pcg.serve.files.records import Page
from pcg.serve.files.wire import ListPage, missing
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import not_found
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.http.wire import WireModel
from pcg.serve.jobs import permission_records
from pcg.serve.jobs.permission_records import PermissionRecord
from pcg.serve.store.tables import new_key, now

router = APIRouter(
    prefix="/v1/fine_tuning/checkpoints", tags=["fine-tuning"], route_class=LongBodyRoute
)

Admin = Annotated[Caller, Depends(requires(Scope.ADMIN))]
Project = Annotated[str, Field(min_length=1, max_length=128)]


class PermissionBody(WireModel):
    """The tenants that may use a model."""

    project_ids: Annotated[list[Project], Field(min_length=1, max_length=64)]


class CheckpointPermission(BaseModel):
    """A permission."""

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: int
    project_id: str


class DeletedPermission(BaseModel):
    """A permission that is no more."""

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    deleted: Literal[True] = True


@router.post("/{model:path}/permissions")
async def create_permissions(
    model: str, body: PermissionBody, service: ServiceDependency, caller: Admin
) -> ListPage[CheckpointPermission]:
    """Let other tenants use a model of the key's tenant."""
    kept = _kept(service, caller, model)
    made = [
        PermissionRecord(new_key("cp_"), caller.tenant, model, project, now())
        for project in dict.fromkeys(body.project_ids)
    ]
    found = await service.part(Files).write(lambda one: permission_records.insert(one, made))
    for one in found:
        kept.share(one.tenant, one.model, one.project)
    return _page(found, len(found))


@router.get("/{model:path}/permissions")
async def list_permissions(
    model: str,
    service: ServiceDependency,
    caller: Admin,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
    order: Literal["ascending", "descending"] = "descending",
    project_id: Annotated[str | None, Query(max_length=128)] = None,
) -> ListPage[CheckpointPermission]:
    """List the permissions of a model, the newest first by default."""
    _kept(service, caller, model)
    page = Page(after, limit, order == "ascending")
    found = await service.part(Files).read(
        lambda one: permission_records.listed(one, caller.tenant, model, project_id, page)
    )
    return _page(found, limit)


@router.delete("/{model:path}/permissions/{permission_id}")
async def delete_permission(
    model: str, permission_id: str, service: ServiceDependency, caller: Admin
) -> DeletedPermission:
    """Take a permission back; requests that run end on the model."""
    kept = _kept(service, caller, model)
    found = await service.part(Files).write(
        lambda one: permission_records.delete(one, caller.tenant, model, permission_id)
    )
    if found is None:
        raise missing("CheckpointPermission", permission_id)
    kept.unshare(model, found.project)
    return DeletedPermission(id=permission_id)


def _kept(service: Service, caller: Caller, model: str) -> KeptModels:
    """Return the models that are kept. ApiError: the tenant has none of the name."""
    _ = service.part(Files)
    kept = service.part(Catalog).kept
    if kept is None or not kept.has(caller.tenant, model):
        raise not_found(model)
    return kept


def _page(found: list[PermissionRecord], limit: int) -> ListPage[CheckpointPermission]:
    data = [
        CheckpointPermission(id=one.id, created_at=one.created_s, project_id=one.project)
        for one in found[:limit]
    ]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return ListPage(data=data, first_id=first, last_id=last, has_more=len(found) > limit)
