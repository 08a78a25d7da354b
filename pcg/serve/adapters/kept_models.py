"""Models in the server's store: trained models of jobs, and their checkpoints.

Like adapters under `--lora-roots`, they are loaded when a request first names them. They belong to
their tenants.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pcg.errors import AdapterConflictError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.text.tokenizer import adapter_template
from pcg.serve.adapters.loader import Loader, Origin
from pcg.serve.engine.engine_names import engine_name
from pcg.serve.store.store import Store
from pcg.serve.store.tables import Table, now

MODEL = "model"
"""The folder of a job's final adapter, in the job's folder."""


@dataclass(frozen=True)
class KeptModel:
    """A stored model.

    Attributes:
        folder: folder of its adapter, relative to the store's folder.
        created_s: Unix seconds.
        base: digest of the base's weights.
    """

    name: str
    tenant: str
    folder: str
    created_s: int
    base: str | None


MODELS = Table("models", KeptModel)


def folders(connection: sqlite3.Connection) -> set[str]:
    """Return the folders of all tenants' models."""
    return {folder for (folder,) in MODELS.read(connection, "folder")}


class KeptModels:
    """The models of all tenants in a store; for a single event loop.

    Attributes:
        on_forget: callbacks that receive the tenant and the folder of a model that its owner
            deletes.
    """

    def __init__(self, store: Store, loader: Loader) -> None:
        self._store = store
        self._loader = loader
        self._loading: dict[tuple[str, str], asyncio.Task[ServedAdapter]] = {}
        self.on_forget: list[Callable[[str, Path], Awaitable[None]]] = []

        def shares(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
            columns = "SELECT project, model, tenant FROM checkpoint_permissions"
            return [tuple(row) for row in connection.execute(columns)]

        rows = store.database.read(MODELS.select).result()
        self._models = {(row.tenant, row.name): row for row in rows}
        shared = store.database.read(shares).result()
        self._owners = {(project, name): owner for project, name, owner in shared}

    def has(self, tenant: str, name: str) -> bool:
        """Return True if a tenant owns a model with the name."""
        return (tenant, name) in self._models

    def share(self, tenant: str, name: str, project: str) -> None:
        self._owners[project, name] = tenant

    def unshare(self, name: str, project: str) -> None:
        self._owners.pop((project, name), None)

    def of(self, tenant: str) -> Mapping[str, KeptModel]:
        """Return the models that a tenant may use, by name."""
        keys = [(owner, name) for (user, name), owner in self._owners.items() if user == tenant]
        keys += [(owner, name) for owner, name in self._models if owner == tenant]
        return {name: self._models[owner, name] for owner, name in keys}

    def put(self, model: KeptModel) -> None:
        self._models[model.tenant, model.name] = model
        template = adapter_template(self._store.folder / model.folder)
        origin = replace(_origin(model), template=template)
        self._loader.adopt(engine_name(model.tenant, model.name), origin)

    async def resolve(self, tenant: str, name: str) -> ServedAdapter | None:
        """Load a model that a tenant may use, and return it; None for an unknown name.

        Raises:
            ApiError: see `Loader.load`.
        """
        owner = tenant if self.has(tenant, name) else self._owners.get((tenant, name))
        if owner is None:
            return None
        loaded = self._loader.adapters.get(engine_name(owner, name))
        if loaded is not None:
            return loaded
        task = self._loading.get((owner, name))
        if task is None:
            load = self._load(self._models[owner, name], tenant)
            task = self._loading[owner, name] = asyncio.create_task(load)
            task.add_done_callback(lambda _: self._loading.pop((owner, name)))
        return await asyncio.shield(task)

    async def _load(self, model: KeptModel, tenant: str) -> ServedAdapter:
        of_engine = engine_name(model.tenant, model.name)
        try:
            path = self._store.folder / model.folder
            return await self._loader.load(of_engine, path, _origin(model), tenant=tenant)
        except AdapterConflictError:  # its job has published the adapter
            published = self._loader.adapters.get(of_engine)
            if published is None:
                raise
            return published

    async def drop(self, tenant: str, name: str) -> Path | None:
        """Remove a model from the store; return its folder, or None for an unknown name."""
        model = self._models.get((tenant, name))
        if model is None:
            return None
        write = self._store.database.write(
            lambda db: MODELS.delete(db, tenant=tenant, name=name), may_use_reserve=True
        )
        await asyncio.wrap_future(write)
        self._models.pop((tenant, name), None)
        self._owners = {
            key: owner for key, owner in self._owners.items() if (owner, key[1]) != (tenant, name)
        }
        return self._store.folder / model.folder

    async def forget(self, tenant: str, name: str) -> bool:
        """Remove a model for its owner and call `on_forget`; return False for an unknown name."""
        folder = await self.drop(tenant, name)
        if folder is not None:
            for callback in self.on_forget:
                await callback(tenant, folder)
        return folder is not None


def _origin(model: KeptModel) -> Origin:
    return Origin(model.name, model.created_s, is_found=True)


def new_model(name: str, tenant: str, folder: str, base: str | None) -> KeptModel:
    """Return the row of a new model."""
    return KeptModel(name, tenant, folder, now(), base)
