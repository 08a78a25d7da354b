"""Rows of Tinker's protocol: sessions, futures, models, checkpoints, samplers and custom losses."""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pcg.errors import FinetuneError
from pcg.runtime.engine.commands import LoraOrder
from pcg.runtime.training.loss_graph import LossGraph
from pcg.serve.http.errors import ApiError
from pcg.serve.store.tables import Table, now

OPEN, CLOSED = "open", "closed"
PENDING, DONE, FAILED = "pending", "done", "failed"
JSON, PROTOBUF = "application/json", "application/x-protobuf"
USER, SERVER = "user", "server"
"""Tinker's categories of a failed request: the fault of the user, or of the server."""
WEIGHTS, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
"""Kinds of checkpoints: a training state, an adapter to sample from, an exported adapter."""
COPIES = "copy-"
"""Prefix of the session ids of copied checkpoints, which no client opened."""
RUNS = "tinker_runs"
"""Folder of the training records in the store."""

ROW_BYTES = 512
"""Bytes of a future's row and index entries, without its texts and blobs."""
MOST_SAMPLERS = 65_536
"""The most sampling sessions of a client's session."""
MOST_EPHEMERAL = 64
"""The most ephemeral sampling sessions, which have unnamed weights, of a client's session."""
MOST_LOSSES = {"session": 64, "tenant": 1024}
"""The most custom losses of a session, and of a tenant."""

LIVES = "(expires_s IS NULL OR expires_s > ?)"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OWN = "path IS NULL AND folder IS NOT NULL"
"""Condition of ephemeral sampling sessions, which have unnamed weights."""
_WITHOUT_CHECKPOINTS = (
    "NOT EXISTS (SELECT 1 FROM tinker_checkpoints WHERE model = tinker_models.id)"
)

Row = TypeVar("Row")


@dataclass(frozen=True)
class SessionRecord:
    """A client's session.

    Attributes:
        status: `open`, or the reason of its end: success, errored, interrupted or expired.
        tags, user_metadata: JSON from the client.
        ended_s: None while it is open, and in rows of an older pcg.
    """

    id: str
    tenant: str
    created_s: int
    status: str
    tags: str
    user_metadata: str | None
    display_name: str | None
    sdk_version: str
    ended_s: int | None = None


@dataclass(frozen=True)
class FutureRecord:
    """An acknowledged request, and its result.

    Attributes:
        stream: the model or the sampling session that orders the request.
        seq: position in the stream; a repeated request of a position is the same request.
        kind: the verb, such as `optim_step`.
        answer: JSON of the reply's fields besides the id.
        request: the body, until the request need not be repeated.
        media_type, result: the result; of a failed request, `result` is the message.
        category: category of a failure.
    """

    id: str
    tenant: str
    session: str
    stream: str
    seq: int
    kind: str
    answer: str
    created_s: int
    request: bytes | None
    state: str = PENDING
    media_type: str | None = None
    result: bytes | None = None
    category: str | None = None
    finished_s: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the future in the database, including its row."""
        sizes = len(self.answer.encode()), len(self.request or b""), len(self.result or b"")
        return ROW_BYTES + sum(sizes)

    @property
    def body(self) -> dict[str, Any]:
        """The request, of a verb with a JSON body."""
        assert self.request is not None
        body: dict[str, Any] = json.loads(self.request)
        return body


@dataclass(frozen=True)
class ModelRecord:
    """A model that a session trains.

    Attributes:
        id: `SESSION:train:SEQ`, which also names its stream.
        seq: its number in the session.
        lora: JSON of its `LoraOrder`.
        asked_s: the time of the last request.
        state: folder of the last durable state, relative to the store's folder.
        state_seq: the last request in that state; -1 before the first.
        done_seq: all requests up to this position are settled.
    """

    id: str
    tenant: str
    session: str
    seq: int
    base_model: str
    lora: str
    user_metadata: str | None
    created_s: int
    asked_s: int
    status: str = OPEN
    state: str | None = None
    state_seq: int = -1
    done_seq: int = -1

    @property
    def order(self) -> LoraOrder:
        return msgspec.json.decode(self.lora, type=LoraOrder)


@dataclass(frozen=True)
class CheckpointRecord:
    """A state or weights that a client saved.

    Attributes:
        path: `tinker://MODEL/KIND/NAME`.
        folder: folder of its files, relative to the store's folder.
        lora: JSON of the model's `LoraOrder`.
        is_public: 1 if every tenant may load it.
    """

    path: str
    tenant: str
    model: str
    kind: str
    name: str
    folder: str
    base_model: str
    lora: str
    user_metadata: str | None
    size_bytes: int
    created_s: int
    expires_s: int | None
    is_public: int = 0

    @property
    def order(self) -> LoraOrder:
        return msgspec.json.decode(self.lora, type=LoraOrder)


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session.

    Attributes:
        session, seq: the client's session, and the number in it.
        path: the checkpoint; None for the base, and for an ephemeral session.
        folder: folder of the adapter, relative to the store's folder; None for the base.
        size_bytes: bytes of the weights of an ephemeral session.
    """

    id: str
    tenant: str
    session: str
    seq: int
    base_model: str
    path: str | None
    folder: str | None
    created_s: int
    size_bytes: int = 0


