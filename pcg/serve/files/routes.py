"""/v1/files and /v1/uploads: files of clients, whole or in parts, in any order and in parallel."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import IO, Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import StreamingResponse

from pcg.errors import StoreDamagedError
from pcg.serve.files.files import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    FILES,
    PARTS,
    PENDING,
    UPLOADS,
    FileRecord,
    Files,
    ListPage,
    Page,
    PartRecord,
    UploadRecord,
    add_upload,
    bytes_to_come,
    end_upload,
    find_file,
    missing,
    new_file,
)
from pcg.serve.files.form import read_form
from pcg.serve.http.caller import Caller, Trainer
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import LongBodyRoute, Service, ServiceDependency, part
from pcg.serve.http.wire import WireModel
from pcg.serve.store.contents import Contents, Incoming
from pcg.serve.store.tables import new_key, now

router = APIRouter(prefix="/v1", tags=["files"], route_class=LongBodyRoute)

FilesPart = Annotated[Files, part(Files)]
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
LEAST_LIFE_S, MOST_LIFE_S = 3600, 2592000
MOST_PART_BYTES = 64 * 2**20
"""The most bytes of a part, as in OpenAI's API."""
_MOST_PARTS = 10_000
_LIFE_S = 3600
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_READ_BYTES = 2**18


class File(BaseModel):
    """A file; its status is always `processed`, as jobs check their files themselves."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int = Field(validation_alias="size_bytes")
    created_at: int = Field(validation_alias="created_s")
    expires_at: int | None = Field(validation_alias="expires_s")
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class Deleted(BaseModel):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(WireModel):
    """The lifetime of a file after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_LIFE_S, le=MOST_LIFE_S)]


class UploadBody(WireModel):
    """An upload to start; `mime_type` is stored, without effect."""

    bytes: Annotated[int, Field(ge=1, le=2**50)]
    filename: Annotated[str, Field(max_length=255)]
    mime_type: Annotated[str, Field(max_length=255)]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteBody(WireModel):
    """The order of the parts, and the MD5 of the joined file."""

    part_ids: Annotated[list[str], Field(min_length=1, max_length=_MOST_PARTS)]
    md5: Annotated[str, Field(pattern="^[0-9a-fA-F]{32}$")] | None = None


class Upload(BaseModel):
    """An upload, with its file once it is completed."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["upload"] = "upload"
    bytes: int = Field(validation_alias="size_bytes")
    created_at: int = Field(validation_alias="created_s")
    expires_at: int = Field(validation_alias="expires_s")
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


def _form(required: Sequence[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": list(required), "properties": properties}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


_BINARY = {"type": "string", "format": "binary"}
_FILE_FORM = _form(
    ("file", "purpose"),
    {
        "file": _BINARY,
        "purpose": {"type": "string", "enum": list(get_args(Purpose))},
        _ANCHOR: {"type": "string", "enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": LEAST_LIFE_S, "maximum": MOST_LIFE_S},
    },
)


@router.post("/files", openapi_extra=_FILE_FORM)
async def create_file(
    request: Request, service: ServiceDependency, caller: Trainer, files: FilesPart
) -> File:
    """Store a file."""
    kept = await files.kept_bytes(caller.tenant)
    with files.quota.flight(caller.tenant, kept) as receive:
        names = ("purpose", _ANCHOR, _SECONDS)
        form = await read_form(request, service, files, caller, receive, file="file", names=names)
        try:
            purpose, life_s = _purpose(form.fields), _life_s(form.fields)
            filename = _checked_name(form.filename or "")
            if not form.content.size_bytes:
                raise ApiError(400, "The file is empty.", param="file", code="empty_file")
            record = new_file(caller.tenant, filename, purpose, form.content, life_s)
            return File.model_validate(await files.keep(record, form.content))
        finally:
            form.content.drop()


@router.get("/files")
async def list_files(
    caller: Trainer,
    files: FilesPart,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> ListPage[File]:
    """List the tenant's files, the newest first by default."""
    page = Page(after, limit, order == "asc")
    return page.shown(await files.listed(caller.tenant, page, purpose), File)


@router.get("/files/{file_id}")
async def get_file(file_id: str, caller: Trainer, files: FilesPart) -> File:
    """Return a file's description."""
    return File.model_validate(await files.find(caller.tenant, file_id))


@router.delete("/files/{file_id}")
async def delete_file(file_id: str, caller: Trainer, files: FilesPart) -> Deleted:
    """Delete a file; its jobs have their own copy."""
    await files.delete(caller.tenant, file_id)
    return Deleted(id=file_id)


