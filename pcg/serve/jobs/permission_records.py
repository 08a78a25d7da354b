"""Rows of permissions: the tenants that may use another one's models."""

from __future__ import annotations

import sqlite3
from dataclasses import astuple, dataclass, fields

from pcg.serve.errors import ApiError
from pcg.serve.files.records import Page

_MOST = 256
"""The most permissions of a model."""


@dataclass(frozen=True)
class PermissionRecord:
    """A permission.

    Attributes:
        tenant: the owner of the model.
        project: the tenant that may use it.
    """

    id: str
    tenant: str
    model: str
    project: str
    created_s: int


_COLUMNS = ", ".join(field.name for field in fields(PermissionRecord))


def insert(
    connection: sqlite3.Connection, permissions: list[PermissionRecord]
) -> list[PermissionRecord]:
    """Add permissions; returns them, those that were there before as they are.

    ApiError: the model would have too many.
    """
    made = []
    for one in permissions:
        connection.execute(
            f"INSERT OR IGNORE INTO checkpoint_permissions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)",
            astuple(one),
        )
        row = connection.execute(
            f"SELECT {_COLUMNS} FROM checkpoint_permissions "
            "WHERE tenant = ? AND model = ? AND project = ?",
            (one.tenant, one.model, one.project),
        ).fetchone()
        made.append(PermissionRecord(*row))
    (count,) = connection.execute(
        "SELECT COUNT(*) FROM checkpoint_permissions WHERE tenant = ? AND model = ?",
        (permissions[0].tenant, permissions[0].model),
    ).fetchone()
    if count > _MOST:
        raise ApiError(
            400,
            f"The model would have {count} permissions, and may have {_MOST}; delete some.",
            param="project_ids",
        )
    return made


def listed(
    connection: sqlite3.Connection, tenant: str, model: str, project: str | None, page: Page
) -> list[PermissionRecord]:
    """Return a page of a model's permissions, and one more where there are others."""
    behind, values = page.condition()
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM checkpoint_permissions WHERE tenant = ?1 AND model = ?2 "
        f"AND (?3 IS NULL OR project = ?3) AND {behind.replace('?', '?4')} {page.order}",
        (tenant, model, project, *values),
    )
    return [PermissionRecord(*row) for row in rows]


def delete(
    connection: sqlite3.Connection, tenant: str, model: str, id: str
) -> PermissionRecord | None:
    """Remove a permission; returns it, or None if there is none."""
    row = connection.execute(
        f"DELETE FROM checkpoint_permissions WHERE tenant = ? AND model = ? AND id = ? "
        f"RETURNING {_COLUMNS}",
        (tenant, model, id),
    ).fetchone()
    return None if row is None else PermissionRecord(*row)
