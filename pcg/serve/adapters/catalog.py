"""The catalog: the names of models on the wire, and what answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcg.runtime.executor import Executor
from pcg.serve.adapters.owned import Owned
from pcg.serve.errors import not_found
from pcg.serve.security.caller import Caller


@dataclass(frozen=True)
class ServedModel:
    """A model that requests may name.

    Attributes:
        name: its name in requests and replies.
        adapter: the name that the engine has for its adapter; None for the base.
        root: where it came from, as far as clients may know.
    """

    name: str
    adapter: str | None
    root: str


class Catalog:
    """The models of a server: the base, and the executor's adapters.

    Args:
        names: the names of the base; replies have the first.
    """

    def __init__(self, executor: Executor, names: Sequence[str]) -> None:
        self._executor = executor
        self.names = tuple(names)

    @property
    def base(self) -> ServedModel:
        return ServedModel(self.names[0], None, self._executor.program.name)

    async def find(self, caller: Caller, name: str) -> ServedModel:
        """Return the model that a caller names.

        Raises:
            ApiError: 404, there is none of that name for this caller.
        """
        if name in self.names:
            return self.base
        if name in self._executor.adapters:
            return ServedModel(name, name, name)
        raise not_found(name)

    def owned(self, adapter: str) -> Owned:
        """Return whose an adapter or a job is, of the engine's name for it."""
        return Owned("", adapter)

    def visible(self, caller: Caller) -> list[ServedModel]:
        """Return the models that a caller may use, the base first."""
        adapters = sorted(self._executor.adapters)
        return [self.base, *(ServedModel(name, name, name) for name in adapters)]