@router.get(
    "/files/{file_id}/content",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def get_content(
    file_id: str, service: ServiceDependency, caller: Trainer, files: FilesPart
) -> StreamingResponse:
    """Return the content of a file."""
    record = await files.find(caller.tenant, file_id)
    contents = files.store.contents
    try:
        opened = await service.beside(caller, lambda: contents.check(record.digest).open("rb"))
    except (StoreDamagedError, FileNotFoundError):
        await files.find(caller.tenant, file_id)  # raises a 404 if the file was deleted
        raise
    headers = {"content-length": str(record.size_bytes), "x-content-type-options": "nosniff"}
    parts = _parts(service, caller, opened)
    return StreamingResponse(parts, headers=headers, media_type="application/octet-stream")


async def _parts(service: Service, caller: Caller, file: IO[bytes]) -> AsyncIterator[bytes]:
    with file:
        while part := await service.beside(caller, file.read, _READ_BYTES):
            yield part


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise ApiError(400, "A file's name has 1 to 255 printable characters.", param="filename")
    return name


def _purpose(fields: Mapping[str, str]) -> str:
    purpose, allowed = fields.get("purpose"), list(get_args(Purpose))
    if purpose is None:
        raise ApiError(400, "Missing required parameter: 'purpose'.", param="purpose")
    if purpose not in allowed:
        message = f"'{purpose[:64]}' is not one of {allowed}."
        raise ApiError(400, f"Invalid value for 'purpose': {message}", param="purpose")
    return purpose


def _life_s(fields: Mapping[str, str]) -> int | None:
    """Return the lifetime of a file, seconds; None for a file that stays until it is deleted."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise ApiError(400, f"{_ANCHOR} must be 'created_at'.", param=_ANCHOR)
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise ApiError(400, f"{_SECONDS} must be an integer.", param=_SECONDS)
    if not LEAST_LIFE_S <= int(seconds) <= MOST_LIFE_S:
        message = f"{_SECONDS} must be {LEAST_LIFE_S} to {MOST_LIFE_S}."
        raise ApiError(400, message, param=_SECONDS)
    return int(seconds)


@router.post("/uploads")
async def create_upload(
    body: UploadBody, service: ServiceDependency, caller: Trainer, files: FilesPart
) -> Upload:
    """Start an upload, which expires after an hour."""
    most = service.options.max_file_bytes
    if body.bytes > most:
        message = f"bytes={body.bytes}; a file may have at most {most}."
        raise ApiError(413, message, param="bytes", code="file_too_large")
    await files.kept_bytes(caller.tenant)
    created = now()
    record = UploadRecord(
        new_key("upload_"),
        caller.tenant,
        _checked_name(body.filename),
        purpose=body.purpose,
        mime_type=body.mime_type,
        size_bytes=body.bytes,
        created_s=created,
        expires_s=created + _LIFE_S,
        file_expires_after_s=None if body.expires_after is None else body.expires_after.seconds,
        status=PENDING,
    )

    def act(connection: sqlite3.Connection) -> None:
        files.quota.check(connection, caller.tenant, body.bytes)
        add_upload(connection, record)

    await files.write(act)
    return _upload_of(record)


@router.post("/uploads/{upload_id}/parts", openapi_extra=_form(("data",), {"data": _BINARY}))
async def create_part(
    upload_id: str, request: Request, service: ServiceDependency, caller: Trainer, files: FilesPart
) -> Part:
    """Store a part of an upload."""
    await _pending(files, caller, upload_id)
    kept = await files.kept_bytes(caller.tenant)
    to_come = await files.read(lambda db: bytes_to_come(db, caller.tenant))
    with files.quota.flight(caller.tenant, kept - to_come, MOST_PART_BYTES) as receive:
        form = await read_form(request, service, files, caller, receive, file="data", names=())
        content = form.content
        try:
            created = PartRecord(
                new_key("part_"), upload_id, now(), content.size_bytes, content.digest
            )

            def act(connection: sqlite3.Connection) -> None:
                upload = _still_pending(connection, caller.tenant, upload_id)
                parts = PARTS.select(connection, upload=upload_id)
                # A part that is sent again after a lost reply has the same content.
                sizes = {each.digest: each.size_bytes for each in (*parts, created)}
                size = sum(sizes.values())
                if size > upload.size_bytes or len(parts) >= _MOST_PARTS:
                    raise ApiError(
                        400,
                        f"The {len(parts) + 1} parts have {size} bytes, and the upload has "
                        f"{upload.size_bytes} in at most {_MOST_PARTS} parts.",
                        param="data",
                    )
                PARTS.insert(connection, created)

            await files.put(content, act)
        finally:
            content.drop()
    return Part(id=created.id, created_at=created.created_s, upload_id=upload_id)


@router.post("/uploads/{upload_id}/complete")
async def complete_upload(
    upload_id: str,
    body: CompleteBody,
    service: ServiceDependency,
    caller: Trainer,
    files: FilesPart,
) -> Upload:
    """Join an upload's parts to a file, in the order of `part_ids`."""
    upload = await _pending(files, caller, upload_id)
    rows = await files.read(lambda db: PARTS.select(db, upload=upload_id))
    parts = {each.id: each for each in rows}
    unknown = [id for id in body.part_ids if id not in parts]
    if unknown:
        raise ApiError(400, f"The upload has no part {unknown[0][:128]}.", param="part_ids")
    if len(set(body.part_ids)) < len(body.part_ids):
        raise ApiError(400, "part_ids has a part twice; give each part once.", param="part_ids")
    size = sum(parts[id].size_bytes for id in body.part_ids)
    if size != upload.size_bytes:
        message = f"The parts have {size} bytes, and the upload {upload.size_bytes}."
        raise ApiError(400, message, param="part_ids")
    with files.completing(upload_id):
        joined = [parts[id].digest for id in body.part_ids]
        digests = await _completed(service, files, caller, upload, joined, md5=body.md5)
    await files.remove(digests)
    return await _upload(files, caller, upload_id)


@router.post("/uploads/{upload_id}/cancel")
async def cancel_upload(upload_id: str, caller: Trainer, files: FilesPart) -> Upload:
    """Cancel an upload and delete its parts."""

    def act(connection: sqlite3.Connection) -> list[str]:
        _still_pending(connection, caller.tenant, upload_id)
        return end_upload(connection, upload_id, CANCELLED)

    await files.remove(await files.write(act, may_use_reserve=True))
    return await _upload(files, caller, upload_id)


async def _completed(
    service: Service,
    files: Files,
    caller: Caller,
    upload: UploadRecord,
    parts: Sequence[str],
    *,
    md5: str | None,
) -> list[str]:
    """Create the file of an upload from the parts' digests; return the digests of all its parts."""
    content = await service.beside(caller, files.store.contents.begin)
    try:
        try:
            await service.beside(caller, _join, content, files.store.contents, parts)
        except StoreDamagedError:
            await _pending(files, caller, upload.id)  # raises a 400 if the upload was cancelled
            raise
        if md5 is not None and md5.lower() != content.md5:
            raise ApiError(400, f"The MD5 of the parts is {content.md5}.", param="md5")
        life_s = upload.file_expires_after_s
        record = new_file(caller.tenant, upload.filename, upload.purpose, content, life_s)

        def act(connection: sqlite3.Connection) -> list[str]:
            _still_pending(connection, caller.tenant, upload.id)
            FILES.insert(connection, record)
            return end_upload(connection, upload.id, COMPLETED, record.id)

        return await files.put(content, act)
    finally:
        content.drop()


def _join(content: Incoming, contents: Contents, digests: Sequence[str]) -> None:
    """Concatenate blobs, on a thread. StoreDamagedError: a blob is damaged."""
    for digest in digests:
        for piece in contents.pieces(digest):
            content.write(piece)
    content.finish()


async def _pending(files: Files, caller: Caller, id: str) -> UploadRecord:
    return await files.read(lambda db: _still_pending(db, caller.tenant, id))


def _still_pending(connection: sqlite3.Connection, tenant: str, id: str) -> UploadRecord:
    """Return a tenant's pending upload. ApiError: it does not exist, or has ended."""
    record = UPLOADS.find(connection, tenant=tenant, id=id)
    if record is None:
        raise missing("Upload", id)
    status = _status(record)
    if status != PENDING:
        raise ApiError(400, f"The upload is {status}, not pending.", param="upload_id")
    return record


def _status(record: UploadRecord) -> str:
    is_late = record.status == PENDING and record.expires_s <= now()
    return EXPIRED if is_late else record.status


async def _upload(files: Files, caller: Caller, id: str) -> Upload:
    def act(connection: sqlite3.Connection) -> Upload:
        record = UPLOADS.find(connection, tenant=caller.tenant, id=id)
        if record is None:
            raise missing("Upload", id)
        file = find_file(connection, caller.tenant, record.file) if record.file else None
        return _upload_of(record, file)

    return await files.read(act)


def _upload_of(record: UploadRecord, file: FileRecord | None = None) -> Upload:
    return Upload.model_validate({**vars(record), "status": _status(record), "file": file})
