"""Memory of the loaded base model.

Each tensor counts once. On a CPU, serving multiplies by oneDNN's packed copies, which exist in
addition to the plain tensors that training reads (`pcg.runtime.model.bound_weights`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from pcg.ir.graph import Graph, Parameter
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TORCH_NAMES, is_format
from pcg.ranks.shards import is_in_shards, is_sharded, part_bytes, rooms_bytes
from pcg.runtime.model.bound_weights import is_packed, product_weights


@dataclass(frozen=True)
class _Held:
    """A tensor of the base, as a graph reads it.

    Attributes:
        key: equal for graphs that read the same tensor, such as tied weights.
        layers: the number of layers with their own copy.
        multiplies: True if serving runs a product with the tensor.
        of_block: True if a layer reads the tensor.
    """

    parameter: Parameter
    key: Hashable
    layers: int
    multiplies: bool
    of_block: bool

    @property
    def elements(self) -> int:
        return prod(self.parameter.type.features) * self.layers

    @property
    def size_bytes(self) -> int:
        return int(self.parameter.type.size_bytes) * self.layers

    def is_packed(self, device: torch.device) -> bool:
        """Return whether a device holds a packed copy of the tensor."""
        type_ = self.parameter.type
        if not self.multiplies or is_format(type_.dtype):
            return False
        return is_packed(len(type_.features), getattr(torch, TORCH_NAMES[type_.dtype]), device)


def parameter_count(model: ModelGraph) -> int:
    """Return the number of the base's parameters; tied parameters count once."""
    frozen = {tensor.key: tensor for tensor in _held(model) if tensor.parameter.role == "frozen"}
    return sum(tensor.elements for tensor in frozen.values())


def formats_of(model: ModelGraph) -> str | None:
    """Return the names of the formats of quantized weights; None without such weights."""
    dtypes = {parameter.type.dtype for graph in model.graphs for parameter in graph.parameters}
    return ", ".join(sorted(filter(is_format, dtypes))) or None


def base_bytes(model: ModelGraph, replicas: int = 1) -> int:
    """Return the bytes of a rank's part of the base, each tensor once.

    Args:
        replicas: the number of replicas that shard the layers; each gathers two layers at a time.
    """
    if replicas == 1:
        return sum({tensor.key: tensor.size_bytes for tensor in _held(model)}.values())
    whole = {tensor.key: tensor.size_bytes for tensor in _held(model) if not _is_parted(tensor)}
    sizes = layer_bytes(model)
    parts = sum(part_bytes(size, replicas) for size in sizes)
    return sum(whole.values()) + parts + rooms_bytes(sizes, replicas)


def packed_bytes(model: ModelGraph, device: torch.device, replicas: int = 1) -> int:
    """Return the bytes of a device's packed copies, unless `packed_weights` is False.

    Layers that replicas gather have no packed copies.
    """
    packed = {
        tensor.key: tensor.size_bytes
        for tensor in _held(model)
        if tensor.is_packed(device) and not (replicas > 1 and _is_parted(tensor))
    }
    return sum(packed.values())


def layer_bytes(model: ModelGraph) -> list[int]:
    """Return the bytes of each layer that replicas can shard."""
    sizes: dict[str, int] = {}
    for block in model.blocks:
        tensors = {
            tensor.key: tensor for tensor in _held_by(block, 1) if is_in_shards(tensor.parameter)
        }
        sizes[block.name] = sum(tensor.size_bytes for tensor in tensors.values())
    return [sizes[model.blocks[block].name] for block in model.layers]


def _is_parted(tensor: _Held) -> bool:
    return tensor.of_block and is_in_shards(tensor.parameter)


def _held(model: ModelGraph) -> Iterator[_Held]:
    """Yield the base's parameters and constants; repeat those of several graphs."""
    for place, block in enumerate(model.blocks):
        yield from _held_by(block, model.layers.count(place), of_block=True)
    for graph in (model.prologue, model.epilogue):
        yield from _held_by(graph, 1)


def _held_by(graph: Graph, layers: int, of_block: bool = False) -> Iterator[_Held]:
    products = {name for product in product_weights(graph) for name in product.weights}
    for parameter in graph.parameters:
        if parameter.role != "adapter":
            of_layers = "{layer}" in parameter.source
            home = graph.name if of_layers else ""
            cut = parameter.rows, parameter.part, parameter.copies
            shard = cut if is_sharded(parameter) else None
            key = (home, parameter.source, parameter.transposed, shard)
            count = layers if of_layers else min(layers, 1)
            yield _Held(parameter, key, count, parameter.name in products, of_block)
