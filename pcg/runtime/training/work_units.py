"""Work units: the parts of a finetuning job that the engine runs in turn.

A job is a generator of units: it continues when the engine has run the unit that it yielded. Work
between two units, such as an optimizer's update, runs within the generator. Interrupts (Ctrl-C)
are deferred while a change must happen as a whole, or on all ranks.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from pcg.kernels.devices import downloaded
from pcg.runtime.memory.pool import PageTable
from pcg.runtime.requests.step import Load

Result = TypeVar("Result")


class Phase(IntEnum):
    """The phases of a pass, the last phase first."""

    BACKWARD = 0
    LOSS = 1
    FORWARD = 2


class Stage(NamedTuple):
    """The place of a part within its pass. Parts at the same stage may run together.

    Attributes:
        left: the layers that are left in the phase, the part's own included; 0 in the loss.
    """

    phase: Phase
    left: int


class WindowedPass(ABC):
    """Sequences that go forward window by window, have their loss, and go back layer by layer.

    Attributes:
        layers: the most layers that a window goes back through; 0 without gradients.
    """

    layers: int

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Number of tokens that have yet to go forward."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Number of tokens before the next token in its sequence."""

    @property
    @abstractmethod
    def row(self) -> int:
        """Mean number of tokens of its sequences."""

    @property
    @abstractmethod
    def stage(self) -> Stage | None:
        """The stage of the next part; None where a window begins."""

    @property
    @abstractmethod
    def load(self) -> Load:
        """The load of the next part: of its window, or of the loss that is left.

        `ends` is 1 in the backward of a window through the last layer.
        """

    @abstractmethod
    def window_load(self, tokens: int) -> Load:
        """Return the load of a layer of a window of the next tokens."""

    def fitting(self, tokens: int) -> int:
        """Return the size of the next window, which has at most `tokens`."""
        return tokens

    @abstractmethod
    def forward(self, tokens: int) -> None:
        """Take up to `tokens` next tokens forward, through all layers."""

    @abstractmethod
    def begin_window(self, tokens: int) -> None:
        """Have up to `tokens` next tokens go forward in parts, a layer each."""

    @abstractmethod
    def run_part(self, tokens: int) -> None:
        """Run the next part: a layer of a window, or the loss of `tokens` tokens."""

    @property
    def has_unrecorded(self) -> bool:
        """True if windows ran eagerly that `record_next` makes graphs of, for later passes."""
        return False

    def record_next(self) -> None:
        """Record a layer of such a window."""
        raise NotImplementedError


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

    def load(self, tokens: int) -> Load:
        """Return the load of the next tokens as a window that goes forward whole."""
        return self.whole.window_load(tokens) + Load(trained=tokens, windows=1)

    @property
    def is_over(self) -> bool:
        """True once no window begins next: all went forward, or a window goes forward in parts."""
        return self.whole.stage is not None

    def run(self, tokens: int) -> None:
        self.whole.forward(tokens)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a pass that runs by itself: a layer of a window, forward or back, or some loss.

    Attributes:
        tokens: the tokens whose loss is computed; None for all that are left.
    """

    whole: WindowedPass
    tokens: int | None = None

    @property
    def stage(self) -> Stage:
        stage = self.whole.stage
        assert stage is not None
        return stage

    @property
    def layers(self) -> int:
        return self.whole.layers

    @property
    def load(self) -> Load:
        return self.whole.load if self.tokens is None else Load(self.tokens)

    def of(self, tokens: int) -> Part:
        """Return a part of up to `tokens` tokens of a loss; a layer is never cut."""
        return Part(self.whole, tokens) if self.stage.phase is Phase.LOSS else self

    def run(self) -> None:
        self.whole.run_part(self.load.tokens)


@dataclass
class Pages:
    """A request for pages of the KV cache, which the engine fulfils when there are some.

    Attributes:
        cache: the cache of these pages; None if the job itself holds keys and values.
    """

    tokens: Sequence[int]
    tables: tuple[PageTable, ...] = ()
    cache: Any = None


@dataclass(frozen=True)
class Release:
    """Gives the job's pages back."""


class Reading:
    """Numbers on the device that a job reads once the engine lets it.

    The copy to the host is queued behind their computation, so reading waits for nothing else.

    Attributes:
        step: number of the engine's step that computed them; None before the engine saw them.
    """

    def __init__(self, numbers: Tensor) -> None:
        """Send the numbers, [n]."""
        self.step: int | None = None
        self._numbers = downloaded(numbers)
        self._is_sent = None
        if numbers.device.type == "cuda":
            self._is_sent = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[float]:
        """Wait for the numbers, and return them."""
        if self._is_sent is not None:
            self._is_sent.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


class StepBeginsAgain(Exception):  # a signal, as StopIteration is
    """Thrown into a job: begin the step under way again, from its first token."""


Unit: TypeAlias = Forward | Part | Pages | Reading | Release
Work: TypeAlias = Generator[Unit, None, Result]


def run_to_end(work: Work[Result]) -> Result:
    """Run all units of a job in turn, each window a whole pass, without the KV cache."""
    try:
        unit = next(work)
        while True:
            try:
                if isinstance(unit, Forward):
                    unit.run(unit.remaining)
                elif isinstance(unit, Part):
                    unit.run()
            except BaseException as error:  # Ctrl-C, too
                unit = work.throw(error)
            else:
                unit = next(work)
    except StopIteration as end:
        result: Result = end.value
        return result


Interrupt = tuple[int, FrameType | None]


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer SIGINT to the end of the block; the handler before the block then runs."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    came: list[Interrupt] = []
    with noted_interrupts(came):
        yield
    if came:
        before(*came[0])


@contextmanager
def noted_interrupts(came: list[Interrupt]) -> Iterator[None]:
    """Append SIGINT within the block to a list, and do nothing else.

    Python calls handlers in the main thread alone, so in other threads there is nothing to note.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
