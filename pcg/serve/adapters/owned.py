"""The owner of an adapter or a job, and its name there, of the engine's name for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Owned:
    """An adapter or a job by its owner.

    Attributes:
        tenant: the owner; "" for the operator, whose adapters are everyone's.
        name: its name in the owner's requests.
    """

    tenant: str
    name: str


OwnedName: TypeAlias = Callable[[str], Owned]
"""Returns whose an adapter or a job is, of the engine's name for it."""
