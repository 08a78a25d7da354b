"""Changes of the catalog that callers ask for: adapters loaded, unloaded and deleted."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from pcg.errors import AdapterConflictError, AdapterError, AdapterNotFoundError
from pcg.keys import Scope
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.adapters.versions import AdapterVersion
from pcg.serve.adapters.catalog import Catalog
from pcg.serve.adapters.loader import Origin, learn_digests
from pcg.serve.engine.engine_names import engine_name, owned
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError, not_found
from pcg.serve.http.service import Service


@dataclass(frozen=True)
class Load:
    """A load that a caller asks for.

    Attributes:
        name: the adapter's name on the wire.
        path: its folder, absolute or under a root.
        owner: the tenant that will own it; "" for the operator, whose adapters are everyone's.
        is_replacing: it may take the place of one of that name.
        expected_version: the number of the version that has to be there; 0 for none.
    """

    name: str
    path: str
    owner: str
    is_replacing: bool = False
    expected_version: int | None = None


def owner_of(service: Service, caller: Caller, name: str) -> str:
    """Return whose adapter of the name answers a caller; its own tenant where there is none."""
    adapter = service.part(Catalog).here(caller.tenant, name)
    return caller.tenant if adapter is None else owned(adapter.name).tenant


async def load(service: Service, asked: Load) -> AdapterVersion:
    """Load an adapter, and return the version that it is from now on.

    Raises:
        ApiError: in vLLM's words, where it has them.
    """
    catalog, loader = service.part(Catalog), service.part(Catalog).loader
    try:
        catalog.check_free(asked.name)
        of_engine = engine_name(asked.owner, asked.name)
    except AdapterError as error:
        raise invalid(str(error)) from None
    may_replace = asked.is_replacing or asked.expected_version is not None
    if of_engine in loader.adapters and not may_replace:
        raise _already(asked.name)
    directory = await asyncio.to_thread(catalog.roots.at, asked.path)
    if directory is None:
        raise ApiError(
            404,
            f"No adapter found for '{asked.path[:1024]}': it is no folder of a saved adapter under "
            "--lora-roots.",
            type="NotFoundError",
            code=404,
        )
    origin = Origin(asked.path, int(time.time()))
    try:
        adapter = await loader.load(
            of_engine,
            directory,
            origin,
            tenant=asked.owner,
            is_replacing=asked.is_replacing,
            expected_version=asked.expected_version,
        )
    except AdapterConflictError as error:
        if not may_replace and of_engine in loader.adapters:  # somebody was faster
            raise _already(asked.name) from None
        raise _conflict(error, of_engine) from None
    version = service.client.version_of(adapter)
    await learn_digests(service.client, [version])
    return version


async def unload(service: Service, name: str, owner: str) -> ServedAdapter:
    """Unload an owner's adapter, and return what it was.

    Raises:
        ApiError: in vLLM's words, where it has them.
    """
    loader = service.part(Catalog).loader
    try:
        of_engine = engine_name(owner, name)
    except AdapterError:
        raise _missing(name) from None
    adapter = loader.adapters.get(of_engine)
    if adapter is None:
        raise _missing(name)
    try:
        await loader.unload(of_engine)
    except AdapterNotFoundError:
        raise _missing(name) from None
    except AdapterConflictError as error:
        raise _conflict(error, of_engine) from None
    return adapter


async def delete(service: Service, caller: Caller, name: str) -> None:
    """Unload an adapter for its owner; an administrator may unload the operator's, too.

    A model that a job made is kept no more.

    Raises:
        ApiError: 404, there is none for this caller; 403, it is another's; 409, a job trains it.
    """
    adapter = service.part(Catalog).here(caller.tenant, name)
    if name in service.part(Catalog).names:
        raise ApiError(403, f"The model `{name}` is the base, and stays.", param="model")
    is_kept = await _forget(service, caller, name)
    if adapter is None:
        if is_kept:
            return
        raise not_found(name)
    owner = owned(adapter.name).tenant
    if owner != caller.tenant and Scope.ADMIN not in caller.scopes:
        raise ApiError(
            403,
            f"The model `{name}` is the operator's; a key with the scope 'admin' may delete it.",
            param="model",
            code="insufficient_permissions",
        )
    await unload(service, name, owner)


async def _forget(service: Service, caller: Caller, name: str) -> bool:
    """Keep a tenant's model no more; returns False if none of the name is kept.

    Checkpoints of a job that is not over stay with it, which may go on from them.
    """
    kept = service.part(Catalog).kept
    folder = None if kept is None else await kept.forget(caller.tenant, name)
    if kept is None or folder is None:
        return False
    for tell in kept.on_forget:
        await tell(caller.tenant, folder)
    return True


def invalid(message: str) -> ApiError:
    """Return vLLM's error of a field that cannot be."""
    return ApiError(400, message, type="InvalidUserInput", code=400)


def _already(name: str) -> ApiError:
    return invalid(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )


def _missing(name: str) -> ApiError:
    message = f"The lora adapter '{name[:256]}' cannot be found."
    return ApiError(404, message, type="NotFoundError", code=404)


def _conflict(error: AdapterConflictError, of_engine: str) -> ApiError:
    """Return the error of a version or a job in the way, by the adapter's name on the wire."""
    message = str(error).replace(of_engine, owned(of_engine).name)
    return ApiError(409, message, code="conflict")
