"""Bodies and replies of Tinker's protocol for management."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pcg.serve.tinker.checkpoint_records import EXTERNAL, SAMPLER, WEIGHTS, CheckpointRecord
from pcg.serve.tinker.model_wire import Ttl
from pcg.serve.tinker.wire import Id, Short, TinkerBody, TinkerReply

_TYPES: dict[str, Literal["training", "sampler", "external"]] = {
    WEIGHTS: "training",
    SAMPLER: "sampler",
    EXTERNAL: "external",
}
KINDS = Literal["weights", "sampler_weights", "external_weights"]


class Checkpoint(TinkerReply):
    """A checkpoint; times are in UTC."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None
    expires_at: datetime | None


class Cursor(TinkerReply):
    """The place of a page."""

    offset: int
    limit: int
    total_count: int


class Checkpoints(TinkerReply):
    """Some checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(TinkerReply):
    """A model that a session trains, or trained."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None
    user_metadata: dict[str, str] | None


class TrainingRuns(TinkerReply):
    """Some models."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SessionIds(TinkerReply):
    """Some sessions."""

    sessions: list[str]


class SessionDetails(TinkerReply):
    """A session, and what was made in it."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None
    display_name: str | None


class CopyBody(TinkerBody):
    """A checkpoint to copy: into a project, of which there are none, or to a place of a session."""

    source_path: Annotated[str, Field(max_length=1024)]
    session_id: Id | None = None
    model_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    destination_project_id: Short | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Annotated[str, Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _has_a_place(self) -> CopyBody:
        has_session = self.session_id is not None
        if has_session != (self.model_seq_id is not None):
            raise ValueError("session_id and model_seq_id go together; give both or neither")
        if has_session == (self.destination_project_id is not None):
            raise ValueError("give destination_project_id, or session_id and model_seq_id")
        return self


class CopiedWeights(TinkerReply):
    """A copy of a checkpoint."""

    tinker_path: str


class TtlBody(TinkerBody):
    """The time that a checkpoint has from now on, seconds; null for no end."""

    ttl_seconds: Annotated[int, Field(ge=1, le=100 * 365 * 86_400)] | None = None


class ExternalUrls(TinkerReply):
    """Addresses of a checkpoint's files, which need no key until they expire."""

    urls: dict[str, str]
    expires: datetime


def checkpoint_of(record: CheckpointRecord) -> Checkpoint:
    """Return a checkpoint as clients know it."""
    expires = record.expires_s
    return Checkpoint(
        checkpoint_id=f"{record.kind}/{record.name}",
        checkpoint_type=_TYPES[record.kind],
        time=moment(record.created_s),
        tinker_path=record.path,
        size_bytes=record.size_bytes,
        public=bool(record.is_public),
        user_metadata=texts_of(record.user_metadata),
        expires_at=None if expires is None else moment(expires),
    )


def moment(seconds: int) -> datetime:
    """Return a time of Unix seconds, in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def texts_of(metadata: str | None) -> dict[str, str] | None:
    """Return metadata, which is kept as JSON, with texts as values."""
    if metadata is None:
        return None
    read: dict[str, object] = json.loads(metadata)
    return {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in read.items()
    }
