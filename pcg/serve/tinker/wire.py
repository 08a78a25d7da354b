"""Bodies and replies of Tinker's protocol for sessions and futures."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pcg.serve.http.wire import WireModel

_MOST_METADATA = 2**14
Id = Annotated[str, Field(min_length=1, max_length=256)]
Short = Annotated[str, Field(max_length=256)]


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(value, allow_nan=False))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half a character, which UTF-8 cannot hold") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("it has numbers that are not finite, or is nested too deeply") from error
    if size > _MOST_METADATA:
        raise ValueError(f"it has {size} characters as JSON; use at most {_MOST_METADATA}")
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""What a client says of something, in at most 16 KiB."""


class TinkerBody(WireModel):
    """A body of Tinker's; its fields may begin with `model_`."""

    model_config = ConfigDict(protected_namespaces=())


class TinkerReply(BaseModel):
    """A reply; its fields may begin with `model_`."""

    model_config = ConfigDict(protected_namespaces=())


class ConfigBody(TinkerBody):
    """The client asks how it should behave."""

    sdk_version: Short | None = None


class ClientConfig(TinkerReply):
    """The behaviour of clients that differs from their defaults."""

    parallel_fwdbwd_chunks: bool = True
    custom_loss_server_side: bool = True
    proto_compress_fwdbwd: bool = True
    fwdbwd_max_chunk_len: int
    fwdbwd_max_chunk_bytes_count: int
    sample_max_concurrent_requests: int


class DynamicConfig(TinkerReply):
    """The behaviour of clients that may change while they run."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class Health(TinkerReply):
    """The server lives."""

    status: Literal["ok"] = "ok"


class SupportedModel(TinkerReply):
    """A base model."""

    model_name: str
    max_context_length: int | None
    trainable: bool = True
    sampleable: bool = True


class Capabilities(TinkerReply):
    """The models that the server has."""

    supported_models: list[SupportedModel]


class SessionBody(TinkerBody):
    """A session to open. A server has no projects: `project_id` is taken, and without effect."""

    tags: Annotated[list[Short], Field(max_length=64)] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: Short = ""
    project_id: Short | None = None
    display_name: Short | None = None
    type: Literal["create_session"] = "create_session"


class Session(TinkerReply):
    """A session that is open."""

    type: Literal["create_session"] = "create_session"
    session_id: str


class HeartbeatBody(TinkerBody):
    """A session lives."""

    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Heartbeat(TinkerReply):
    """The server knows that a session lives."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(TinkerBody):
    """The way in which a session ends."""

    type: Literal["success", "errored", "interrupted"]
    detail: Any = None


class FinishBody(TinkerBody):
    """A session ends."""

    reason: FinishReason
    detail: Any = None


class Accepted(TinkerReply):
    """Something was taken."""

    status: Literal["accepted"] = "accepted"


class RetrieveBody(TinkerBody):
    """A future whose result is wanted; results always come whole."""

    request_id: Id
    allow_metadata_only: bool = False
    model_id: Id | None = None


class TryAgain(TinkerReply):
    """A future that is not settled yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"


class RequestFailed(TinkerReply):
    """A future that has no result, and why."""

    error: str
    category: str


class Promise(TinkerReply):
    """A request that is kept, whose result `retrieve_future` gives."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
