"""Bottleneck adapters as hooks of a transformers model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.pytorch_utils import Conv1D

FUNCTIONS = {
    "gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


RECIPES: dict[str, dict[str, Any]] = {
    "houlsby": {"variant": "houlsby", "bottleneck_size": 4, "non_linearity": "gelu"},
    "pfeiffer": {"variant": "pfeiffer", "bottleneck_size": 6, "scaling": 0.7},
    "parallel": {"variant": "parallel", "bottleneck_size": 3, "non_linearity": "silu",
                 "scaling": 4.0},
    "tanh": {"variant": "houlsby", "bottleneck_size": 2, "non_linearity": "tanh"},
    "parallel-gelu_new": {"variant": "parallel", "bottleneck_size": 5,
                          "non_linearity": "gelu_new"},
}  # fmt: skip


FIELDS = {"peft_type": "BOTTLENECK", "bottleneck_size": 4}


FIRST_OF_AN_MLP = ("up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h")


class Bottleneck(torch.nn.Module):
    """down, σ, up: somebody's plain adapter."""

    def __init__(self, hidden: int, recipe: dict[str, Any]) -> None:
        super().__init__()
        size = recipe["bottleneck_size"]
        self.down, self.up = torch.nn.Linear(hidden, size), torch.nn.Linear(size, hidden)
        self.function = FUNCTIONS[recipe.get("non_linearity", "relu")]
        self.scaling = recipe.get("scaling", 1.0)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scaling * self.up(self.function(self.down(x.to(self.down.weight.dtype))))
        return y.to(x.dtype)


def hooked(base: Any, paths: list[str], recipe: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A copy of the model with an adapter at each module, and the adapters by path."""
    model = copy.deepcopy(base).requires_grad_(False)
    adapters = {}
    for path in paths:
        module = model.get_submodule(path)
        features = module.nf if isinstance(module, Conv1D) else module.out_features
        adapters[path] = adapter = Bottleneck(features, recipe)
        if module.weight.dtype != torch.float64:
            adapter.float()
        if recipe["variant"] != "parallel":
            module.register_forward_hook(lambda m, args, out, a=adapter: out + a(out))
            continue
        seen: list[Tensor] = []
        parent = path.rpartition(".")[0]
        names = dict(model.get_submodule(parent).named_children())
        first = next(n for n in FIRST_OF_AN_MLP if n in names)
        names[first].register_forward_pre_hook(lambda m, args, s=seen: s.append(args[0]))
        module.register_forward_hook(lambda m, args, out, a=adapter, s=seen: out + a(s.pop()))
    return model, adapters


def state(adapter: Bottleneck) -> list[Tensor]:
    return [adapter.down.weight, adapter.down.bias, adapter.up.weight, adapter.up.bias]
