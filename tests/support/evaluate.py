"""Run a graph node by node, each as the operator table says what it means in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.ir.graph import Graph, Value
from pcg.ir.operators import operator
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.torch import ops as torch_ops
from pcg.peft.weights import AdapterWeight

_NAMESPACE = {"torch": torch, "F": F, "K": torch_ops}


def evaluate(graph: Graph, values: Mapping[str, Tensor], batch: Any = None) -> tuple[Tensor, ...]:
    """The graph's outputs.

    Args:
        graph: without bypass networks of several adapters.
        values: inputs and parameters by name.
        batch: what attention asks of a batch.
    """
    known: dict[str, Any] = dict(values)
    for parameter in graph.parameters:
        if parameter.role == "adapter":
            known[parameter.name] = AdapterWeight(known[parameter.name], 1.0)
    for node in graph.nodes:
        inputs = [f"values[{name!r}]" for name in node.inputs]
        source = operator(node.op).source(inputs, dict(node.attributes))
        result = eval(source, _NAMESPACE, {"values": known, "batch": batch})
        is_one = len(node.outputs) == 1 and not operator(node.op).returns_sequence
        results = (result,) if is_one else result
        for value, tensor in zip(node.outputs, results, strict=True):
            known[value.name] = tensor
    return tuple(known[name] for name in graph.outputs)


def random_values(graph: Graph, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs and parameters of a graph: `tokens` for T."""
    generator = torch.Generator().manual_seed(seed)
    values = [*graph.inputs, *(parameter.value for parameter in graph.parameters)]
    return {value.name: _random(value, tokens, generator) for value in values}


def _random(value: Value, tokens: int, generator: torch.Generator) -> Tensor:
    shape = [tokens] * value.type.is_token_wise + list(value.type.features)
    dtype = getattr(torch, TORCH_NAMES[value.type.dtype])
    if not value.type.is_float:
        return torch.randint(0, 8, shape, generator=generator).to(dtype)
    return (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
