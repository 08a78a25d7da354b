"""The order in which a pass reads the layers' weights, and the layers to gather.

    forward     0, 1, …, L - 1
    backward    L - 1, …, F    F: the lowest layer with a backward; before the layers of a segment,
                               the layers that recompute their inputs, upwards

Sharded weights are gathered for two layers at a time in two buffers: the running layer and the
next. A layer stays in its buffer until another layer takes it, and the weights are frozen, so the
layers where a pass reverses are not gathered twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pcg.errors import ProgramError
from pcg.ir.program.saved_memory import Planned

ROOMS = 2
"""Number of layers that are gathered at a time."""


def layers_of_pass(planned: Planned, trains: bool) -> list[int]:
    """Return the layers that read weights in a window's pass, in order; `trains` adds backward."""
    count = len(planned.layers)
    order = list(range(count))
    if not trains:
        return order
    restored = frozenset(planned.restored)
    for layer in reversed(range(count)):
        if planned.plans[planned.layers[layer]].backward is None:
            break
        if layer in restored and (layer == count - 1 or layer + 1 not in restored):
            first = layer
            while first in restored:
                first -= 1
            order += range(first, layer)
        order.append(layer)
    return order


class GatherOrder:
    """The layers in the two buffers, over a sequence of passes."""

    def __init__(self) -> None:
        self._rooms: list[int | None] = [None] * ROOMS
        self._latest = 0
        self._ahead: deque[int] = deque()

    def follow(self, order: Iterable[int]) -> None:
        """Start a pass over these layers, and drop the rest of an abandoned pass."""
        self._ahead = deque(order)

    def take(self, layer: int) -> tuple[int, list[tuple[int, int]]]:
        """Take the pass's next layer.

        Returns:
            Its buffer, and the missing layers to gather (it, and the next) with their buffers.
        Raises:
            ProgramError: the pass takes another layer next.
        """
        if not self._ahead or self._ahead[0] != layer:
            due = f"layer {self._ahead[0]}" if self._ahead else "none"
            raise ProgramError(
                f"layer {layer} runs where {due} is due: layers that lie in shards run in the "
                "order that all replicas gather them in, one pass of whole sequences at a time"
            )
        self._ahead.popleft()
        gathered: list[tuple[int, int]] = []
        if layer not in self._rooms:
            self._put(layer, 1 - self._latest, gathered)
        self._latest = self._rooms.index(layer)
        after = next((upcoming for upcoming in self._ahead if upcoming != layer), None)
        if after is not None and after not in self._rooms:
            self._put(after, 1 - self._latest, gathered)
        return self._latest, gathered

    def _put(self, layer: int, room: int, gathered: list[tuple[int, int]]) -> None:
        self._rooms[room] = layer
        gathered.append((layer, room))


def gathers_of_step(passes: Sequence[Sequence[int]]) -> list[int]:
    """Return the layers that a step's passes gather, if the previous step was the same."""
    rooms, gathered = GatherOrder(), list[int]()
    for _ in range(2):
        gathered.clear()
        for order in passes:
            rooms.follow(order)
            for layer in order:
                gathered += [other for other, _ in rooms.take(layer)[1]]
    return gathered
