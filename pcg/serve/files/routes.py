"""/v1/files: what clients keep on the server, as training data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import IO, Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import StreamingResponse

from pcg.errors import StoreDamagedError
from pcg.keys import Scope
from pcg.serve.files.files import Files, new_file
from pcg.serve.files.form import read_form
from pcg.serve.files.records import Page
from pcg.serve.files.wire import (
    LEAST_LIFE_S,
    MOST_LIFE_S,
    PURPOSES,
    Deleted,
    File,
    ListPage,
    check_filename,
    file_of,
)
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import Service, ServiceDependency

router = APIRouter(prefix="/v1/files", tags=["files"])

Trainer = Annotated[Caller, Depends(requires(Scope.TRAIN))]
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_READ_BYTES = 2**18

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        _ANCHOR: {"type": "string", "enum": ["created_at"]},
                        _SECONDS: {
                            "type": "integer",
                            "minimum": LEAST_LIFE_S,
                            "maximum": MOST_LIFE_S,
                        },
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=_FORM)
async def create_file(request: Request, service: ServiceDependency, caller: Trainer) -> File:
    """Keep a file."""
    files = service.part(Files)
    kept = await files.kept_bytes(caller.tenant)
    with files.quota.flight(caller.tenant, kept) as flight:
        names = ("purpose", _ANCHOR, _SECONDS)
        form = await read_form(request, service, caller, flight, "file", names)
        try:
            purpose, life_s = _purpose(form.fields), _life_s(form.fields)
            filename = check_filename(form.filename or "")
            if not form.content.size_bytes:
                raise ApiError(400, "The file is empty.", param="file", code="empty_file")
            record = new_file(caller.tenant, filename, purpose, form.content, life_s)
            return file_of(await files.keep(record, form.content))
        finally:
            form.content.drop()


@router.get("")
async def list_files(
    service: ServiceDependency,
    caller: Trainer,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> ListPage[File]:
    """List the tenant's files, the newest first by default."""
    page = Page(after, limit, order == "asc")
    found = await service.part(Files).listed(caller.tenant, page, purpose)
    data = [file_of(one) for one in found[:limit]]
    return page_of(data, [one.id for one in data], len(found) > limit)


def page_of(data: list[File], ids: list[str], has_more: bool) -> ListPage[File]:
    """Return a page of files."""
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return ListPage[File](data=data, first_id=first, last_id=last, has_more=has_more)


@router.get("/{file_id}")
async def get_file(file_id: str, service: ServiceDependency, caller: Trainer) -> File:
    """Return what is known of a file."""
    return file_of(await service.part(Files).find(caller.tenant, file_id))


@router.delete("/{file_id}")
async def delete_file(file_id: str, service: ServiceDependency, caller: Trainer) -> Deleted:
    """Delete a file; jobs that were made with it have their own copy."""
    await service.part(Files).delete(caller.tenant, file_id)
    return Deleted(id=file_id)


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def get_content(
    file_id: str, service: ServiceDependency, caller: Trainer
) -> StreamingResponse:
    """Return the content of a file."""
    record = await service.part(Files).find(caller.tenant, file_id)
    contents = service.part(Files).store.contents
    try:
        opened = await service.beside(caller, lambda: contents.check(record.digest).open("rb"))
    except (StoreDamagedError, FileNotFoundError):
        await service.part(Files).find(caller.tenant, file_id)  # or it was deleted meanwhile
        raise
    headers = {"content-length": str(record.size_bytes), "x-content-type-options": "nosniff"}
    parts = _parts(service, caller, opened)
    return StreamingResponse(parts, headers=headers, media_type="application/octet-stream")


async def _parts(service: Service, caller: Caller, file: IO[bytes]) -> AsyncIterator[bytes]:
    with file:
        while part := await service.beside(caller, file.read, _READ_BYTES):
            yield part


def _purpose(fields: Mapping[str, str]) -> str:
    purpose = fields.get("purpose")
    if purpose is None:
        raise ApiError(400, "Missing required parameter: 'purpose'.", param="purpose")
    if purpose not in PURPOSES:
        said = f"'{purpose[:64]}' is not one of {list(PURPOSES)}."
        raise ApiError(400, f"Invalid value for 'purpose': {said}", param="purpose")
    return purpose


def _life_s(fields: Mapping[str, str]) -> int | None:
    """Return how long a file is to be kept, seconds; None for as long as it is not deleted."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ApiError(400, f"{_ANCHOR} has to be 'created_at'.", param=_ANCHOR)
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise ApiError(400, f"{_SECONDS} has to be an integer.", param=_SECONDS)
    if not LEAST_LIFE_S <= int(seconds) <= MOST_LIFE_S:
        said = f"{_SECONDS} has to be {LEAST_LIFE_S} to {MOST_LIFE_S}."
        raise ApiError(400, said, param=_SECONDS)
    return int(seconds)
