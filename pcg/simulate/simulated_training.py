"""A finetuning job without tensors: its units of work, in the order of a real job's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from pcg.parallel.costs.step_costs import SequenceChunk
from pcg.runtime.requests.step import Load
from pcg.runtime.training.recorded.window_sizes import WindowSizes
from pcg.runtime.training.work_units import (
    Forward,
    Pages,
    Part,
    Phase,
    Reading,
    Release,
    Stage,
    StepBeginsAgain,
    WindowedPass,
    Work,
)

_JOBS = itertools.count(-1, -1)
"""Numbers of the adapters that jobs train; versions of those that are served are positive."""


class SimulatedPass(WindowedPass):
    """A forward in windows of tokens, the loss, and a backward layer by layer over the windows.

    Attributes:
        windows: the windows that went forward, each as the chunks of its sequences.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        layers: int,
        adapter: int,
        rank: int,
        sizes: WindowSizes | None = None,
    ) -> None:
        """Begin before the first token.

        Args:
            adapter: a number that nothing else has.
            sizes: the sizes of windows where they are recorded; None where they have any.
        """
        self._sizes = sizes
        if sizes is not None:
            sizes.begin_pass()
        self.windows: list[list[SequenceChunk]] = []
        self.layers = layers
        self.layer = layers - 1
        self._begun = self._next = self._scored = 0
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
    def row(self) -> int:
        return max(sum(self._lengths) // max(len(self._lengths), 1), 1)

    def window_load(self, tokens: int) -> Load:
        return sum((Load.of(one.tokens, one.context) for one in self._tokens(tokens)[0]), Load())

    @property
    def is_done(self) -> bool:
        """True if all layers of all windows went back."""
        return self.layer < 0

    @property
    def stage(self) -> Stage | None:
        if self._begun:
            return Stage(Phase.FORWARD, self.layers - self._next)
        if self.remaining:
            return None
        if self._scored < sum(self._lengths):
            return Stage(Phase.LOSS, 0)
        return Stage(Phase.BACKWARD, self.layer + 1)

    @property
    def next_window(self) -> list[SequenceChunk]:
        """The window whose layer comes next: in backward, the last window first."""
        return self._tokens(self._begun)[0] if self._begun else self.windows[self._index]

    @property
    def load(self) -> Load:
        stage = self.stage
        if stage is not None and stage.phase is Phase.LOSS:
            return Load(sum(self._lengths) - self._scored)
        chunks = (Load.of(one.tokens, one.context) for one in self.next_window)
        return sum(chunks, Load(ends=int(not self._begun and self.layer == 0)))

    def _tokens(self, tokens: int) -> tuple[list[SequenceChunk], int, int]:
        """Return a window of the next tokens, and the place and the context behind it."""
        window: list[SequenceChunk] = []
        place, context = self._place, self._context
        while tokens and place < len(self._lengths):
            count = min(tokens, self._lengths[place] - context)
            window.append(SequenceChunk(count, context, False, True, self._adapter, self._rank))
            tokens -= count
            context += count
            if context == self._lengths[place]:
                place, context = place + 1, 0
        return window, place, context

    def fitting(self, tokens: int) -> int:
        if self._sizes is None or not tokens:
            return tokens
        return self._sizes.fitting(tokens, self.remaining)

    def forward(self, tokens: int) -> None:
        window, self._place, self._context = self._tokens(tokens)
        self.windows.append(window)

    def begin_window(self, tokens: int) -> None:
        self._begun, self._next = tokens, 0

    def run_part(self, tokens: int) -> None:
        if self._begun:
            self._next += 1
            if self._next == self.layers:
                self.forward(self._begun)
                self._begun = 0
        elif self._scored < sum(self._lengths):
            self._scored += tokens
        else:
            self._backward()

    def _backward(self) -> None:
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
    sizes: WindowSizes | None = None,
) -> Work[int]:
    """Yield the units of a job that trains on a batch a step.

    Args:
        batches: the lengths of each step's sequences.
        update: runs an optimizer's update, between units.
        on_step: a function called with each step's number of tokens.
        sizes: the sizes of windows where they are recorded; None where they have any.
    Returns:
        The number of steps.
    """
    steps, adapter = 0, next(_JOBS)
    for lengths in batches:
        while True:
            yield Pages(lengths)
            whole = SimulatedPass(lengths, layers, adapter, rank, sizes)
            try:
                while not whole.is_done:
                    yield Forward(whole) if whole.stage is None else Part(whole)
                break
            except StepBeginsAgain:
                yield Release()
        yield Release()
        reading = Reading(torch.zeros(2))
        yield reading
        reading.read()
        update()
        steps += 1
        on_step(sum(lengths))
    return steps
