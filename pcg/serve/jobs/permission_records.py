"""Rows of permissions: the tenants that may use another one's models."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from pcg.serve.files.records import Page
from pcg.serve.http.errors import ApiError
from pcg.serve.store.tables import Table

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


PERMISSIONS = Table("checkpoint_permissions", PermissionRecord)


def insert(
    connection: sqlite3.Connection, permissions: list[PermissionRecord]
) -> list[PermissionRecord]:
    """Add permissions; returns them, those that were there before as they are.

    ApiError: the model would have too many.
    """
    made = []
    for permission in permissions:
        PERMISSIONS.insert(connection, permission, "OR IGNORE")
        named = {key: getattr(permission, key) for key in ("tenant", "model", "project")}
        made += PERMISSIONS.select(connection, **named)
    first = permissions[0]
    count = PERMISSIONS.count(connection, tenant=first.tenant, model=first.model)
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
    equal = {} if project is None else {"project": project}
    return PERMISSIONS.select(
        connection, behind, values, page.order, tenant=tenant, model=model, **equal
    )


def delete(
    connection: sqlite3.Connection, tenant: str, model: str, id: str
) -> PermissionRecord | None:
    """Remove a permission; returns it, or None if there is none."""
    return next(iter(PERMISSIONS.delete(connection, tenant=tenant, model=model, id=id)), None)
