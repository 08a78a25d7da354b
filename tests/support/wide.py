"""transformers' models without fp32 inside: an oracle in fp64, where they narrow on their own."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch


class _Wide(types.ModuleType):
    """torch, whose fp32 is fp64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def widen(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Let models of a type that are built and run from here on compute in fp64 throughout.

    RMSNorm, the angles of rotary embeddings and eager attention's softmax name fp32 whatever the
    model's dtype is. What is traced is the same code, so that it computes in fp64, too.
    """
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    monkeypatch.setattr(module, "torch", _Wide("torch"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
