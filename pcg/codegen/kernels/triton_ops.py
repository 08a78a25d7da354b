"""The functions that emitted Triton programs call: PyTorch's, where there is no kernel for it."""

from __future__ import annotations

from typing import Any

from pcg.codegen.kernels import torch_ops
from pcg.codegen.kernels.fused import fused

__all__ = ["fused"]


def __getattr__(name: str) -> Any:
    return getattr(torch_ops, name)
