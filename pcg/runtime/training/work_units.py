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


class WindowedPass(ABC):
    """Sequences that go forward window by window, and then back layer by layer.

    Attributes:
        layers: the most layers that a window goes back through; 0 without gradients.
        layer: the layer whose backward comes next.
    """

    layers: int
    layer: int

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Number of tokens that have yet to go forward."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Number of tokens of its sequence before the next one to go forward."""

    @property
    @abstractmethod
    def load(self) -> Load:
        """The load of the window whose backward comes next; `ends` is 1 at the last layer."""

    @abstractmethod
    def forward(self, tokens: int) -> None:
        """Take up to `tokens` next tokens forward."""

    @abstractmethod
    def backward(self) -> None:
        """Take one layer of one window back, after all tokens went forward."""


@dataclass(frozen=True, eq=False)
class Forward:
    """The tokens of a pass that have yet to go forward, as many at a time as the engine wants."""

    whole: WindowedPass

    @property
    def remaining(self) -> int:
        return self.whole.remaining

    @property
    def context(self) -> int:
        return self.whole.context

    @property
    def layers(self) -> int:
        return self.whole.layers

    def run(self, tokens: int) -> None:
        self.whole.forward(tokens)


@dataclass(frozen=True, eq=False)
class Backward:
    """The next layer of the next window to go back; units of one layer of all jobs run together."""

    whole: WindowedPass

    @property
    def layer(self) -> int:
        return self.whole.layer

    @property
    def layers(self) -> int:
        return self.whole.layers

    @property
    def load(self) -> Load:
        return self.whole.load

    def run(self) -> None:
        self.whole.backward()


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


class StepBeginsAgain(Exception):  # a signal, as StopIteration is
    """Thrown into a job: begin the step under way again, from its first token."""


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
