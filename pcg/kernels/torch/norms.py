"""RMS norm and layer norm, and their input gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in the dtype that norms and losses compute in: fp32, or fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (offset + weight); see the operator rms_norm."""
    wide = widened(x)
    scale = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps)).unsqueeze(-1)
    if wide is x:  # nothing is rounded
        y = x * scale
        return y if weight is None else y.mul_(weight + offset if offset else weight)
    wide.mul_(scale)
    if weight is None:
        return wide.to(x.dtype)
    if round_first:
        y = wide.to(x.dtype)
        del wide
        scaled = weight + offset if offset else weight
        return y.mul_(scaled) if scaled.dtype == y.dtype else (y * scaled).to(y.dtype)
    return wide.mul_(widened(weight) + offset if offset else weight).to(x.dtype)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float
) -> Tensor:
    """dx = rstd (g - x rstd² mean(g x)) with g = dy (offset + weight)."""
    wide, n = widened(x), x.shape[-1]
    g = widened(dy)
    if weight is not None:
        scale = widened(weight) + offset if offset else widened(weight)
        g = g * scale if g is dy else g.mul_(scale)
    rstd = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(n).add_(eps))
    inner = torch.linalg.vecdot(g, wide).mul_(rstd.pow(3)).div_(-n).unsqueeze(-1)
    dx = wide * inner if wide is x else wide.mul_(inner)
    return dx.addcmul_(g, rstd.unsqueeze(-1)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim; a weight of more dims scales the leading ones too."""
    if weight is None or weight.dim() == 1:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = F.layer_norm(widened(x), x.shape[-1:], None, None, eps).mul_(weight)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = dy weight."""
    wide, g = widened(x), widened(dy)
    if weight is not None:
        g = g * widened(weight) if g is dy else g.mul_(widened(weight))
    shape = x.shape[-1:]
    _, mean, rstd = torch.native_layer_norm(wide, shape, None, None, eps)
    dx, _, _ = torch.ops.aten.native_layer_norm_backward(
        g.contiguous(), wide.contiguous(), shape, mean, rstd, None, None, [True, False, False]
    )
    return dx.to(x.dtype)  # type: ignore[no-any-return]