@dataclass(frozen=True)
class LossRecord:
    """A custom loss.

    Attributes:
        session, seq: the session that may train with the loss, and the number in it.
        graph: JSON of its `LossGraph`, which was checked.
    """

    id: str
    tenant: str
    session: str
    seq: int
    graph: str
    created_s: int

    @property
    def loss(self) -> LossGraph:
        return msgspec.json.decode(self.graph, type=LossGraph)


SESSIONS = Table("tinker_sessions", SessionRecord)
FUTURES = Table("tinker_futures", FutureRecord)
MODELS = Table("tinker_models", ModelRecord)
CHECKPOINTS = Table("tinker_checkpoints", CheckpointRecord)
SAMPLERS = Table("tinker_samplers", SamplerRecord)
LOSSES = Table("tinker_losses", LossRecord)


def newest(
    connection: sqlite3.Connection, table: Table[Row], limit: int, offset: int, tenant: str
) -> tuple[list[Row], int]:
    """Return a page of a tenant's rows, the newest first, and the number of all rows."""
    condition, values = (LIVES, (now(),)) if table.name == CHECKPOINTS.name else ("1", ())
    order = f"ORDER BY created_s DESC, rowid DESC LIMIT {limit} OFFSET {offset}"
    rows = table.select(connection, condition, values, order, tenant=tenant)
    return rows, table.count(connection, condition, values, tenant=tenant)


# ---------------------------------------------------------------------------------------- sessions


def forget_sessions(connection: sqlite3.Connection, before_s: float, most: int) -> list[str]:
    """Remove the sessions that ended before a time, and the oldest beyond `most` of a tenant.

    Their futures, samplers and models are removed, too. A model with checkpoints stays, and its
    session with it.

    Returns:
        Folders that no row names any more.
    """
    folders = []
    for session in _forgettable(connection, before_s, most):
        samplers = SAMPLERS.delete(connection, session=session)
        folders += [row.folder for row in samplers if row.path is None and row.folder is not None]
        LOSSES.delete(connection, session=session)
        condition = "session = ? AND state <> ?"
        connection.execute(f"DELETE FROM {FUTURES.name} WHERE {condition}", (session, PENDING))
        models = MODELS.delete(connection, _WITHOUT_CHECKPOINTS, session=session)
        folders += [run_folder(model.id) for model in models]
        is_empty = "NOT EXISTS (SELECT 1 FROM tinker_models WHERE session = tinker_sessions.id)"
        SESSIONS.delete(connection, is_empty, id=session)
    MODELS.delete(connection, f"session GLOB ? AND {_WITHOUT_CHECKPOINTS}", (f"{COPIES}*",))
    return folders


def _forgettable(connection: sqlite3.Connection, before_s: float, most: int) -> list[str]:
    """Return the removable sessions: ended, without an open model or a pending request."""
    condition = "status <> ? AND COALESCE(ended_s, created_s) < ?"
    rows = SESSIONS.read(connection, "id", condition, (OPEN, before_s))
    many = SESSIONS.read(
        connection, "tenant", "status <> ?", (OPEN,), f"GROUP BY tenant HAVING COUNT(*) > {most}"
    )
    for (tenant,) in many:
        order = f"ORDER BY id DESC LIMIT -1 OFFSET {most}"
        rows += SESSIONS.read(connection, "id", "status <> ?", (OPEN,), order, tenant=tenant)
    busy = MODELS.read(connection, "session", status=OPEN)
    busy += FUTURES.read(connection, "session", state=PENDING)
    return sorted({str(id) for (id,) in rows} - {str(id) for (id,) in busy})


def run_folder(model: str) -> str:
    """Return the folder of a model's training record, relative to the store's folder."""
    return f"{RUNS}/{model.replace(':', '-')}"


def end_left(connection: sqlite3.Connection) -> None:
    """Settle rows after a crash: futures of closed models, and samplers of ended sessions."""
    failed = {"state": FAILED, "result": b"the model is closed", "category": USER}
    FUTURES.change(
        connection,
        {**failed, "finished_s": now(), "request": None},
        "stream IN (SELECT id FROM tinker_models WHERE status = ?)",
        (CLOSED,),
        state=PENDING,
    )
    condition = f"{_OWN} AND session NOT IN (SELECT id FROM tinker_sessions WHERE status = ?)"
    SAMPLERS.delete(connection, condition, (OPEN,))


