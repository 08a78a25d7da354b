"""A finetuning job without tensors: its units of work, in the order of a real job's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pcg.parallel.costs.step_costs import SequenceChunk
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Backward, Forward, Pages, Release, Work


class SimulatedForward(Forward):
    """The tokens of a step that have not gone forward.

    Attributes:
        windows: the windows that went forward, each as the chunks of its sequences.
    """

    def __init__(self, lengths: Sequence[int], layers: int, adapter: object, rank: int) -> None:
        self.windows: list[list[SequenceChunk]] = []
        self._lengths = list(lengths)
        self._layers = layers
        self._adapter = adapter
        self._rank = rank
        self._place = 0
        self._context = 0

    @property
    def remaining(self) -> int:
        return sum(self._lengths[self._place :]) - self._context

    @property
    def context(self) -> int:
        return self._context

    @property
    def layers(self) -> int:
        return self._layers

    def run(self, tokens: int) -> None:
        window: list[SequenceChunk] = []
        while tokens and self._place < len(self._lengths):
            count = min(tokens, self._lengths[self._place] - self._context)
            context, adapter = self._context, id(self._adapter)
            window.append(SequenceChunk(count, context, False, True, adapter, self._rank))
            tokens -= count
            self._context += count
            if self._context == self._lengths[self._place]:
                self._place, self._context = self._place + 1, 0
        self.windows.append(window)


class SimulatedBackward(Backward):
    """A layer of a window, backward."""

    def __init__(self, layer: int, window: list[SequenceChunk]) -> None:
        self.window = window
        self._layer = layer

    @property
    def layer(self) -> int:
        return self._layer

    @property
    def load(self) -> Load:
        return sum((Load.of(one.tokens, one.context) for one in self.window), Load())

    def run(self) -> None:
        """Do nothing: there are no tensors."""


def simulated_steps(
    batches: Iterable[Sequence[int]],
    layers: int,
    update: Callable[[], None],
    on_step: Callable[[int], None],
    rank: int = 16,
) -> Work[int]:
    """Yield the units of a job that trains on a batch a step; returns the number of steps.

    Args:
        batches: the lengths of each step's sequences.
        update: runs an optimizer's update, between units.
        on_step: a function called with each step's number of tokens.
    """
    steps, adapter = 0, object()
    for lengths in batches:
        yield Pages(lengths)
        forward = SimulatedForward(lengths, layers, adapter, rank)
        yield forward
        for layer in reversed(range(layers)):
            for window in reversed(forward.windows):
                yield SimulatedBackward(layer, window)
        yield Release()
        update()
        steps += 1
        on_step(sum(lengths))
    return steps
