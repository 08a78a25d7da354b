"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device.

    A GPU reads it from pinned memory in its own time; a copy from any other memory would be waited
    for. Torch keeps the pinned memory until it was read.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def uploaded_list(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, [n]."""
    return uploaded(torch.tensor(values, dtype=dtype), device)
