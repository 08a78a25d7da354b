"""Uploads: copies from the host to a device that the host does not wait for."""

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
