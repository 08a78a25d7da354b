"""The frozen weights that emitted functions read, bound to a program, and joined by product.

Serving multiplies by the joined weights of a product: the weights are adjacent in memory, so that
the joined weight is a view, and training reads its rows. On CPUs, oneDNN packs a copy of the joined
weights for faster products with the few tokens of a decode step
(`benchmarks/generation.py`), and training reads the original; `packed_weights=False` avoids
the copy.

Layers that are sharded over replicas are gathered into two rooms, in the order of
`pcg.ir.program.layer_order`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.ir.program.layer_order import ROOMS, GatherOrder
from pcg.ir.program.program import ModelGraph, python_name
from pcg.kernels.torch.products import has_onednn
from pcg.ranks.group import PendingCollective, Ranks
from pcg.ranks.shards import FlatPlace


@dataclass(frozen=True)
class ProductWeights:
    """The names of the weights [out, in] of a product, and of their biases."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


def product_weights(graph: Graph) -> Iterator[ProductWeights]:
    """Yield the weights of each product of a graph, except weights that other operators read."""
    products = [n for n in graph.nodes if n.op in ("linear", "linear_group", "lora_linear")]
    others = {name for node in graph.nodes if node not in products for name in node.inputs}
    for node in products:
        count = int(node.get("count", 1))  # type: ignore[arg-type]
        biased = node.get("bias", len(node.inputs) == 3)
        weights = tuple(node.inputs[1 : 1 + count])
        if weights[0] in graph.parameters_by_name and weights[0] not in others:
            biases = tuple(node.inputs[1 + count : 1 + 2 * count]) if biased else ()
            yield ProductWeights(weights, biases)


