"""Operators of the base other than products and attention: norms, rotary embedding, vocabulary."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.host_kernels import normed, turned
from pcg.kernels.torch.products import stand_in_of


def widened(x: Tensor) -> Tensor:
    """Return x in the dtype that norms and losses compute in: fp32, or fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (offset + weight); see the operator rms_norm."""
    native = normed(x, weight, eps, offset, round_first)
    if native is not None:
        return native
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


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of dims i and i + n/2. x: [T, H, D]; cos, sin: [T, n], n ≤ D.

    Tables of a wider dtype than x's (OLMo-2) rotate in theirs.
    """
    if cos.dtype != x.dtype:
        wide = torch.promote_types(x.dtype, cos.dtype)
        return rope_half(x.to(wide), cos.to(wide), sin.to(wide)).to(x.dtype)
    native = turned(x, cos, sin)
    if native is not None:
        return native
    n, half = cos.shape[-1], cos.shape[-1] // 2
    if n == x.shape[-1] and x.shape[0] <= _FEW_TOKENS:
        return torch.addcmul(x * cos.unsqueeze(1), torch.roll(x, half, -1), _signed(sin))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    y = x[..., :n] * cos
    y[..., :half].addcmul_(x[..., half:n], sin[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y if n == x.shape[-1] else torch.cat((y, x[..., n:]), -1)


_FEW_TOKENS = 128
"""Up to here a call costs more than its arithmetic, so fewer calls win."""


def _signed(sin: Tensor) -> Tensor:
    """sin with its first half negated, [T, 1, n], cached for all layers of a step."""
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
    """Rotate pairs of dims 2i and 2i + 1. x: [T, H, D]; cos, sin: [T, n], n ≤ D."""
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


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The smoothed loss of each token in fp32, 0 where the target is negative."""
    targets = targets.masked_fill(targets < 0, -100)
    return F.cross_entropy(
        widened(logits), targets, ignore_index=-100, reduction="none", label_smoothing=smoothing
    )


def cross_entropy_backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, smoothing: float = 0.0
) -> Tensor:
    """dloss · (softmax(logits) - smoothed target), in the dtype of the logits."""
    dlogits = torch.softmax(widened(logits), -1)
    rows = torch.arange(targets.shape[0], device=targets.device)
    dlogits[rows, targets.clamp(min=0)] -= 1 - smoothing
    if smoothing:
        dlogits -= smoothing / logits.shape[-1]
    return dlogits.mul_((dloss * (targets >= 0)).unsqueeze(-1)).to(logits.dtype)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Look ids up in a table, which may be quantized."""
    return stand_in_of(table).rows(ids, table.dtype) if table.is_meta else F.embedding(ids, table)


def embedding_part(ids: Tensor, table: Tensor, batch: ProgramBatch) -> Tensor:
    """Look ids up in the rank's part of a table; zeros for ids of other ranks."""
    places, is_own = _own_places(ids, table.shape[0], batch)
    return embedding(places, table).masked_fill_(~is_own.unsqueeze(-1), 0)


def cross_entropy_part(
    logits: Tensor, targets: Tensor, batch: ProgramBatch, smoothing: float = 0.0
) -> Tensor:
    """Return each token's loss in fp32 from the rank's part of the logits; 0 without a target."""
    wide = widened(logits)
    places, is_own = _own_places(targets, logits.shape[-1], batch)
    picked = wide.gather(-1, places.unsqueeze(-1)).squeeze(-1).masked_fill(~is_own, 0)
    if smoothing:
        of_all = wide.sum(-1) * (smoothing / (logits.shape[-1] * batch.ranks.size))
        picked = (1 - smoothing) * picked + of_all
    picked = batch.ranks.all_reduce(picked)
    return (_log_sum_exp(wide, batch) - picked).masked_fill(targets < 0, 0)


def cross_entropy_part_backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, batch: ProgramBatch, smoothing: float = 0.0
) -> Tensor:
    """dloss · (softmax(logits) - smoothed target) of the rank's part."""
    wide = widened(logits)
    places, is_own = _own_places(targets, logits.shape[-1], batch)
    dlogits = torch.sub(wide, _log_sum_exp(wide, batch).unsqueeze(-1)).exp_()
    del wide  # before there is a copy in the dtype of the logits
    rows = torch.arange(targets.shape[0], device=targets.device)
    dlogits[rows, places] -= is_own.to(dlogits.dtype) * (1 - smoothing)
    if smoothing:
        dlogits -= smoothing / (logits.shape[-1] * batch.ranks.size)
    return dlogits.mul_((dloss * (targets >= 0)).unsqueeze(-1)).to(logits.dtype)


def _own_places(ids: Tensor, size: int, batch: ProgramBatch) -> tuple[Tensor, Tensor]:
    """Return the index of each id in the rank's part, and whether it is in that part."""
    places = ids - batch.ranks.rank * size
    return places.clamp(0, size - 1), (places >= 0) & (places < size)


def _log_sum_exp(logits: Tensor, batch: ProgramBatch) -> Tensor:
    return torch.stack(batch.ranks.all_gather(torch.logsumexp(logits, -1))).logsumexp(0)


def slice_backward(dy: Tensor, dim: int, start: int, stop: int, step: int, size: int) -> Tensor:
    """Return zeros of `size` along `dim`, with dy in the slice."""
    shape = list(dy.shape)
    shape[dim] = size
    dx = dy.new_zeros(shape)
    torch.ops.aten.slice(dx, dim, start, stop, step).copy_(dy)
    return dx


def pack_signs(y: Tensor) -> Tensor:
    """Pack the signs of elements, eight in a byte, the first in the lowest bit."""
    bits = (y > 0).unflatten(-1, (-1, 8)).to(torch.uint8)
    signs: Tensor = (bits << _places(y.device)).sum(-1, dtype=torch.uint8)
    return signs


def relu_backward_packed(dy: Tensor, signs: Tensor) -> Tensor:
    """Return dy where the packed sign is set, else 0."""
    bits = (signs.unsqueeze(-1) >> _places(dy.device)).bitwise_and_(1).flatten(-2)
    return bits.to(dy.dtype).mul_(dy)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
