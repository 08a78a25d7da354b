"""Binding: one adapter's weights as a training program reads them."""

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
    parameters: Sequence[Parameter], shards: AdapterShards, layer: int, weights: SimpleNamespace
) -> SimpleNamespace:
    """Return the adapter's weights in a layer, by attribute.

    A layer without the adapter gets neutral weights, such as LoRA of rank 0, and the base's own
    biases.

    Args:
        parameters: the parameters of the layer's graph.
        shards: this rank's shards of the adapter.
    """
    bound = SimpleNamespace()
    for parameter in parameters:
        if parameter.role == "adapter":
            weight = shards.weight(parameter, layer)
            if weight is None:
                weight = AdapterWeight(_neutral(parameter, parameters, weights))
            setattr(bound, python_name(parameter.name), weight)
    return bound


def _neutral(
    parameter: Parameter, parameters: Sequence[Parameter], weights: SimpleNamespace
) -> Tensor:
    """Return a weight that changes nothing, for an adapter that has none there."""
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
