"""Names of adapters, in the engine and for their owners.

The owner of an adapter or a job, and its name there, of the engine's name for it.

The engine's names of adapters: those of tenants never meet, nor those of the operator.

the operator's  name                     everyone's: --lora-modules, --lora-roots, shared loads
a tenant's      @tenant/name             with the tenant in percent encoding, without a slash
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, unquote

from pcg.errors import AdapterError
from pcg.peft.adapter import check_name

# -------------------------------------------------------------------------------------------- owned


@dataclass(frozen=True)
class Owned:
    """An adapter or a job by its owner.

    Attributes:
        tenant: the owner; "" for the operator; all tenants may use the operator's adapters.
        name: its name in the owner's requests.
    """

    tenant: str
    name: str


OwnedName: TypeAlias = Callable[[str], Owned]
"""Returns the owner of an adapter or a job by its name in the engine."""


# ------------------------------------------------------------------------------------- engine names


_MARK = "@"


def engine_name(tenant: str, name: str) -> str:
    """Return the engine's name of an adapter; the operator's tenant is "".

    Raises:
        AdapterError: it does not name an adapter, or begins with what marks tenants.
    """
    check_name(name)
    if name.startswith(_MARK):
        raise AdapterError(f"{name!r} begins with {_MARK!r}, which marks owners; use another name")
    if not tenant:
        return name
    whole = f"{_MARK}{quote(tenant, safe='')}/{name}"
    check_name(whole)
    return whole


def owned(adapter: str) -> Owned:
    """Return the owner of an adapter or a job by its name in the engine."""
    if not adapter.startswith(_MARK):
        return Owned("", adapter)
    tenant, _, name = adapter[len(_MARK) :].partition("/")
    return Owned(unquote(tenant), name)
