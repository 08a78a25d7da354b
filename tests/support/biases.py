"""Biases of a model, trained by autograd."""

from __future__ import annotations

from typing import Any

import torch


def biases(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if name.endswith(".bias")}
