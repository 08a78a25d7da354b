"""The weights of the products that serving runs, and how they lie in memory.

Serving multiplies the weights of one product as one. On GPUs they lie side by side, so that the
joined weight is a view of them; on CPUs oneDNN packs a copy of them, whose products are faster for
the few tokens of a decode step (`benchmarks/bench_generation.py`). Training reads the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


def is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN packs weights of a dtype on a device, which is this CPU."""
    return device.type == "cpu" and has_onednn(dtype)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined in their first dim: a view where they lie side by side."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if all(_follows(*pair) for pair in pairwise(tensors)):
        rows = sum(tensor.shape[0] for tensor in tensors)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat(tuple(tensors))


def _follows(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor begins where another of the same memory ends."""
    return (
        one.is_contiguous()
        and other.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.data_ptr() + one.nbytes == other.data_ptr()
    )
