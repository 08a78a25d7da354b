"""/v1/uploads: a file in parts, which may come in any order and at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from pcg.errors import StoreDamagedError
from pcg.keys import Scope
from pcg.serve.files import records, upload_records
from pcg.serve.files.files import Files, new_file
from pcg.serve.files.form import read_form
from pcg.serve.files.upload_records import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    PENDING,
    PartRecord,
    UploadRecord,
)
from pcg.serve.files.wire import (
    ExpiresAfter,
    File,
    Purpose,
    check_filename,
    file_of,
    missing,
)
from pcg.serve.http.caller import Caller, requires
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency
from pcg.serve.http.wire import WireModel
from pcg.serve.store.contents import Contents, Incoming
from pcg.serve.store.tables import new_key, now

router = APIRouter(prefix="/v1/uploads", tags=["files"], route_class=LongBodyRoute)

Trainer = Annotated[Caller, Depends(requires(Scope.TRAIN))]
MOST_PART_BYTES = 64 * 2**20
"""The most bytes of a part, as OpenAI's."""
_MOST_PARTS = 10_000
_LIFE_S = 3600


class UploadBody(WireModel):
    """An upload to begin; `mime_type` is kept, and says nothing of what may be sent."""

    bytes: Annotated[int, Field(ge=1, le=2**50)]
    filename: Annotated[str, Field(max_length=255)]
    mime_type: Annotated[str, Field(max_length=255)]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteBody(WireModel):
    """The order of the parts, and the MD5 of all of them together."""

    part_ids: Annotated[list[str], Field(min_length=1, max_length=_MOST_PARTS)]
    md5: Annotated[str, Field(pattern="^[0-9a-fA-F]{32}$")] | None = None


class Upload(BaseModel):
    """An upload, with its file once it is completed."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    mime_type: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: File | None


class Part(BaseModel):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


@router.post("")
async def create_upload(body: UploadBody, service: ServiceDependency, caller: Trainer) -> Upload:
    """Begin an upload, which has an hour."""
    if body.bytes > service.options.max_file_bytes:
        raise ApiError(
            413,
            f"bytes={body.bytes}, and a file has at most {service.options.max_file_bytes} here.",
            param="bytes",
            code="file_too_large",
        )
    files, created = service.part(Files), now()
    await files.kept_bytes(caller.tenant)
    record = UploadRecord(
        new_key("upload_"),
        caller.tenant,
        check_filename(body.filename),
        body.purpose,
        body.mime_type,
        body.bytes,
        created,
        created + _LIFE_S,
        None if body.expires_after is None else body.expires_after.seconds,
        PENDING,
    )

    def act(connection: sqlite3.Connection) -> None:
        files.quota.check(connection, caller.tenant, body.bytes)
        upload_records.insert(connection, record)

    await files.write(act)
    return _upload_of(record)


@router.post(
    "/{upload_id}/parts",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["data"],
                        "properties": {"data": {"type": "string", "format": "binary"}},
                    }
                }
            },
        }
    },
)
async def create_part(
    upload_id: str, request: Request, service: ServiceDependency, caller: Trainer
) -> Part:
    """Keep a part of an upload."""
    files = service.part(Files)
    await _pending(service, caller, upload_id)
    kept = await files.kept_bytes(caller.tenant)
    to_come = await files.read(lambda one: upload_records.to_come(one, caller.tenant))
    with files.quota.flight(caller.tenant, kept - to_come, MOST_PART_BYTES) as flight:
        form = await read_form(request, service, caller, flight, "data", ())
        content = form.content
        try:
            part = PartRecord(
                new_key("part_"), upload_id, now(), content.size_bytes, content.digest
            )

            def act(connection: sqlite3.Connection) -> None:
                upload = _still_pending(connection, caller.tenant, upload_id)
                there = upload_records.parts(connection, upload_id).values()
                # One that comes again, as its answer was lost, has the same content.
                sizes = {one.digest: one.size_bytes for one in (*there, part)}
                size = sum(sizes.values())
                if size > upload.size_bytes or len(there) >= _MOST_PARTS:
                    raise ApiError(
                        400,
                        f"The {len(there) + 1} parts have {size} bytes, and the upload has "
                        f"{upload.size_bytes} in at most {_MOST_PARTS} parts.",
                        param="data",
                    )
                upload_records.PARTS.insert(connection, part)

            await files.put(content, act)
        finally:
            content.drop()
    return Part(id=part.id, created_at=part.created_s, upload_id=upload_id)


@router.post("/{upload_id}/complete")
async def complete_upload(
    upload_id: str, body: CompleteBody, service: ServiceDependency, caller: Trainer
) -> Upload:
    """Make a file of an upload's parts, in the order of `part_ids`."""
    files = service.part(Files)
    upload = await _pending(service, caller, upload_id)
    parts = await files.read(lambda one: upload_records.parts(one, upload_id))
    unknown = [id for id in body.part_ids if id not in parts]
    if unknown:
        raise ApiError(400, f"The upload has no part {unknown[0][:128]}.", param="part_ids")
    if len(set(body.part_ids)) < len(body.part_ids):
        raise ApiError(400, "A part is there twice; give each once.", param="part_ids")
    size = sum(parts[id].size_bytes for id in body.part_ids)
    if size != upload.size_bytes:
        raise ApiError(
            400,
            f"The parts have {size} bytes, and the upload {upload.size_bytes}.",
            param="part_ids",
        )
    with files.completing(upload_id):
        given = [parts[id].digest for id in body.part_ids]
        digests = await _completed(service, caller, upload, body, given)
    await files.remove(digests)
    return await _upload(service, caller, upload_id)


