"""The catalog: models by their names on the wire, and loading and unloading of adapters.

A caller's own adapters have precedence over the operator's of the same name, which all tenants may
use. An unknown name is looked up under `--lora-roots`. A caller does not see other tenants'
adapters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pcg.errors import AdapterConflictError, AdapterError, AdapterNotFoundError
from pcg.keys import Scope
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.serve.adapters.kept_models import KeptModels
from pcg.serve.adapters.loader import Loader, Origin, learn_digests
from pcg.serve.adapters.roots import Resolver, Roots, parse_modules
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.engine_names import Owned, engine_name, owned
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError, not_found
from pcg.serve.store.store import Store


@dataclass(frozen=True)
class ServedModel:
    """A model that requests may name.

    Attributes:
        name: its name in requests and replies.
        adapter: the present adapter; None for the base, and for a stored model that is not loaded.
        version: version of the adapter; None without an adapter.
        root: its source, as far as the caller may see it.
        parent: the base in its model card; None for the base itself.
        created_s: the time of loading, Unix seconds.
    """

    name: str
    adapter: ServedAdapter | None
    version: AdapterVersion | None
    root: str
    parent: str | None
    created_s: int

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of replies: an adapter's version, such as sql@3, or the base."""
        return self.name if self.version is None else f"{self.name}@{self.version.number}"

    @property
    def headers(self) -> dict[str, str]:
        """Reply headers with the adapter's version; empty for the base."""
        return {} if self.version is None else version_headers(self.version)


@dataclass(frozen=True)
class Load:
    """A request to load an adapter.

    Attributes:
        name: the adapter's name on the wire.
        path: its folder, absolute or under a root.
        owner: the tenant that will own it; "" for the operator, who shares with all tenants.
        is_replacing: True if it may replace an adapter with the name.
        expected_version: number of the version to replace; 0 if the name must be free.
    """

    name: str
    path: str
    owner: str
    is_replacing: bool = False
    expected_version: int | None = None


