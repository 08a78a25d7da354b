"""The frozen weights that emitted functions read, bound to one program.

Layers that lie in shards over replicas are gathered into two rooms, in the order of
`pcg.ir.program.layer_order`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.program.layer_order import ROOMS, GatherOrder
from pcg.ir.program.program import ModelGraph, python_name
from pcg.ranks.group import PendingCollective, Ranks
from pcg.ranks.shards import FlatPlace
from pcg.runtime.model.product_weights import ProductWeights, as_group, joined


@dataclass(frozen=True)
class BoundLayer:
    """The weights of a layer as one program reads them.

    Attributes:
        whole: those that every replica has.
        places: the places of the others, by the names that emitted functions read.
        products: products whose weights are read as one.
    """

    whole: SimpleNamespace
    places: Mapping[str, FlatPlace]
    products: Sequence[ProductWeights]

    def of(self, flat: Tensor) -> SimpleNamespace:
        """Return the weights, views of the gathered layer."""
        found = SimpleNamespace(**vars(self.whole))
        for name, place in self.places.items():
            setattr(found, name, place.of(flat))
        for product in self.products:
            names = [python_name(name) for name in product.weights]
            weights = [getattr(found, name) for name in names]
            biases = [getattr(found, python_name(name)) for name in product.biases]
            for name in names:
                setattr(found, name, None)
            setattr(found, names[0], as_group(joined(weights).detach(), weights, biases))
        return found


class LayerGathers:
    """The two rooms for gathered layers, which all programs over one base share."""

    def __init__(self, replicas: Ranks) -> None:
        self._replicas = replicas
        self._order = GatherOrder()
        self._shards: dict[int, Tensor] = {}
        self._rooms: list[Tensor] = []
        self._pending: list[PendingCollective | None] = [None] * ROOMS

    @property
    def size_bytes(self) -> int:
        """The bytes of the parts and of the rooms."""
        return sum(tensor.nbytes for tensor in (*self._shards.values(), *self._rooms))

    def put(self, shards: Mapping[int, Tensor]) -> None:
        """Hold the parts of all layers, by the layer, and make rooms for them."""
        self._shards = dict(shards)
        most = max(self._shards.values(), key=len)
        size = len(most) * self._replicas.size
        self._rooms = [most.new_empty(size) for _ in range(ROOMS)]

    def follow(self, order: Iterable[int]) -> None:
        """Begin a pass, which takes these layers in order; all replicas begin it."""
        self._order.follow(order)

    def take(self, layer: int) -> Tensor:
        """Return a layer's flat memory, whole until the next but one is taken.

        Raises:
            ProgramError: the pass takes another layer next.
        """
        room, gathered = self._order.take(layer)
        for one, place in gathered:
            self._wait(place)  # an abandoned pass may have left it under way
            shard = self._shards[one]
            whole = self._rooms[place][: len(shard) * self._replicas.size]
            self._pending[place] = self._replicas.begin_gather_into(whole, shard)
        self._wait(room)
        return self._rooms[room]

    def _wait(self, room: int) -> None:
        pending, self._pending[room] = self._pending[room], None
        if pending is not None:
            pending()


@dataclass(frozen=True)
class GatheredLayers:
    """The layers of one program whose weights lie in shards."""

    gathers: LayerGathers
    layers: Sequence[BoundLayer]

    def follow(self, order: Iterable[int]) -> None:
        """Begin a pass, which takes these layers in order; all replicas begin it."""
        self.gathers.follow(order)

    def take(self, layer: int) -> SimpleNamespace:
        """Return the weights of the pass's next layer."""
        return self.layers[layer].of(self.gathers.take(layer))

    def pass_by(self, order: Sequence[int]) -> None:
        """Take part in the gathers of a pass that other replicas run."""
        self.gathers.follow(order)
        for layer in order:
            self.gathers.take(layer)


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights and constants, which emitted functions read as `w`.

    Attributes:
        layers: those of each layer; where `gathered` is given, what every replica has of them.
        gathered: the layers whose weights lie in shards over replicas; None where they are whole.
    """

    prologue: SimpleNamespace
    layers: tuple[SimpleNamespace, ...]
    epilogue: SimpleNamespace
    gathered: GatheredLayers | None = None

    def follow(self, order: Iterable[int]) -> None:
        """Begin a pass that takes these layers in order; over replicas, all of them begin it."""
        if self.gathered is not None:
            self.gathered.follow(order)

    def layer(self, layer: int) -> SimpleNamespace:
        """Return a layer's weights, to be read until the next but one is asked for."""
        return self.layers[layer] if self.gathered is None else self.gathered.take(layer)

    def holders(self, model: ModelGraph) -> Iterator[tuple[Graph, int, SimpleNamespace]]:
        """Yield each graph of the model with its layer's index (0 outside layers) and weights."""
        yield model.prologue, 0, self.prologue
        for layer, block in enumerate(model.layers):
            yield model.blocks[block], layer, self.layers[layer]
        yield model.epilogue, 0, self.epilogue
