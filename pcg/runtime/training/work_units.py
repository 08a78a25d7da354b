"""Work units: the parts of a finetuning job that the engine runs in turn.

A job is a generator of units: the generator continues when the engine has run the yielded unit.
Work between two units, such as an optimizer's update, runs within the generator. Interrupts
(Ctrl-C) are deferred during changes that must be atomic, or happen on all ranks.
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
    """The position of a part within its pass. Parts at the same stage may run together.

    Attributes:
        left: number of remaining layers in the phase, including the part's own; 0 in the loss.
    """

    phase: Phase
    left: int


class WindowedPass(ABC):
    """The forward of sequences by windows, their loss, and their backward by layers.

    Attributes:
        layers: the maximum number of layers in a window's backward; 0 without gradients.
    """

    layers: int

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Number of tokens that have not run forward yet."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Number of tokens before the next token in its sequence."""

    @property
    @abstractmethod
    def row(self) -> int:
        """Mean number of tokens per sequence."""

    @property
    @abstractmethod
    def stage(self) -> Stage | None:
        """The stage of the next part; None if the next window has not started."""

    @property
    @abstractmethod
    def load(self) -> Load:
        """The load of the next part: its window, or the remaining loss.

        `ends` is 1 in the backward of a window through the last layer.
        """

    @abstractmethod
    def window_load(self, tokens: int) -> Load:
        """Return the load of a layer of a window of the next tokens."""

    def fitting(self, tokens: int) -> int:
        """Return the size of the next window, at most `tokens`."""
        return tokens

    @abstractmethod
    def forward(self, tokens: int) -> None:
        """Run up to `tokens` next tokens forward through all layers."""

    @abstractmethod
    def begin_window(self, tokens: int) -> None:
        """Start a window of up to `tokens` next tokens, whose forward runs in parts of a layer."""

    @abstractmethod
    def run_part(self, tokens: int) -> None:
        """Run the next part: a layer of a window, or the loss of `tokens` tokens."""

    @property
    def has_unrecorded(self) -> bool:
        """True if windows ran eagerly that `record_next` can record for later passes."""
        return False

    def record_next(self) -> None:
        """Record a layer of a window that ran eagerly."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Forward:
    """The forward of a pass's remaining tokens, in windows of sizes that the engine chooses."""

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
        """Return the load of the next tokens as a window that runs forward whole."""
        return self.whole.window_load(tokens) + Load(trained=tokens, windows=1)

    @property
    def is_over(self) -> bool:
        """True if no new window can start: all tokens ran forward, or a window runs in parts."""
        return self.whole.stage is not None

    def run(self, tokens: int) -> None:
        self.whole.forward(tokens)


@dataclass(frozen=True, eq=False)
class Part:
    """An independent part of a pass: a layer of a window, forward or backward, or a part of a loss.

    Attributes:
        tokens: the number of tokens of a loss; None for all remaining tokens.
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
    """A request for pages of the KV cache, which the engine fulfils when pages are free.

    Attributes:
        cache: the cache of the pages; None if the job holds keys and values itself.
    """

    tokens: Sequence[int]
    tables: tuple[PageTable, ...] = ()
    cache: Any = None


@dataclass(frozen=True)
class Release:
    """Returns the job's pages to the engine."""


class Reading:
    """Numbers on the device, which a job reads when the engine allows it.

    The copy to the host is queued after the computation, so that reading waits for nothing else.

    Attributes:
        step: number of the engine's step that computed the numbers; None until the engine sets it.
    """

    def __init__(self, numbers: Tensor) -> None:
        """Start the copy of the numbers, [n], to the host."""
        self.step: int | None = None
        self._numbers = downloaded(numbers)
        self._is_sent = None
        if numbers.device.type == "cuda":
            self._is_sent = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[float]:
        """Wait for the numbers, and return the numbers."""
        if self._is_sent is not None:
            self._is_sent.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


class StepBeginsAgain(Exception):  # a signal, as StopIteration is
    """Thrown into a job to restart its current step from the first token."""


Unit: TypeAlias = Forward | Part | Pages | Reading | Release
Work: TypeAlias = Generator[Unit, None, Result]


def run_to_end(work: Work[Result]) -> Result:
    """Run all units of a job in turn, with a single window per pass, without the KV cache."""
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
    """Append each SIGINT within the block to a list, and do nothing else.

    Python calls handlers only in the main thread, so that other threads receive no interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
