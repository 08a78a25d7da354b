"""Models that are kept in the server's store: those that jobs made, and their checkpoints.

They are loaded when a request first names them, as adapters under `--lora-roots`, and are their
tenants' own.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pcg.errors import AdapterConflictError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.serve.adapters.loader import Loader, Origin
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.store.store import Store

MODEL = "model"
"""The folder, in that of a job, of the adapter that it ended with."""


@dataclass(frozen=True)
class KeptModel:
    """A model that is kept.

    Attributes:
        folder: the folder of its adapter, relative to the store's.
        created_s: Unix seconds.
        base: the digest of the weights that it was trained on.
    """

    name: str
    tenant: str
    folder: str
    created_s: int
    base: str | None


def insert(connection: sqlite3.Connection, model: KeptModel) -> None:
    """Keep a model, or another one of the name in its place."""
    connection.execute(
        "INSERT OR REPLACE INTO models (name, tenant, folder, created_s, base) "
        "VALUES (?, ?, ?, ?, ?)",
        (model.name, model.tenant, model.folder, model.created_s, model.base),
    )


def delete(connection: sqlite3.Connection, tenant: str, name: str) -> None:
    """Keep a model no more."""
    connection.execute("DELETE FROM models WHERE tenant = ? AND name = ?", (tenant, name))


def folders(connection: sqlite3.Connection) -> set[str]:
    """Return the folders of all tenants' models."""
    return {folder for (folder,) in connection.execute("SELECT folder FROM models")}


class KeptModels:
    """The models of all tenants that a store has; for one event loop.

    Attributes:
        on_forget: are called with the tenant and the folder of a model that its owner deletes.
    """

    def __init__(self, store: Store, loader: Loader) -> None:
        self._store = store
        self._loader = loader
        self._loading: dict[tuple[str, str], asyncio.Task[ServedAdapter]] = {}
        self.on_forget: list[Callable[[str, Path], Awaitable[None]]] = []

        def read(connection: sqlite3.Connection) -> list[KeptModel]:
            rows = connection.execute("SELECT name, tenant, folder, created_s, base FROM models")
            return [KeptModel(*row) for row in rows]

        def shared(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
            found = "SELECT project, model, tenant FROM checkpoint_permissions"
            return [(one, model, owner) for one, model, owner in connection.execute(found)]

        found = store.database.read(read).result()
        self._models = {(one.tenant, one.name): one for one in found}
        rows = store.database.read(shared).result()
        self._owners = {(project, name): owner for project, name, owner in rows}

    def has(self, tenant: str, name: str) -> bool:
        """Return True if a tenant keeps a model of that name as its own."""
        return (tenant, name) in self._models

    def share(self, tenant: str, name: str, project: str) -> None:
        """Let another tenant use a model."""
        self._owners[project, name] = tenant

    def unshare(self, name: str, project: str) -> None:
        """Let another tenant use a model no more."""
        self._owners.pop((project, name), None)

    def of(self, tenant: str) -> Mapping[str, KeptModel]:
        """Return the models by name that a tenant may use."""
        keys = [(owner, name) for (one, name), owner in self._owners.items() if one == tenant]
        keys += [(owner, name) for owner, name in self._models if owner == tenant]
        return {name: self._models[owner, name] for owner, name in keys}

    def put(self, model: KeptModel) -> None:
        """Note a model that was inserted."""
        self._models[model.tenant, model.name] = model
        self._loader.adopt(engine_name(model.tenant, model.name), _origin(model))

    async def resolve(self, tenant: str, name: str) -> ServedAdapter | None:
        """Return a model that a tenant may use, which is loaded; None if there is none.

        Raises:
            ApiError: as `Loader.load`.
        """
        owner = tenant if self.has(tenant, name) else self._owners.get((tenant, name))
        if owner is None:
            return None
        asking, tenant, model = tenant, owner, self._models[owner, name]
        there = self._loader.adapters.get(engine_name(owner, name))
        if there is not None:
            return there
        task = self._loading.get((tenant, name))
        if task is None:
            task = self._loading[tenant, name] = asyncio.create_task(self._load(model, asking))
            task.add_done_callback(lambda _: self._loading.pop((tenant, name)))
        return await asyncio.shield(task)

    async def _load(self, model: KeptModel, tenant: str) -> ServedAdapter:
        of_engine = engine_name(model.tenant, model.name)
        try:
            path = self._store.folder / model.folder
            return await self._loader.load(of_engine, path, _origin(model), tenant=tenant)
        except AdapterConflictError:  # its job has published it meanwhile
            there = self._loader.adapters.get(of_engine)
            if there is None:
                raise
            return there

    async def forget(self, tenant: str, name: str) -> Path | None:
        """Keep a model no more; returns the folder that it had, or None if there is none."""
        model = self._models.get((tenant, name))
        if model is None:
            return None
        write = self._store.database.write(
            lambda one: delete(one, tenant, name), may_use_reserve=True
        )
        await asyncio.wrap_future(write)
        self._models.pop((tenant, name), None)
        self._owners = {
            (project, one): owner
            for (project, one), owner in self._owners.items()
            if (owner, one) != (tenant, name)
        }
        return self._store.folder / model.folder


def _origin(model: KeptModel) -> Origin:
    return Origin(model.name, model.created_s, is_found=True)


def new_model(name: str, tenant: str, folder: str, base: str | None) -> KeptModel:
    """Return a model that is made now."""
    return KeptModel(name, tenant, folder, int(time.time()), base)