# ----------------------------------------------------------------------------------------- futures


def settle(
    connection: sqlite3.Connection,
    id: str,
    state: str,
    media_type: str | None,
    result: bytes,
    category: str | None,
) -> bool:
    """Write the result of a pending future. Return False if it is not pending."""
    settled: dict[str, Any] = {"state": state, "media_type": media_type, "result": result}
    settled |= {"category": category, "finished_s": now()}
    return FUTURES.change(connection, settled, id=id, state=PENDING) > 0


def used_by_futures(connection: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """Return each tenant's number of pending futures, and the bytes of all its futures."""
    columns = (
        f"tenant, SUM(state = '{PENDING}'), SUM({ROW_BYTES} + LENGTH(answer) + "
        "COALESCE(LENGTH(request), 0) + COALESCE(LENGTH(result), 0))"
    )
    rows = FUTURES.read(connection, columns, order="GROUP BY tenant")
    return {tenant: (count, size) for tenant, count, size in rows}


def forget_requests(connection: sqlite3.Connection, stream: str, first: int, last: int) -> None:
    """Drop the bodies of a stream's settled requests between two positions, inclusive."""
    condition = "seq BETWEEN ? AND ? AND state <> ?"
    FUTURES.change(connection, {"request": None}, condition, (first, last, PENDING), stream=stream)


# ------------------------------------------------------------------------- checkpoints and weights


def path_of(model: str, kind: str, name: str) -> str:
    """Return the path of a checkpoint. FinetuneError: the name is invalid in a path."""
    if not _NAME.fullmatch(name):
        raise FinetuneError(
            f"{name[:128]!r} cannot name a checkpoint; use 1 to 128 letters, digits, dots, - and "
            "_, and a letter or a digit first"
        )
    return f"tinker://{model}/{kind}/{name}"


def find_checkpoint(
    connection: sqlite3.Connection, path: str, tenant: str, now_s: int | None = None
) -> CheckpointRecord | None:
    """Return a checkpoint that a tenant may load, its own or a public one, or None."""
    condition = f"(tenant = ? OR is_public) AND {LIVES}"
    time_s = now() if now_s is None else now_s
    return CHECKPOINTS.find(connection, condition, (tenant, time_s), path=path)


def used_by_weights(connection: sqlite3.Connection, tenant: str) -> tuple[int, int]:
    """Return the number of a tenant's checkpoints, and the bytes of all its saved weights."""
    size = "COALESCE(SUM(size_bytes), 0)"
    ((count, saved),) = CHECKPOINTS.read(connection, f"COUNT(*), {size}", tenant=tenant)
    ((sampled,),) = SAMPLERS.read(connection, size, tenant=tenant)
    return int(count), int(saved) + int(sampled)


def insert_sampler(connection: sqlite3.Connection, record: SamplerRecord) -> SamplerRecord:
    """Add a sampling session, or return the existing session with its number.

    Raises:
        ApiError: the client's session has too many.
    """
    count = SAMPLERS.count(connection, session=record.session)
    if count >= MOST_SAMPLERS:
        raise ApiError(429, f"The session has {count} sampling sessions; open another session.")
    SAMPLERS.insert(connection, record, "OR IGNORE")
    (sampler,) = SAMPLERS.select(connection, session=record.session, seq=record.seq)
    return sampler


def surplus_sampler(connection: sqlite3.Connection, session: str) -> SamplerRecord | None:
    """Return the oldest ephemeral sampling session, if the next would exceed the limit."""
    order = f"ORDER BY id DESC LIMIT 1 OFFSET {MOST_EPHEMERAL - 1}"
    return next(iter(SAMPLERS.select(connection, _OWN, order=order, session=session)), None)


def end_samplers(connection: sqlite3.Connection, session: str) -> list[str]:
    """Remove the ephemeral sampling sessions of a session. Return their folders."""
    return [str(row.folder) for row in SAMPLERS.delete(connection, _OWN, session=session)]


def insert_loss(connection: sqlite3.Connection, record: LossRecord) -> None:
    """Add a loss and remove those of ended sessions. ApiError: there are too many."""
    ended = "session NOT IN (SELECT id FROM tinker_sessions WHERE tenant = ? AND status = ?)"
    LOSSES.delete(connection, ended, (record.tenant, OPEN), tenant=record.tenant)
    for owner, most in MOST_LOSSES.items():
        count = LOSSES.count(connection, **{owner: getattr(record, owner)})
        if count >= most:
            raise ApiError(
                400,
                f"Your {owner} has {count} custom losses; at most {most} are allowed. Use one of "
                "them.",
                code="too_many_losses",
            )
    LOSSES.insert(connection, record)
