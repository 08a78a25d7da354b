"""A finetuning job without tensors: its units of work, in the order of a real job's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from pcg.parallel.costs.step_costs import SequenceChunk
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import (
    Backward,
    Forward,
    Pages,
    Release,
    StepBeginsAgain,
    WindowedPass,
    Work,
)

_JOBS = itertools.count(-1, -1)
"""Numbers of the adapters that jobs train; versions of those that are served are positive."""


class SimulatedPass(WindowedPass):
    """A forward pass in windows of tokens, and a backward layer by layer over the windows.

    Attributes:
        windows: the windows that went forward, each as the chunks of its sequences.
    """

    def __init__(self, lengths: Sequence[int], layers: int, adapter: int, rank: int) -> None:
        """Begin before the first token; a number that nothing else has stands for the adapter."""
        self.windows: list[list[SequenceChunk]] = []
        self.layers = layers
        self.layer = layers - 1
        self._lengths = list(lengths)
        self._place = 0
        self._context = 0
        self._window: int | None = None
        self._adapter = adapter
        self._rank = rank

    @property
    def remaining(self) -> int:
        return sum(self._lengths[self._place :]) - self._context

    @property
    def context(self) -> int:
        return self._context

    @property
    def is_done(self) -> bool:
        """True if all layers of all windows went back."""
        return self.layer < 0

    @property
    def next_window(self) -> list[SequenceChunk]:
        """The window whose backward comes next: the last one first."""
        return self.windows[self._index]

    @property
    def load(self) -> Load:
        chunks = (Load.of(one.tokens, one.context) for one in self.next_window)
        return sum(chunks, Load(ends=int(self.layer == 0)))

    def forward(self, tokens: int) -> None:
        window: list[SequenceChunk] = []
        while tokens and self._place < len(self._lengths):
            count = min(tokens, self._lengths[self._place] - self._context)
            context, adapter = self._context, self._adapter
            window.append(SequenceChunk(count, context, False, True, adapter, self._rank))
            tokens -= count
            self._context += count
            if self._context == self._lengths[self._place]:
                self._place, self._context = self._place + 1, 0
        self.windows.append(window)

    def backward(self) -> None:
        index = self._index
        if index:
            self._window = index - 1
        else:
            self._window = None
            self.layer -= 1

    @property
    def _index(self) -> int:
        return len(self.windows) - 1 if self._window is None else self._window


def simulated_steps(
    batches: Iterable[Sequence[int]],
    layers: int,
    update: Callable[[], None],
    on_step: Callable[[int], None],
    rank: int = 16,
) -> Work[int]:
    """Yield the units of a job that trains on a batch a step.

    Args:
        batches: the lengths of each step's sequences.
        update: runs an optimizer's update, between units.
        on_step: a function called with each step's number of tokens.
    Returns:
        The number of steps.
    """
    steps, adapter = 0, next(_JOBS)
    for lengths in batches:
        while True:
            yield Pages(lengths)
            whole = SimulatedPass(lengths, layers, adapter, rank)
            try:
                yield Forward(whole)
                while not whole.is_done:
                    yield Backward(whole)
                break
            except StepBeginsAgain:
                yield Release()
        yield Release()
        update()
        steps += 1
        on_step(sum(lengths))
    return steps
