"""A finetuning job without tensors: the units of `training_pass.pass_through`, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pcg.parallel.costs.step_costs import SequenceChunk
from pcg.runtime.model.load import Load
from pcg.runtime.training.work_units import Backward, Forward, Pages, Release, Work

Windows = list[list[SequenceChunk]]


class SimulatedPass:
    """Sequences on their way forward in windows, and back layer by layer over the windows.

    Attributes:
        windows: that went forward and have layers left to go back, each by its sequences.
        layers: of the model.
        layer: whose backward comes next.
    """

    def __init__(self, lengths: Sequence[int], layers: int, adapter: object, rank: int) -> None:
        """Begin before the first token.

        Args:
            lengths: tokens of each sequence.
            layers: of the model.
            adapter: that is trained.
            rank: of the adapter.
        """
        self.windows: Windows = []
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
        """Tokens that have not gone forward."""
        return sum(self._lengths[self._place :]) - self._context

    @property
    def context(self) -> int:
        """Tokens of its sequence before the next one to go forward."""
        return self._context

    @property
    def is_done(self) -> bool:
        """Whether all layers of all windows went back."""
        return self.layer < 0

    @property
    def next_window(self) -> list[SequenceChunk]:
        """Whose backward comes next: the last one first."""
        return self.windows[self._index]

    @property
    def next_load(self) -> Load:
        """Its work, as the engine counts it."""
        return sum((Load.of(one.tokens, one.context) for one in self.next_window), Load())

    def forward(self, tokens: int) -> None:
        """Take the next tokens forward."""
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

    def backward(self) -> None:
        """Take the next layer of the next window back."""
        index = self._index
        if index:
            self._window = index - 1
        else:
            self._window = None
            self.layer -= 1

    @property
    def _index(self) -> int:
        return len(self.windows) - 1 if self._window is None else self._window


class SimulatedForward(Forward):
    """The tokens of a pass that are left."""

    def __init__(self, whole: SimulatedPass) -> None:
        self.whole = whole

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


class SimulatedBackward(Backward):
    """The next layer and window of a pass."""

    def __init__(self, whole: SimulatedPass) -> None:
        self.whole = whole

    @property
    def layer(self) -> int:
        return self.whole.layer

    @property
    def load(self) -> Load:
        return self.whole.next_load

    def run(self) -> None:
        self.whole.backward()


def simulated_steps(
    batches: Iterable[Sequence[int]],
    layers: int,
    update: Callable[[], None],
    on_step: Callable[[int], None],
    rank: int = 16,
) -> Work[int]:
    """Units of a job that trains on a batch a step.

    Args:
        batches: lengths of the sequences of each.
        layers: of the model.
        update: an optimizer's update, which runs between units.
        on_step: told of each step's tokens.
        rank: of the adapter that is trained.
    Returns:
        How many steps there were.
    """
    steps, adapter = 0, object()
    for lengths in batches:
        yield Pages(lengths)
        whole = SimulatedPass(lengths, layers, adapter, rank)
        yield SimulatedForward(whole)
        while not whole.is_done:
            yield SimulatedBackward(whole)
        yield Release()
        update()
        steps += 1
        on_step(sum(lengths))
    return steps
