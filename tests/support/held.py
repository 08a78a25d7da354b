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
from tests.support.operator_cases import EXPERTS


def seeded(*key: object) -> torch.Generator:
    """A generator whose seed is the same in every process."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def held(
    tensor: Tensor,
    layout: Layout,
    degree: int,
    key: object,
    owners: Tensor | None = None,
    elsewhere: float = 0.0,
) -> list[Tensor]:
    """What each rank holds; `owners` [T, k] has the ranks of rows, which are `elsewhere` on others.

    Of weights of experts, all but B of LoRA, [out, r E], have the entries of an expert together.
    """
    if layout.state is State.ROUTED and layout.dim == -1:
        by_expert = tensor.unflatten(-1, (-1, EXPERTS)).chunk(degree, -1)
        return [part.flatten(-2) for part in by_expert]
    if layout.state is State.ROUTED and layout.dim:
        return [part.contiguous() for part in tensor.chunk(degree, layout.dim)]
    if layout.state is State.ROUTED:
        rows = [_rows(tensor, owners == rank) for rank in range(degree)]
        return [torch.where(own, tensor, elsewhere) for own in rows]
    if layout.state is State.PARTITIONED:
        return [part.contiguous() for part in tensor.chunk(degree, layout.dim)]
    if layout.state is State.PRE_REDUCE:
        noise = [
            torch.randn(tensor.shape, generator=seeded(key, i), dtype=tensor.dtype)
            for i in range(degree - 1)
        ]
        return [*noise, tensor - sum(noise, torch.zeros_like(tensor))]
    return [tensor] * degree


def _rows(tensor: Tensor, own: Tensor) -> Tensor:
    if tensor.dim() == 2:  # rows of tokens
        return own.any(1, keepdim=True)
    return own.view(*own.shape, *(1,) * (tensor.dim() - own.dim()))


def joined(parts: Sequence[Tensor], layout: Layout, owners: Tensor | None = None) -> Tensor | None:
    """The whole of what the ranks hold; None where they do not hold it so.

    Of routed rows of tokens [T, n], which several ranks hold, it is the sum, as of their gradients.
    """
    if layout.state is State.ROUTED and layout.dim == -1:
        by_expert = [part.unflatten(-1, (-1, EXPERTS // len(parts))) for part in parts]
        return torch.cat(by_expert, -1).flatten(-2)
    if layout.state is State.ROUTED and layout.dim:
        return torch.cat(list(parts), layout.dim)
    if layout.state is State.ROUTED:
        rows = (torch.where(_rows(p, owners == i), p, 0) for i, p in enumerate(parts))
        return torch.stack([*rows]).sum(0)
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
