"""Models that are kept in the server's store: those that jobs made, and their checkpoints.

They are loaded when a request first names them, as adapters under `--lora-roots`, and are their
tenants' own.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pcg.errors import AdapterConflictError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.serve.adapters.engine_names import engine_name
from pcg.serve.adapters.loader import Loader, Origin
from pcg.serve.store.store import Store

MODEL = "model"
"""The folder, in that of a job, of the adapter that it ended with."""


@dataclass(frozen=True)
class KeptModel:
    """A model that is kept.

    Attributes:
        folder: the folder of its adapter, relative to the store's.
        created_s: Unix seconds.
    """

    name: str
    tenant: str
    folder: str
    created_s: int


def insert(connection: sqlite3.Connection, model: KeptModel) -> None:
    """Keep a model, or another one of the name in its place."""
    connection.execute(
        "INSERT OR REPLACE INTO models (name, tenant, folder, created_s) VALUES (?, ?, ?, ?)",
        (model.name, model.tenant, model.folder, model.created_s),
    )


def delete(connection: sqlite3.Connection, tenant: str, name: str) -> None:
    """Keep a model no more."""
    connection.execute("DELETE FROM models WHERE tenant = ? AND name = ?", (tenant, name))


class KeptModels:
    """The models of all tenants that a store has; for one event loop."""

    def __init__(self, store: Store, loader: Loader) -> None:
        self._store = store
        self._loader = loader
        self._loading: dict[tuple[str, str], asyncio.Task[ServedAdapter]] = {}

        def read(connection: sqlite3.Connection) -> list[KeptModel]:
            rows = connection.execute("SELECT name, tenant, folder, created_s FROM models")
            return [KeptModel(*row) for row in rows]

        found = store.database.read(read).result()
        self._models = {(one.tenant, one.name): one for one in found}

    def of(self, tenant: str) -> Mapping[str, KeptModel]:
        """Return a tenant's models by name."""
        return {name: one for (owner, name), one in self._models.items() if owner == tenant}

    def put(self, model: KeptModel) -> None:
        """Note a model that was inserted."""
        self._models[model.tenant, model.name] = model
        self._loader.adopt(engine_name(model.tenant, model.name), _origin(model))

    async def resolve(self, tenant: str, name: str) -> ServedAdapter | None:
        """Return a tenant's model, which is loaded; None if it keeps none of the name.

        Raises:
            ApiError: as `Loader.load`.
        """
        model = self._models.get((tenant, name))
        if model is None:
            return None
        task = self._loading.get((tenant, name))
        if task is None:
            task = self._loading[tenant, name] = asyncio.create_task(self._load(model))
            task.add_done_callback(lambda _: self._loading.pop((tenant, name)))
        return await asyncio.shield(task)

    async def _load(self, model: KeptModel) -> ServedAdapter:
        of_engine = engine_name(model.tenant, model.name)
        try:
            path = self._store.folder / model.folder
            return await self._loader.load(of_engine, path, _origin(model))
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
        write = self._store.database.write(lambda one: delete(one, tenant, name))
        await asyncio.wrap_future(write)
        self._models.pop((tenant, name), None)
        return self._store.folder / model.folder


def _origin(model: KeptModel) -> Origin:
    return Origin(model.name, model.created_s, is_found=True)


def new_model(name: str, tenant: str, folder: str) -> KeptModel:
    """Return a model that is made now."""
    return KeptModel(name, tenant, folder, int(time.time()))
