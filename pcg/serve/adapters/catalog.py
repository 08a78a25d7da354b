"""The catalog: the names of models on the wire, and what answers to them.

A caller's own adapters come before the operator's of the same name, which everyone has. A name that
is not there is looked up under `--lora-roots`. What another tenant owns is not there for a caller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pcg.errors import AdapterError
from pcg.keys import Scope
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.serve.adapters.kept_models import KeptModels
from pcg.serve.adapters.loader import Loader, Origin, learn_digests
from pcg.serve.adapters.modules import parse_modules
from pcg.serve.adapters.roots import Resolver, Roots
from pcg.serve.engine.client import EngineClient
from pcg.serve.engine.engine_names import Owned, engine_name, owned
from pcg.serve.engine.options import ServeOptions
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import not_found
from pcg.serve.store.store import Store


@dataclass(frozen=True)
class ServedModel:
    """A model that requests may name.

    Attributes:
        name: its name in requests and replies.
        adapter: the adapter that answers, as it is now; None for the base, and for one that is
            listed and kept, and not loaded.
        version: its version; None without an adapter.
        root: where it came from, as far as the caller may know.
        parent: what its card calls its base; None for the base.
        created_s: when it was loaded, Unix seconds.
    """

    name: str
    adapter: ServedAdapter | None
    version: AdapterVersion | None
    root: str
    parent: str | None
    created_s: int

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of replies: an adapter's version, as sql@3; the base's name."""
        return self.name if self.version is None else f"{self.name}@{self.version.number}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of replies that say which version answers; none for the base."""
        return {} if self.version is None else version_headers(self.version)


class Catalog:
    """The models of a server: the base, and the adapters in the engine.

    Attributes:
        names: the names of the base; replies have the first.
        loader: what loads and unloads adapters.
        roots: the folders that adapters may come from.
        kept: the models of the server's store; None without one.
    Raises:
        ServeError: a static module or a root cannot be.
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
            self.check_free(module.name)
            origin = Origin(str(module.path), self._created_s, module.base_model_name)
            self.loader.load_now(engine_name("", module.name), module.path, origin)

    def check_free(self, name: str) -> None:
        """Raise an AdapterError for a name that is the base's, or that names no adapter."""
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
        """Return whose an adapter or a job is, of the engine's name for it."""
        return owned(adapter)

    def here(self, tenant: str, name: str) -> ServedAdapter | None:
        """Return the adapter of a tenant's that has the name, or the operator's; None without."""
        there = self.loader.adapters
        try:
            of_engine = [engine_name(owner, name) for owner in (tenant, "")]
        except AdapterError:  # nothing has such a name
            return None
        return next((there[one] for one in of_engine if one in there), None)

    async def find(self, caller: Caller, name: str) -> ServedModel:
        """Return the model that a caller names; an adapter under a root is loaded if need be.

        Raises:
            ApiError: 404, there is none of that name for this caller; 400 or 503, it is under a
                root and cannot be loaded.
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
        await self._hash([model])
        return model

    async def listed(self, caller: Caller) -> list[ServedModel]:
        """Return the models that a caller may use, with digests where loaded, the base first."""
        loaded = self.visible(caller)
        await self._hash(loaded)
        found = {model.name: model for model in loaded[1:]}
        for name, one in ({} if self.kept is None else self.kept.of(caller.tenant)).items():
            unloaded = ServedModel(name, None, None, name, self.names[0], one.created_s)
            found.setdefault(name, unloaded)
        return [self.base, *(found[name] for name in sorted(found))]

    def visible(self, caller: Caller) -> list[ServedModel]:
        """Return the models that a caller may use and that are loaded, the base first."""
        mine: dict[str, ServedAdapter] = {}
        for one, adapter in self.loader.adapters.items():
            owner = owned(one)
            if owner.tenant == caller.tenant or (not owner.tenant and owner.name not in mine):
                mine[owner.name] = adapter
        return [self.base, *(self._model(caller, mine[name]) for name in sorted(mine))]

    async def _hash(self, models: Sequence[ServedModel]) -> None:
        """Have the digests of models computed, each once."""
        versions = [model.version for model in models if model.version is not None]
        if any(version.known_digest is None for version in versions):
            await learn_digests(self._client, versions)

    def _model(self, caller: Caller, adapter: ServedAdapter) -> ServedModel:
        owner, origin = owned(adapter.name), self.loader.origin(adapter.name)
        is_told = owner.tenant == caller.tenant or Scope.ADMIN in caller.scopes
        return ServedModel(
            owner.name,
            adapter,
            self._client.version_of(adapter),
            origin.path if origin is not None and is_told else owner.name,
            self.names[0] if origin is None or origin.parent is None else origin.parent,
            self._created_s if origin is None else origin.created_s,
        )


def version_headers(version: AdapterVersion) -> dict[str, str]:
    """Return the headers that name a version: its number, and its digest if that is known."""
    digest = version.known_digest
    number = {"x-adapter-version": str(version.number)}
    return number if digest is None else {**number, "x-adapter-digest": digest}
