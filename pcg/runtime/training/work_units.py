"""What a finetuning job asks the engine for, one unit at a time.

A job is a generator of units: it goes on when the engine has done one. What comes between two
units, such as an optimizer's update, it does itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from pcg.runtime.memory.pool import PageTable
from pcg.runtime.model.load import Load

Result = TypeVar("Result")


class Forward(ABC):
    """Tokens that go forward, as many at a time as the engine wants."""

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Tokens that are left."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens that the next one sees before it."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """That a window of them goes back through, at most; 0 where gradients are not wanted."""

    @abstractmethod
    def run(self, tokens: int) -> None:
        """Take so many of them forward."""


class Backward(ABC):
    """One layer of one window, backward."""

    @property
    @abstractmethod
    def layer(self) -> int:
        """Of the model; units of one layer, of several jobs, run together."""

    @property
    @abstractmethod
    def load(self) -> Load:
        """Its work."""

    @abstractmethod
    def run(self) -> None:
        """Do it."""


@dataclass
class Pages:
    """Room for sequences in the KV cache, which the engine gives when there is some.

    Attributes:
        tokens: of each sequence.
        tables: their pages, once there is room.
        cache: that these are pages of; None where whoever asks keeps keys and values itself.
    """

    tokens: Sequence[int]
    tables: tuple[PageTable, ...] = ()
    cache: Any = None


@dataclass(frozen=True)
class Release:
    """The job needs its pages no more."""


Unit: TypeAlias = Forward | Backward | Pages | Release
Work: TypeAlias = Generator[Unit, None, Result]


def run_to_end(work: Work[Result]) -> Result:
    """Do all of a job's units in turn, each window a whole pass, without the KV cache."""
    try:
        unit = next(work)
        while True:
            try:
                run_unit(unit)
            except BaseException as error:  # the job ends by it, Ctrl-C too
                unit = work.throw(error)
            else:
                unit = next(work)
    except StopIteration as end:
        result: Result = end.value
        return result


def run_unit(unit: Unit) -> None:
    """Do one unit with nothing beside it."""
    if isinstance(unit, Forward):
        unit.run(unit.remaining)
    elif isinstance(unit, Backward):
        unit.run()