class Catalog:
    """The models of a server: the base, and the adapters in the engine.

    Attributes:
        names: names of the base; replies have the first.
        loader: loads and unloads adapters.
        roots: allowed folders of adapters.
        kept: the models in the server's store; None without a store.
    Raises:
        ServeError: a static module or a root is invalid.
        PcgError: a static module cannot be loaded.
    """

    def __init__(
        self, client: EngineClient, options: ServeOptions, store: Store | None = None
    ) -> None:
        self._client = client
        self._created_s = int(time.time())
        self.names = tuple(options.served_model_name) or (client.facts.name,)
        modules = parse_modules(options.lora_modules)
        self.roots = Roots(options.lora_roots, [module.path for module in modules])
        self.loader = Loader(client, options.max_cpu_loras)
        self._resolver = Resolver(self.loader, self.roots)
        self.kept = None if store is None else KeptModels(store, self.loader)
        for module in modules:
            self._check_free(module.name)
            origin = Origin(str(module.path), self._created_s, module.base_model_name)
            self.loader.load_now(engine_name("", module.name), module.path, origin)

    def _check_free(self, name: str) -> None:
        """Raise an AdapterError for a name of the base, or an invalid name."""
        if name in self.names:
            raise AdapterError(
                f"The lora adapter name '{name}' conflicts with a served base model."
            )
        engine_name("", name)

    @property
    def base(self) -> ServedModel:
        name = self._client.facts.name
        return ServedModel(self.names[0], None, None, name, None, self._created_s)

    def owned(self, adapter: str) -> Owned:
        """Return the owner of an adapter or a job, by the engine's name."""
        return owned(adapter)

    def here(self, tenant: str, name: str) -> ServedAdapter | None:
        """Return a tenant's adapter with the name, or the operator's, or None."""
        loaded = self.loader.adapters
        try:
            names = [engine_name(owner, name) for owner in (tenant, "")]
        except AdapterError:  # an invalid name
            return None
        return next((loaded[each] for each in names if each in loaded), None)

    def owner_of(self, caller: Caller, name: str) -> str:
        """Return the owner of the adapter that a caller's name selects, or the caller's tenant."""
        adapter = self.here(caller.tenant, name)
        return caller.tenant if adapter is None else owned(adapter.name).tenant

    async def find(self, caller: Caller, name: str) -> ServedModel:
        """Return the model that a caller names; load an adapter under a root if necessary.

        Raises:
            ApiError: 404, the caller has no model with the name; 400 or 503, the adapter cannot be
                loaded.
        """
        if name in self.names:
            return self.base
        adapter = self.here(caller.tenant, name)
        if adapter is None and self.kept is not None:
            adapter = await self.kept.resolve(caller.tenant, name)
        if adapter is None:
            adapter = await self._resolver.resolve(name, caller.tenant)
        if adapter is None:
            raise not_found(name)
        self.loader.used(adapter.name)
        model = self._model(caller, adapter)
        await self._learn([model])
        return model

    async def listed(self, caller: Caller) -> list[ServedModel]:
        """Return the models that a caller may use, the base first; loaded models have digests."""
        loaded = self.visible(caller)
        await self._learn(loaded)
        models = {model.name: model for model in loaded[1:]}
        for name, kept in ({} if self.kept is None else self.kept.of(caller.tenant)).items():
            unloaded = ServedModel(name, None, None, name, self.names[0], kept.created_s)
            models.setdefault(name, unloaded)
        return [self.base, *(models[name] for name in sorted(models))]

    def visible(self, caller: Caller) -> list[ServedModel]:
        """Return the loaded models that a caller may use, the base first."""
        mine: dict[str, ServedAdapter] = {}
        for name, adapter in self.loader.adapters.items():
            owner = owned(name)
            if owner.tenant == caller.tenant or (not owner.tenant and owner.name not in mine):
                mine[owner.name] = adapter
        return [self.base, *(self._model(caller, mine[name]) for name in sorted(mine))]

    async def _learn(self, models: Sequence[ServedModel]) -> None:
        versions = [model.version for model in models if model.version is not None]
        if any(version.known_digest is None for version in versions):
            await learn_digests(self._client, versions)

    def _model(self, caller: Caller, adapter: ServedAdapter) -> ServedModel:
        owner, origin = owned(adapter.name), self.loader.origin(adapter.name)
        may_know = owner.tenant == caller.tenant or Scope.ADMIN in caller.scopes
        return ServedModel(
            owner.name,
            adapter,
            self._client.version_of(adapter),
            root=origin.path if origin is not None and may_know else owner.name,
            parent=self.names[0] if origin is None or origin.parent is None else origin.parent,
            created_s=self._created_s if origin is None else origin.created_s,
        )

    async def load(self, request: Load) -> AdapterVersion:
        """Load an adapter, and return its version.

        Raises:
            ApiError: with vLLM's messages, if it has them.
        """
        try:
            self._check_free(request.name)
            name = engine_name(request.owner, request.name)
        except AdapterError as error:
            raise invalid(str(error)) from None
        may_replace = request.is_replacing or request.expected_version is not None
        if name in self.loader.adapters and not may_replace:
            raise _already(request.name)
        directory = await asyncio.to_thread(self.roots.at, request.path)
        if directory is None:
            raise ApiError(
                404,
                f"No adapter found for '{request.path[:1024]}': it is not a folder of a saved "
                "adapter under --lora-roots.",
                type="NotFoundError",
                code=404,
            )
        try:
            adapter = await self.loader.load(
                name,
                directory,
                Origin(request.path, int(time.time())),
                tenant=request.owner,
                is_replacing=request.is_replacing,
                expected_version=request.expected_version,
            )
        except AdapterConflictError as error:
            if not may_replace and name in self.loader.adapters:  # another caller was faster
                raise _already(request.name) from None
            raise _conflict(error, name) from None
        version = self._client.version_of(adapter)
        await learn_digests(self._client, [version])
        return version

    async def unload(self, name: str, owner: str) -> None:
        """Unload an owner's adapter.

        Raises:
            ApiError: with vLLM's messages, if it has them.
        """
        message = f"The lora adapter '{name[:256]}' cannot be found."
        missing = ApiError(404, message, type="NotFoundError", code=404)
        try:
            of_engine = engine_name(owner, name)
        except AdapterError:
            raise missing from None
        if of_engine not in self.loader.adapters:
            raise missing
        try:
            await self.loader.unload(of_engine)
        except AdapterNotFoundError:
            raise missing from None
        except AdapterConflictError as error:
            raise _conflict(error, of_engine) from None

    async def delete(self, caller: Caller, name: str) -> None:
        """Unload an adapter for its owner; an administrator may also unload the operator's.

        A model of a job is also deleted from the store. Checkpoints of an unfinished job stay in
        its folder, so that it can resume.

        Raises:
            ApiError: 404, the caller has no such model; 403, it is another's; 409, a job trains it.
        """
        adapter = self.here(caller.tenant, name)
        if name in self.names:
            raise ApiError(403, f"The base model `{name}` cannot be deleted.", param="model")
        was_kept = self.kept is not None and await self.kept.forget(caller.tenant, name)
        if adapter is None:
            if was_kept:
                return
            raise not_found(name)
        owner = owned(adapter.name).tenant
        if owner != caller.tenant and Scope.ADMIN not in caller.scopes:
            raise ApiError(
                403,
                f"The model `{name}` is the operator's; a key with the scope 'admin' may delete "
                "it.",
                param="model",
                code="insufficient_permissions",
            )
        await self.unload(name, owner)


def version_headers(version: AdapterVersion) -> dict[str, str]:
    """Return the headers of a version: its number, and its digest if known."""
    digest = version.known_digest
    number = {"x-adapter-version": str(version.number)}
    return number if digest is None else {**number, "x-adapter-digest": digest}


def invalid(message: str) -> ApiError:
    """Return vLLM's error of an invalid field."""
    return ApiError(400, message, type="InvalidUserInput", code=400)


def _already(name: str) -> ApiError:
    return invalid(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )


def _conflict(error: AdapterConflictError, of_engine: str) -> ApiError:
    message = str(error).replace(of_engine, owned(of_engine).name)
    return ApiError(409, message, code="conflict")
