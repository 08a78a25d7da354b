"""Tensors as ranks hold them, and whole again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pcg.ir.layouts import (
    Layout,
)
from pcg.ir.types import State


def seeded(*key: object) -> torch.Generator:
    """A generator whose seed is the same in every process."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def held(tensor: Tensor, layout: Layout, degree: int, key: object) -> list[Tensor]:
    """What each rank holds."""
    if layout.state is State.PARTITIONED:
        return [part.contiguous() for part in tensor.chunk(degree, layout.dim)]
    if layout.state is State.PRE_REDUCE:
        noise = [
            torch.randn(tensor.shape, generator=seeded(key, i), dtype=tensor.dtype)
            for i in range(degree - 1)
        ]
        return [*noise, tensor - sum(noise, torch.zeros_like(tensor))]
    return [tensor] * degree


def joined(parts: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """The whole of what the ranks hold; None where they do not hold it so."""
    if layout.state is State.PARTITIONED:
        return torch.cat(list(parts), layout.dim)
    if layout.state is State.PRE_REDUCE:
        return torch.stack(list(parts)).sum(0)
    if any(not same(part, parts[0]) for part in parts):
        return None
    return parts[0]


def same(found: Tensor | None, expected: Tensor) -> bool:
    if found is None or found.shape != expected.shape:
        return False
    # A sum of parts in half precision is rounded once for each.
    tolerance = 1e-6 if expected.dtype in (torch.float32, torch.float64) else 1e-2
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
