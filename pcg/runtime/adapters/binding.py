"""One adapter's weights, as a training program reads them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.ir.program.program import python_name
from pcg.ir.types import TORCH_NAMES
from pcg.peft.registry import parameter_kind
from pcg.peft.weights import AdapterWeight
from pcg.runtime.adapters.adapter_shards import AdapterShards


def bind(
    parameters: Sequence[Parameter], pieces: AdapterShards, layer: int, weights: SimpleNamespace
) -> SimpleNamespace:
    """The adapter's weights by attribute.

    A layer that the adapter leaves out gets weights that change nothing, such as LoRA's of rank 0,
    and the base's own biases.

    Args:
        parameters: of the layer's graph.
        pieces: of the adapter that is trained.
        layer: its index.
        weights: of the base, in that layer.
    """
    bound = SimpleNamespace()
    for parameter in parameters:
        if parameter.role == "adapter":
            weight = pieces.weight(parameter, layer)
            if weight is None:
                weight = AdapterWeight(_neutral(parameter, parameters, weights))
            setattr(bound, python_name(parameter.name), weight)
    return bound


def _neutral(
    parameter: Parameter, parameters: Sequence[Parameter], weights: SimpleNamespace
) -> Tensor:
    """What stands for a weight that the adapter does not have, and changes nothing."""
    kind = parameter.source.rpartition(".")[2]
    if kind == "bias":
        frozen = {(p.source, p.rows): p.name for p in parameters if p.role == "frozen"}
        own: Tensor = getattr(weights, python_name(frozen[parameter.source, parameter.rows]))
        return own
    dtype, of = getattr(torch, TORCH_NAMES[parameter.type.dtype]), parameter_kind(kind)
    if of.of_base is not None:
        source = f"{parameter.source.removesuffix(kind)}weight"
        (name,) = (p.name for p in parameters if p.role == "frozen" and p.source == source)
        own = getattr(weights, python_name(name))
        return of.of_base(own.to(dtype))
    sizes = [int(size) for size in parameter.type.shape]
    if of.rank_dim is not None:
        sizes[of.rank_dim] = 0
    device = next(iter(vars(weights).values())).device
    return torch.full(sizes, of.fill, dtype=dtype, device=device)
