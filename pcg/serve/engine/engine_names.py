"""Map between an owner's name of an adapter and the engine's name.

The engine's names of two owners' adapters never collide:

operator   name            for everyone: --lora-modules, --lora-roots, shared loads
tenant     @tenant/name    the tenant is percent-encoded, without a slash
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
    """The owner of an adapter or a job, and its name for that owner.

    Attributes:
        tenant: the owner; "" for the operator, whose adapters all tenants may use.
        name: its name in the owner's requests.
    """

    tenant: str
    name: str


OwnedName: TypeAlias = Callable[[str], Owned]
"""Maps the engine's name of an adapter or a job to its owner."""


# ------------------------------------------------------------------------------------- engine names


_MARK = "@"


def engine_name(tenant: str, name: str) -> str:
    """Return the engine's name of an adapter; the operator's tenant is "".

    Raises:
        AdapterError: the name is invalid or starts with the mark of tenants.
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
    """Return the owner of the adapter or job with this engine name."""
    if not adapter.startswith(_MARK):
        return Owned("", adapter)
    tenant, _, name = adapter[len(_MARK) :].partition("/")
    return Owned(unquote(tenant), name)