def is_packed(dims: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if oneDNN packs weights of `dims` dims on the device."""
    return dims == 2 and device.type == "cpu" and has_onednn(dtype)


class ProductLayout:
    """Joins the weights of each product into a single weight for serving.

    All programs over a base share packed weights, as long as any of the programs exists.

    Args:
        packs: False to pack nothing, even where oneDNN could.
    """

    def __init__(self, packs: bool) -> None:
        self._packs = packs
        self._packed: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()

    def packs(self, dims: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Return True if a weight of `dims` dims is packed."""
        return self._packs and is_packed(dims, dtype, device)

    def lay_out(self, key: Hashable, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Return the joined weights of a product, with their sizes and the joined biases.

        Args:
            key: identifies the weights and biases.
        """
        first = weights[0]
        if not self.packs(first.dim(), first.dtype, first.device):
            # A detached tensor, as attributes are set on it, and training reads the original.
            return as_group(joined(weights).detach(), weights, biases)
        known = self._packed.get(key)
        if known is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(joined(weights), None)
            packed.plain = weights  # which the native kernel reads for a token or two
            known = self._packed[key] = as_group(packed, weights, biases)
        return known


def as_group(whole: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Attach the sizes and the joined biases to the joined weights of a product."""
    whole.group_sizes = [tensor.shape[0] for tensor in weights]  # type: ignore[attr-defined]
    whole.group_bias = joined(biases) if biases else None  # type: ignore[attr-defined]
    return whole


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along their first dim: a view if the tensors are adjacent."""
    if not lie_side_by_side(tensors):
        return torch.cat(tuple(tensors))
    first, rows = tensors[0], sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def lie_side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Return True if each tensor starts at the end of the previous tensor in the same memory."""
    return all(_follows(*pair) for pair in pairwise(tensors))


def _follows(first: Tensor, other: Tensor) -> bool:
    return (
        first.is_contiguous()
        and other.is_contiguous()
        and first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and first.data_ptr() + first.nbytes == other.data_ptr()
    )


@dataclass(frozen=True)
class BoundLayer:
    """The weights of a layer for a program.

    Attributes:
        whole: weights that every replica has.
        places: the places of sharded weights, by the names in emitted functions.
        products: products with joined weights.
    """

    whole: SimpleNamespace
    places: Mapping[str, FlatPlace]
    products: Sequence[ProductWeights]

    def of(self, flat: Tensor) -> SimpleNamespace:
        """Return the weights, views of the gathered layer."""
        layer = SimpleNamespace(**vars(self.whole))
        for name, place in self.places.items():
            setattr(layer, name, place.of(flat))
        for product in self.products:
            names = [python_name(name) for name in product.weights]
            weights = [getattr(layer, name) for name in names]
            biases = [getattr(layer, python_name(name)) for name in product.biases]
            for name in names:
                setattr(layer, name, None)
            setattr(layer, names[0], as_group(joined(weights).detach(), weights, biases))
        return layer


class LayerGathers:
    """The two buffers for gathered layers, which all programs over a base share."""

    def __init__(self, replicas: Ranks) -> None:
        self._replicas = replicas
        self._order = GatherOrder()
        self._shards: dict[int, Tensor] = {}
        self._rooms: list[Tensor] = []
        self._pending: list[PendingCollective | None] = [None] * ROOMS

    @property
    def size_bytes(self) -> int:
        """The bytes of the parts and of the buffers."""
        return sum(tensor.nbytes for tensor in (*self._shards.values(), *self._rooms))

    def put(self, shards: Mapping[int, Tensor]) -> None:
        """Store the parts of all layers, by layer, and allocate the buffers."""
        self._shards = dict(shards)
        most = max(self._shards.values(), key=len)
        size = len(most) * self._replicas.size
        self._rooms = [most.new_empty(size) for _ in range(ROOMS)]

    def follow(self, order: Iterable[int]) -> None:
        """Start a pass over layers in the given order; a collective call of replicas."""
        self._order.follow(order)

    def take(self, layer: int) -> Tensor:
        """Return a layer's flat memory, which stays valid until the second next layer is taken.

        Raises:
            ProgramError: the pass takes another layer next.
        """
        room, gathered = self._order.take(layer)
        for next_layer, place in gathered:
            self._wait(place)  # an abandoned pass may have left a pending gather
            shard = self._shards[next_layer]
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
    """The layers of a program with sharded weights."""

    gathers: LayerGathers
    layers: Sequence[BoundLayer]

    def follow(self, order: Iterable[int]) -> None:
        """Start a pass over layers in the given order; a collective call of replicas."""
        self.gathers.follow(order)

    def take(self, layer: int) -> SimpleNamespace:
        """Return the weights of the pass's next layer."""
        return self.layers[layer].of(self.gathers.take(layer))

    def pass_by(self, order: Sequence[int]) -> None:
        """Join the gathers of a pass that other replicas run."""
        self.gathers.follow(order)
        for layer in order:
            self.gathers.take(layer)


@dataclass(frozen=True)
class BaseWeights:
    """The frozen weights and constants, which emitted functions read as `w`.

    Attributes:
        layers: the weights of each layer; with `gathered`, only the part that every replica has.
        gathered: the layers with weights sharded over replicas; None if they are whole.
    """

    prologue: SimpleNamespace
    layers: tuple[SimpleNamespace, ...]
    epilogue: SimpleNamespace
    gathered: GatheredLayers | None = None

    def follow(self, order: Iterable[int]) -> None:
        """Start a pass over layers in the given order; a collective call of replicas."""
        if self.gathered is not None:
            self.gathered.follow(order)

    def layer(self, layer: int) -> SimpleNamespace:
        """Return a layer's weights, which stay valid until the second next layer is requested."""
        return self.layers[layer] if self.gathered is None else self.gathered.take(layer)

    def holders(self, model: ModelGraph) -> Iterator[tuple[Graph, int, SimpleNamespace]]:
        """Yield each graph of the model with its layer's index (0 outside layers) and weights."""
        yield model.prologue, 0, self.prologue
        for layer, block in enumerate(model.layers):
            yield model.blocks[block], layer, self.layers[layer]
        yield model.epilogue, 0, self.epilogue
