"""vLLM's endpoints that load and unload adapters, with their words and statuses.

`expected_version` compares and swaps, `owner` and `shared` say whose the adapter is; these are our
own. The version that was loaded is in the headers `x-adapter-version` and `x-adapter-digest`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import PlainTextResponse

from pcg.keys import Scope
from pcg.serve.adapters.catalog import version_headers
from pcg.serve.adapters.changes import Load, invalid, load, owner_of, unload
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.http.wire import WireModel

router = APIRouter(prefix="/v1", tags=["adapters"], route_class=LongBodyRoute)

Admin = Annotated[Caller, Depends(requires(Scope.ADMIN))]
LongText = Annotated[str, Field(max_length=4096)]
_PLAIN: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}


class _Owned(WireModel):
    """The owner of an adapter; `shared` makes it everyone's.

    By default it is whose adapter of that name the key's requests are answered by, if there is one,
    else the key's tenant.
    """

    lora_name: LongText = ""

    owner: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    shared: bool | None = None

    def owner_for(self, service: Service, caller: Caller) -> str:
        """Return the tenant that owns the adapter; "" for the operator."""
        if self.shared and self.owner is not None:
            raise invalid("'shared' adapters have no 'owner'; leave one of them out.")
        if self.shared or self.owner is not None:
            return self.owner or ""
        is_own_only = self.shared is not None
        return caller.tenant if is_own_only else owner_of(service, caller, self.lora_name)


class LoadBody(_Owned):
    """An adapter to load. `is_3d_lora_weight` has to be false."""

    lora_path: LongText = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    expected_version: Annotated[int, Field(ge=0)] | None = None


class UnloadBody(_Owned):
    """An adapter to unload. `lora_int_id` has no effect."""

    lora_int_id: int | None = None


@router.post("/load_lora_adapter", responses=_PLAIN)
async def load_lora_adapter(
    body: LoadBody, service: ServiceDependency, caller: Admin
) -> PlainTextResponse:
    """Load an adapter from a folder under the roots, or replace one in place."""
    if not body.lora_name or not body.lora_path:
        raise invalid("Both 'lora_name' and 'lora_path' must be provided.")
    if body.is_3d_lora_weight:
        raise invalid("'is_3d_lora_weight' is not supported; leave it out.")
    asked = Load(
        body.lora_name,
        body.lora_path,
        body.owner_for(service, caller),
        body.load_inplace,
        body.expected_version,
    )
    version = await load(service, asked)
    text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
    return PlainTextResponse(text, headers=version_headers(version))


@router.post("/unload_lora_adapter", responses=_PLAIN)
async def unload_lora_adapter(
    body: UnloadBody, service: ServiceDependency, caller: Admin
) -> PlainTextResponse:
    """Unload an adapter; requests that it answers end on it."""
    if not body.lora_name:
        raise invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
    await unload(service, body.lora_name, body.owner_for(service, caller))
    text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
    return PlainTextResponse(text)
