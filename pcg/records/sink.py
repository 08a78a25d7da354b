"""A sink: where else the numbers of a run go, by another library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class Sink(ABC):
    """Takes the numbers of a run."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float | int | None]) -> None: ...

    @abstractmethod
    def end(self, *, is_completed: bool) -> None: ...
