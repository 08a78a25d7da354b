"""Rotary position embedding and its gradient."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding that pairs dim i with i + n/2. x: [T, H, D]; cos, sin: [T, n], n ≤ D.

    Tables of a wider dtype than x's (OLMo-2) turn it in theirs.
    """
    if cos.dtype != x.dtype:
        wide = torch.promote_types(x.dtype, cos.dtype)
        return rope_half(x.to(wide), cos.to(wide), sin.to(wide)).to(x.dtype)
    n, half = cos.shape[-1], cos.shape[-1] // 2
    if n == x.shape[-1] and x.shape[0] <= _FEW_TOKENS:
        return torch.addcmul(x * cos.unsqueeze(1), torch.roll(x, half, -1), _signed(sin))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = x[..., :n]
    y = turned * cos
    y[..., :half].addcmul_(x[..., half:n], sin[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y if n == x.shape[-1] else torch.cat((y, x[..., n:]), -1)


_FEW_TOKENS = 128
"""Up to here a call costs more than its arithmetic, so fewer calls win."""


def _signed(sin: Tensor) -> Tensor:
    """sin with its first half negated, [T, 1, n]; remembered, as all layers of a step share it."""
    global _last_signed
    last = _last_signed  # read once: another thread may put its own there
    if last is None or last[0]() is not sin:
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[:, :half], sin[:, half:]), -1).unsqueeze(1)
        _last_signed = last = (weakref.ref(sin), signed)
    return last[1]


_last_signed: tuple[weakref.ref[Tensor], Tensor] | None = None


def rope_half_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """dx of rope_half: the rotation by the opposite angle."""
    half = cos.shape[-1] // 2
    return rope_half(dy, cos, torch.cat((-sin[..., half:], -sin[..., :half]), -1))


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding that pairs dim 2i with 2i + 1. x: [T, H, D]; cos, sin: [T, n], n ≤ D."""
    n = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n < x.shape[-1]:
        y[..., n:] = x[..., n:]
    even, odd = x[..., :n:2], x[..., 1:n:2]
    y[..., :n:2] = even * cos[..., ::2] - odd * sin[..., ::2]
    y[..., 1:n:2] = odd * cos[..., 1::2] + even * sin[..., 1::2]
    return y


def rope_interleaved_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """dx of rope_interleaved: the rotation by the opposite angle."""
    swapped = torch.stack((-sin[..., 1::2], -sin[..., ::2]), -1).flatten(-2)
    return rope_interleaved(dy, cos, swapped)
