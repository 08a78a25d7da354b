"""Copies between the host and a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device.

    A GPU reads it from pinned memory, which torch keeps until then; the host would wait for a copy
    from any other memory.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def uploaded_list(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device, [n]."""
    return uploaded(torch.tensor(values, dtype=dtype), device)


def downloaded(x: Tensor) -> Tensor:
    """Copy a tensor to the host, to be read once an event is over that is recorded afterwards.

    A GPU writes it into pinned memory.
    """
    if x.device.type != "cuda":
        return x
    found = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return found.copy_(x, non_blocking=True)