@router.post("/{upload_id}/cancel")
async def cancel_upload(upload_id: str, service: ServiceDependency, caller: Trainer) -> Upload:
    """Cancel an upload, and forget its parts."""
    files = service.part(Files)

    def act(connection: sqlite3.Connection) -> list[str]:
        _still_pending(connection, caller.tenant, upload_id)
        return upload_records.end(connection, upload_id, CANCELLED)

    await files.remove(await files.write(act, may_use_reserve=True))
    return await _upload(service, caller, upload_id)


async def _completed(
    service: Service,
    caller: Caller,
    upload: UploadRecord,
    body: CompleteBody,
    given: Sequence[str],
) -> list[str]:
    """Make the file of an upload; returns the digests that its parts had."""
    files = service.part(Files)
    content = await service.beside(caller, files.store.contents.begin)
    try:
        try:
            await service.beside(caller, _join, content, files.store.contents, given)
        except StoreDamagedError:
            await _pending(service, caller, upload.id)  # or it was cancelled meanwhile
            raise
        if body.md5 is not None and body.md5.lower() != content.md5:
            raise ApiError(400, f"The MD5 of the parts is {content.md5}.", param="md5")
        life_s = upload.file_expires_after_s
        record = new_file(caller.tenant, upload.filename, upload.purpose, content, life_s)

        def act(connection: sqlite3.Connection) -> list[str]:
            _still_pending(connection, caller.tenant, upload.id)
            records.FILES.insert(connection, record)
            return upload_records.end(connection, upload.id, COMPLETED, record.id)

        return await files.put(content, act)
    finally:
        content.drop()


def _join(content: Incoming, contents: Contents, digests: Sequence[str]) -> None:
    """Write contents one behind the other, on a thread. StoreDamagedError: one is not whole."""
    for digest in digests:
        for piece in contents.pieces(digest):
            content.write(piece)
    content.finish()


async def _pending(service: Service, caller: Caller, id: str) -> UploadRecord:
    return await service.part(Files).read(lambda one: _still_pending(one, caller.tenant, id))


def _still_pending(connection: sqlite3.Connection, tenant: str, id: str) -> UploadRecord:
    """Return a tenant's upload that parts may be added to. ApiError: it is none."""
    record = upload_records.UPLOADS.find(connection, tenant=tenant, id=id)
    if record is None:
        raise missing("Upload", id)
    status = _status(record)
    if status != PENDING:
        raise ApiError(400, f"The upload is {status}, and not pending.", param="upload_id")
    return record


def _status(record: UploadRecord) -> str:
    is_late = record.status == PENDING and record.expires_s <= now()
    return EXPIRED if is_late else record.status


async def _upload(service: Service, caller: Caller, id: str) -> Upload:
    def act(connection: sqlite3.Connection) -> Upload:
        record = upload_records.UPLOADS.find(connection, tenant=caller.tenant, id=id)
        if record is None:
            raise missing("Upload", id)
        file = record.file and records.find(connection, caller.tenant, record.file, now())
        return _upload_of(record, file_of(file) if file else None)

    return await service.part(Files).read(act)


def _upload_of(record: UploadRecord, file: File | None = None) -> Upload:
    return Upload.model_validate(
        {
            "id": record.id,
            "bytes": record.size_bytes,
            "created_at": record.created_s,
            "expires_at": record.expires_s,
            "filename": record.filename,
            "purpose": record.purpose,
            "mime_type": record.mime_type,
            "status": _status(record),
            "file": file,
        }
    )
