"""Files and uploads as clients see them."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from pcg.serve.files.records import FileRecord
from pcg.serve.http.errors import ApiError
from pcg.serve.http.wire import WireModel

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES: tuple[str, ...] = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
LEAST_LIFE_S, MOST_LIFE_S = 3600, 2592000

Item = TypeVar("Item")


class ListPage(BaseModel, Generic[Item]):
    """A page of a list; the next one is asked for by `after` with the last id."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class File(BaseModel):
    """A file; its status is `processed` from the start, as it is checked by what uses it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class Deleted(BaseModel):
    """A file that is kept no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ExpiresAfter(WireModel):
    """The life of a file from its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_LIFE_S, le=MOST_LIFE_S)]


def file_of(record: FileRecord) -> File:
    """Return a file as clients see it."""
    return File(
        id=record.id,
        bytes=record.size_bytes,
        created_at=record.created_s,
        expires_at=record.expires_s,
        filename=record.filename,
        purpose=record.purpose,
    )


def check_filename(name: str) -> str:
    """Return a file's name. ApiError: it is none."""
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise ApiError(400, "A file's name has 1 to 255 printable characters.", param="filename")
    return name


def missing(kind: str, id: str) -> ApiError:
    """Return the error of something that is not there for a caller."""
    return ApiError(404, f"No such {kind} object: {id[:128]}", param="id")
