"""Binding: one adapter's weights as a training program reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.ir.program.program import python_name
from pcg.ir.types import TORCH_NAMES
from pcg.peft.module_weights import AdapterWeight
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
        layer: index of the layer.
        weights: the base's weights in that layer.
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
    dtype = getattr(torch, TORCH_NAMES[parameter.type.dtype])
    if kind == "lora_magnitude_vector":
        source = f"{parameter.source.removesuffix(kind)}weight"
        (name,) = (p.name for p in parameters if p.role == "frozen" and p.source == source)
        own = getattr(weights, python_name(name))
        norm: Tensor = torch.linalg.vector_norm(own.to(dtype), dim=1)
        return norm
    sizes = [int(size) for size in parameter.type.shape]
    device = next(iter(vars(weights).values())).device
    kind = kind[max(kind.find("adapter_"), 0) :]  # bottlenecks have prefixes
    return _NEUTRAL[kind](sizes).to(device, dtype)


_NEUTRAL: Mapping[str, Callable[[list[int]], Tensor]] = {
    "adapter_down": lambda sizes: torch.empty(0, sizes[1]),
    "adapter_down_bias": lambda sizes: torch.empty(0),
    "adapter_up": lambda sizes: torch.empty(sizes[0], 0),
    "adapter_up_bias": torch.zeros,
    "adalora_A": lambda sizes: torch.empty(0, sizes[1]),
    "adalora_B": lambda sizes: torch.empty(sizes[0], 0),
    "adalora_E": lambda sizes: torch.empty(0, 1),
    "ia3_l": torch.ones,
    "ia3_l_in": torch.ones,
    "lora_A": lambda sizes: torch.empty(0, sizes[1]),
    "lora_B": lambda sizes: torch.empty(sizes[0], 0),
    "lora_B_bias": torch.zeros,
    "vera_lambda_b": torch.zeros,
    "vera_lambda_d": torch.zeros,
}
