"""The frozen weights that emitted functions read, bound to one program, and joined by product.

Serving multiplies the weights of one product as one: they lie side by side, so that the joined
weight is a view of them, and training reads its rows. On CPUs oneDNN packs a copy of them, whose
products are faster for the few tokens of a decode step (`benchmarks/bench_generation.py`), unless
`packed_weights=False` asks for one copy; then training reads the original.

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
    """The names of the weights [out, in] of one product, and of their biases."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


def product_weights(graph: Graph) -> Iterator[ProductWeights]:
    """Yield the weights of each product of a graph; not those that other operators read, too."""
    products = [n for n in graph.nodes if n.op in ("linear", "linear_group", "lora_linear")]
    others = {name for node in graph.nodes if node not in products for name in node.inputs}
    for node in products:
        count = int(node.get("count", 1))  # type: ignore[arg-type]
        biased = node.get("bias", len(node.inputs) == 3)
        weights = tuple(node.inputs[1 : 1 + count])
        if weights[0] in graph.parameters_by_name and weights[0] not in others:
            biases = tuple(node.inputs[1 + count : 1 + 2 * count]) if biased else ()
            yield ProductWeights(weights, biases)


_MULTIPLIES = (
    "base_piece", "column_norm", "linear", "linear_backward", "linear_group", "lora_linear",
    "lora_linear_backward",
)  # fmt: skip


def multiplied(graph: Graph) -> list[str]:
    """Return the frozen matrices [out, in] that a graph reads by multiplication only."""
    others = {name for node in graph.nodes if node.op not in _MULTIPLIES for name in node.inputs}
    return [
        parameter.name
        for parameter in graph.parameters
        if parameter.role == "frozen"
        and len(parameter.type.features) == 2
        and parameter.name not in others
        and parameter.name not in graph.outputs
    ]


def is_packed(dims: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN packs weights of `dims` dims on this device."""
    return dims == 2 and device.type == "cpu" and has_onednn(dtype)


class ProductLayout:
    """Joins the weights of each product into the one weight that serving multiplies by.

    All programs over one base share packed weights while one of the programs exists.

    Args:
        packs: False to pack nothing, even where oneDNN could.
    """

    def __init__(self, packs: bool) -> None:
        self._packs = packs
        self._packed: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()

    def packs(self, dims: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether a weight of `dims` dims is packed."""
        return self._packs and is_packed(dims, dtype, device)

    def lay_out(self, key: Hashable, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Return the weights of one product as one, with their sizes and the joined biases.

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
            known = self._packed[key] = as_group(packed, weights, biases)
        return known


def as_group(whole: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Note on the joined weights of a product their sizes and the joined biases."""
    whole.group_sizes = [tensor.shape[0] for tensor in weights]  # type: ignore[attr-defined]
    whole.group_bias = joined(biases) if biases else None  # type: ignore[attr-defined]
    return whole


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined in their first dim: a view where they lie side by side."""
    if not lie_side_by_side(tensors):
        return torch.cat(tuple(tensors))
    first, rows = tensors[0], sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def lie_side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Return whether each tensor begins at the end of the tensor before, in the same memory."""
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
    """The weights of a layer as one program reads them.

    Attributes:
        whole: weights that every replica has.
        places: the places of the others, by the names that emitted functions read.
        products: products with weights that are read as one.
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
        """Return a layer's flat memory, which stays valid until the second next layer is taken.

        Raises:
            ProgramError: the pass takes another layer next.
        """
        room, gathered = self._order.take(layer)
        for next_layer, place in gathered:
            self._wait(place)  # an abandoned pass may have left it under way
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
    """The layers of one program with sharded weights."""

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
        layers: of each layer; with `gathered`, the part that every replica has.
        gathered: the layers with weights sharded over replicas; None if they are whole.
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
        """Return a layer's weights, which stay valid until the second next layer is requested."""
        return self.layers[layer] if self.gathered is None else self.gathered.take(layer)

    def holders(self, model: ModelGraph) -> Iterator[tuple[Graph, int, SimpleNamespace]]:
        """Yield each graph of the model with its layer's index (0 outside layers) and weights."""
        yield model.prologue, 0, self.prologue
        for layer, block in enumerate(model.layers):
            yield model.blocks[block], layer, self.layers[layer]
        yield model.epilogue, 0, self.epilogue
