"""Work units: the parts of a finetuning job that the engine runs one at a time.

A job is a generator of units: it goes on when the engine has run one. What comes between two units,
such as an optimizer's update, it does itself.
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
        """Number of tokens that are left."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Number of tokens of its sequence before the next one."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """The most layers that a window of them goes back through; 0 without gradients."""

    @abstractmethod
    def run(self, tokens: int) -> None:
        """Run up to so many of them forward."""


class Backward(ABC):
    """One layer of one window, backward."""

    @property
    @abstractmethod
    def layer(self) -> int:
        """Index of the layer; units of one layer, of several jobs, run together."""

    @property
    @abstractmethod
    def load(self) -> Load:
        """Its load."""

    @abstractmethod
    def run(self) -> None:
        """Run it."""


@dataclass
class Pages:
    """A request for pages of the KV cache, which the engine fulfils when there are some.

    Attributes:
        tokens: number of tokens of each sequence.
        tables: the sequences' pages, once they are given.
        cache: the cache of these pages; None if the job itself holds keys and values.
    """

    tokens: Sequence[int]
    tables: tuple[PageTable, ...] = ()
    cache: Any = None


@dataclass(frozen=True)
class Release:
    """Gives the job's pages back."""


Unit: TypeAlias = Forward | Backward | Pages | Release
Work: TypeAlias = Generator[Unit, None, Result]


def run_to_end(work: Work[Result]) -> Result:
    """Run all units of a job in turn, each window a whole pass, without the KV cache."""
    try:
        unit = next(work)
        while True:
            try:
                run_unit(unit)
            except BaseException as error:  # Ctrl-C, too
                unit = work.throw(error)
            else:
                unit = next(work)
    except StopIteration as end:
        result: Result = end.value
        return result


def run_unit(unit: Unit) -> None:
    """Run one unit with nothing beside it."""
    if isinstance(unit, Forward):
        unit.run(unit.remaining)
    elif isinstance(unit, Backward):
        unit.run()
