"""One adapter's weights, as a training program reads them."""

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
    dtype = getattr(torch, TORCH_NAMES[parameter.type.dtype])
    if kind == "lora_magnitude_vector":
        source = f"{parameter.source.removesuffix(kind)}weight"
        (name,) = (p.name for p in parameters if p.role == "frozen" and p.source == source)
        own = getattr(weights, python_name(name))
        norm: Tensor = torch.linalg.vector_norm(own.to(dtype), dim=1)
        return norm
    sizes = [int(size) for size in parameter.type.shape]
    device = next(iter(vars(weights).values())).device
    kind = kind[max(kind.find("adapter_"), 0) :]  # of any bottleneck
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
