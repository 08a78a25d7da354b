"""The weights of the products that serving runs, and how they lie in memory.

Serving multiplies the weights of one product as one: they lie side by side, so that the joined
weight is a view of them, and training reads its rows. On CPUs oneDNN packs a copy of them, whose
products are faster for the few tokens of a decode step (`benchmarks/bench_generation.py`), unless
`packed_weights=False` asks for one copy; then training reads the original.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pcg.ir.graph import Graph
from pcg.kernels.torch.products import has_onednn


@dataclass(frozen=True)
class ProductWeights:
    """The names of the weights [out, in] that one product multiplies by, and of their biases."""

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
    """Return the frozen matrices [out, in] that a graph reads by multiplying alone."""
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
    """Return whether oneDNN packs weights of so many dims on a device, which is this CPU."""
    return dims == 2 and device.type == "cpu" and has_onednn(dtype)


class ProductLayout:
    """Makes of the weights of each product the one weight that serving multiplies by.

    All programs over one base share what is packed, as long as one of them is there.

    Args:
        packs: False to pack nothing, also where oneDNN could.
    """

    def __init__(self, packs: bool) -> None:
        self._packs = packs
        self._packed: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()

    def packs(self, dims: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether a weight of so many dims is packed."""
        return self._packs and is_packed(dims, dtype, device)

    def lay_out(self, key: Hashable, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Return the weights of one product as one, with their sizes and the joined biases.

        Args:
            key: equal where the weights and biases are the same.
        """
        first = weights[0]
        if not self.packs(first.dim(), first.dtype, first.device):
            # A detached tensor, as attributes are set on it, and training reads the original.
            return as_group(joined(weights).detach(), weights, biases)
        found = self._packed.get(key)
        if found is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(joined(weights), None)
            found = self._packed[key] = as_group(packed, weights, biases)
        return found


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
    """Return whether each tensor begins where the one before ends, in the same memory."""
    return all(_follows(*pair) for pair in pairwise(tensors))


def _follows(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor begins where another of the same memory ends."""
    return (
        one.is_contiguous()
        and other.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.data_ptr() + one.nbytes == other.data_ptr()
    )
