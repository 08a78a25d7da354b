"""The order of a pass's backward: which window goes through which layer, and on which stage.

Where one stage has all layers, it takes all windows through a layer, from the last window, before
it takes them through the layer below: the sums of dK and dV of one layer exist at a time.

Of several pipeline stages each takes a window through all of its layers, and then the window before
it, while the stage below takes the first one on. In a turn each stage runs a layer, or waits:

    2 stages of 2 layers, 3 windows    turn     0   1   2   3   4   5   6   7
                                       last     w2  w2  w1  w1  w0  w0
                                       first            w2  w2  w1  w1  w0  w0

All windows behind one have gone through a layer before it does, so the sums of dK and dV of its own
tokens are final there in both orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pcg.ranks.stages import Stage, Stages


class Turn(NamedTuple):
    """A layer that a stage takes a window back through.

    Attributes:
        window: the place of the window among those of the pass.
    """

    layer: int
    window: int


def layers_back(stages: Stages, first: int) -> list[range]:
    """Return the layers from a first one on by their stages, those of the last stage first."""
    own = (stages[index].layers for index in reversed(range(stages.count)))
    layers = (range(max(one.start, first), one.stop) for one in own)
    return [one for one in layers if one]


class BackwardOrder:
    """The turns of a backward, all stages' alike.

    Attributes:
        number: that of the next turn.
    """

    def __init__(self, stages: Stages, stage: Stage, first: int, windows: int) -> None:
        """Begin before the first turn.

        Args:
            first: the first layer that has a backward; the number of layers if none has.
            windows: the number of windows.
        """
        self._depth = stage.count - 1 - stage.index
        self._layers = layers_back(stages, first)
        self._starts = [stages[index].layers.start for index in reversed(range(stages.count))]
        of_stages = self._of_one if stage.count == 1 else self._of_stages
        self._turns = [turns for turns in of_stages(windows) if any(turns)]
        self.number = 0

    def _of_one(self, windows: int) -> Iterator[list[Turn | None]]:
        for layers in self._layers:
            for layer in reversed(layers):
                for window in reversed(range(windows)):
                    yield [Turn(layer, window)]

    def _of_stages(self, windows: int) -> Iterator[list[Turn | None]]:
        """Yield each stage's turns at once, the last one's first."""
        for run in range(windows + len(self._layers) - 1):
            for passed in range(max(map(len, self._layers), default=0)):
                yield [
                    Turn(layers[-1 - passed], windows - 1 - run + depth)
                    if 0 <= run - depth < windows and passed < len(layers)
                    else None
                    for depth, layers in enumerate(self._layers)
                ]

    @property
    def is_over(self) -> bool:
        """True behind the last turn."""
        return self.number == len(self._turns)

    @property
    def turn(self) -> Turn | None:
        """The stage's next layer and window; None if it waits."""
        return self._turn(self._depth)

    @property
    def is_sent(self) -> bool:
        """True if its gradients go to the stage below."""
        return self._leaves(self._depth)

    @property
    def arriving(self) -> int | None:
        """The window whose gradients the stage above sends at the end of this turn."""
        above = self._turn(self._depth - 1)
        return above.window if above is not None and self._leaves(self._depth - 1) else None

    @property
    def under_way(self) -> list[int]:
        """The windows that any stage runs next."""
        return [turn.window for turn in self._turns[self.number] if turn is not None]

    @property
    def left(self) -> int:
        """The layers that a stage has up to the next one; of several stages, the most."""
        turns = zip(self._turns[self.number], self._starts, strict=False)
        return max(turn.layer - start + 1 for turn, start in turns if turn is not None)

    @property
    def ends_window(self) -> bool:
        """True if a window goes through its last layer next."""
        below = self._turn(len(self._layers) - 1)
        return below is not None and below.layer == self._layers[-1].start

    def _turn(self, depth: int) -> Turn | None:
        """Return what a stage runs next, by its place from the last one on."""
        is_there = 0 <= depth < len(self._layers) and not self.is_over
        return self._turns[self.number][depth] if is_there else None

    def _leaves(self, depth: int) -> bool:
        """Return whether a stage's next turn is a window's last one before the stage below."""
        turn = self._turn(depth)
        is_above = depth < len(self._layers) - 1
        return is_above and turn is not None and turn.layer == self._layers[depth].start
