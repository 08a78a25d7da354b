"""The functions that emitted PyTorch programs call, where one PyTorch call is not enough.

They are the reference meaning of the table's model operators, on any device. Shapes: T tokens, h
hidden, H heads, K KV heads, D head size, r rank, V vocabulary. An adapter's weight is anything with
`weight`, `scale` and `segments`: with segments, the weight is a stack [adapters, in, out], scaled
already, and each adapter's tokens are one segment of the batch. Of adapters of several widths it is
a tuple, with one of these for each.

Long because it is a table: one short function an operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.torch.attention import attention, attention_backward
from pcg.kernels.torch.bypass import (
    activate,
    as_weight,
    column_factor,
    column_norm,
    column_norm_part,
    dropout,
    inner,
    scale,
    singular_down,
    singular_down_backward,
    vera_down,
    vera_up,
    vera_up_backward,
)
from pcg.kernels.torch.collectives import (
    all_gather,
    all_gathers,
    all_reduce,
    all_reduces,
    cross_entropy_part,
    cross_entropy_part_backward,
    embedding_part,
    own_part,
    placed_part,
    reduce_scatter,
)
from pcg.kernels.torch.products import (
    linear,
    linear_backward,
    linear_group,
    product,
    product_backward,
)
from pcg.kernels.torch.virtual_tokens import (
    virtual_tokens,
    virtual_tokens_backward,
    without_virtual,
)

__all__ = [
    "activate",
    "all_gather",
    "all_gathers",
    "all_reduce",
    "all_reduces",
    "attention",
    "attention_backward",
    "column_factor",
    "column_norm",
    "column_norm_part",
    "cross_entropy_part",
    "cross_entropy_part_backward",
    "dropout",
    "embedding_part",
    "inner",
    "linear",
    "linear_backward",
    "linear_group",
    "own_part",
    "placed_part",
    "product",
    "product_backward",
    "reduce_scatter",
    "scale",
    "singular_down",
    "singular_down_backward",
    "vera_down",
    "vera_up",
    "vera_up_backward",
    "virtual_tokens",
    "virtual_tokens_backward",
    "without_virtual",
]


def _wide(x: Tensor) -> Tensor:
    """x in the dtype that norms compute in: fp32, or fp64 for fp64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (offset + weight); see the operator rms_norm."""
    wide = _wide(x)
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
    return wide.mul_(_wide(weight) + offset if offset else weight).to(x.dtype)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float
) -> Tensor:
    """dx = rstd (g - x rstd² mean(g x)) with g = dy (offset + weight)."""
    wide, n = _wide(x), x.shape[-1]
    g = _wide(dy)
    if weight is not None:
        scale = _wide(weight) + offset if offset else _wide(weight)
        g = g * scale if g is dy else g.mul_(scale)
    rstd = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(n).add_(eps))
    inner = torch.linalg.vecdot(g, wide).mul_(rstd.pow(3)).div_(-n).unsqueeze(-1)
    dx = wide * inner if wide is x else wide.mul_(inner)
    return dx.addcmul_(g, rstd.unsqueeze(-1)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim; a weight of more dims scales the leading ones too."""
    if weight is None or weight.dim() == 1:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = F.layer_norm(_wide(x), x.shape[-1:], None, None, eps).mul_(weight)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = dy weight."""
    wide, g = _wide(x), _wide(dy)
    if weight is not None:
        g = g * _wide(weight) if g is dy else g.mul_(_wide(weight))
    shape = x.shape[-1:]
    _, mean, rstd = torch.native_layer_norm(wide, shape, None, None, eps)
    dx, _, _ = torch.ops.aten.native_layer_norm_backward(
        g.contiguous(), wide.contiguous(), shape, mean, rstd, None, None, [True, False, False]
    )
    return dx.to(x.dtype)  # type: ignore[no-any-return]


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


def slice_backward(dy: Tensor, dim: int, start: int, stop: int, step: int, size: int) -> Tensor:
    """Zeros of `size` along `dim`, with dy in the slice."""
    shape = list(dy.shape)
    shape[dim] = size
    dx = dy.new_zeros(shape)
    torch.ops.aten.slice(dx, dim, start, stop, step).copy_(dy)
    return dx


def pack_signs(y: Tensor) -> Tensor:
    """Which elements are positive, eight in a byte, the first in the lowest bit."""
    bits = (y > 0).unflatten(-1, (-1, 8)).to(torch.uint8)
    signs: Tensor = (bits << _places(y.device)).sum(-1, dtype=torch.uint8)
    return signs


def relu_backward_packed(dy: Tensor, signs: Tensor) -> Tensor:
    """dy where the packed sign is set, else 0."""
    bits = (signs.unsqueeze(-1) >> _places(dy.device)).bitwise_and_(1).flatten(-2)
    dx: Tensor = dy * bits.to(dy.dtype)
    return dx


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of each token in fp32, 0 where the target is negative."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    targets = targets.masked_fill(targets < 0, -100)
    return F.cross_entropy(logits.to(dtype), targets, ignore_index=-100, reduction="none")


def cross_entropy_backward(dloss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """dloss · (softmax(logits) - onehot(target)), in the dtype of the logits."""
    dlogits = torch.softmax(_wide(logits), -1)
    rows = torch.arange(targets.shape[0], device=targets.device)
    dlogits[rows, targets.clamp(min=0)] -= 1
    return dlogits.mul_((dloss * (targets >= 0)).unsqueeze(-1)).to(logits.dtype)


def lora_linear(
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    a: Sequence[Any],
    b: Sequence[Any],
) -> Sequence[Tensor]:
    """Linear operators of x with each token's own LoRA; the first of `a` holds that of all."""
    first: Any = weights[0]
    return add_lora(linear(x, first, first.group_bias), x, first, a, b)


def add_lora(
    y: Tensor, x: Tensor, weight: Any, a: Sequence[Any], b: Sequence[Any]
) -> Sequence[Tensor]:
    """Add each token's own LoRA to the joined product of some linear operators.

    Args:
        y: the product of x by the base's weights, [T, outs]; written over.
        x: [T, in].
        weight: the base's, joined.
        a: of each output; the first holds that of all (`pcg/runtime/adapters/segments.py`).
        b: likewise.
    Returns:
        Each operator's output.
    """
    for lora in _by_width(a[0]):
        _add_joined(y, x, lora)
    sizes = weight.group_sizes
    return y.split(sizes, -1) if len(sizes) > 1 else (y,)


def _by_width(weights: Any) -> Sequence[Any]:
    """What there is of a site's weights, by the width of adapters."""
    every = weights if isinstance(weights, tuple) else (weights,)
    return [one for one in every if one is not None]


def _add_joined(y: Tensor, x: Tensor, lora: Any) -> None:
    """Add the LoRA of adapters of one width to y [T, outs]."""
    segments = lora.segments
    x, y = x[segments.start : segments.stop], y[segments.start : segments.stop]
    if lora.columns < y.shape[1]:
        y = y.narrow(1, lora.column, lora.columns)
    if x.dtype != lora.a.dtype:
        x = x.to(lora.a.dtype)
    if segments.is_batched:
        s = _products(x.view(lora.a.shape[0], segments.size, -1), lora.a.transpose(1, 2))
        for run in _runs(lora, len(y)):
            _add_batched(y, s, run)
    elif segments.size:
        own = x[segments.gather].view(lora.a.shape[0], segments.size, -1)
        s = _products(own, lora.a.transpose(1, 2))
        z = y.new_zeros((segments.gather.shape[0], y.shape[1]))
        for run in _runs(lora, len(z)):
            _add_batched(z, s, run)
        y.index_add_(0, segments.tokens, z[segments.places])
    for i, first, end in segments.loose:
        s = F.linear(x[first:end], lora.a[i])
        for run in _runs(lora, end - first):
            _add_loose(y[first:end], s, run, i)


def _runs(lora: Any, tokens: int) -> Sequence[Any]:
    """Of B: for few tokens one product costs less than several without its zeros."""
    runs: Sequence[Any] = lora.runs if tokens <= _FEW_ROWS else lora.parts
    return runs


_FEW_ROWS = 32
"""Up to here one product is faster, of hidden 512 and ranks of 16 on a CPU; for 256 tokens parts
take 0.65 to 0.85 as long."""


def _add_batched(y: Tensor, s: Tensor, run: Any) -> None:
    """Add s [adapters, size, ranks] times a run's B to y [adapters · size, outs]."""
    adapters, count, out, rank = run.b.shape
    size = s.shape[1]
    b = run.b.flatten(0, 1).transpose(1, 2)
    if not run.is_whole:
        y = y[:, run.column : run.column + count * out]
        s = s[..., run.row : run.row + count * rank]
    if y.dtype == s.dtype and count == 1:
        # Added where the outputs lie.
        y.view(adapters, size, out).baddbmm_(s, b)
        return
    if y.dtype == s.dtype and run.is_whole and size == 1 and y.is_contiguous():
        y.view(adapters * count, 1, out).baddbmm_(s.view(adapters * count, 1, rank), b)
        return
    own = s.unflatten(-1, (count, rank)).transpose(1, 2)
    z = _products(own.reshape(adapters * count, size, rank), b)
    columns = y.view(adapters, size, count, out)
    columns.add_(z.view(adapters, count, size, out).transpose(1, 2))


def _add_loose(y: Tensor, s: Tensor, run: Any, adapter: int) -> None:
    """Add s [n, ranks] times an adapter's B of a run to y [n, outs]."""
    _, count, out, rank = run.b.shape
    for i in range(count):
        column, row = run.column + i * out, run.row + i * rank
        own, rows = y[:, column : column + out], s[:, row : row + rank]
        if y.dtype == s.dtype:
            own.addmm_(rows, run.b[adapter, i].t())
        else:
            own.add_(F.linear(rows, run.b[adapter, i]))


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, size, in] by weight [n, in, out], a transposed view: [n, size, out]."""
    n, size, in_ = x.shape
    if size == 1 and in_ > weight.shape[2]:
        # CPUs read a matrix of few rows twice as fast from the left.
        return torch.bmm(weight.transpose(1, 2), x.transpose(1, 2)).view(n, 1, -1)
    return torch.bmm(x, weight)


# ------------------------------------------------------------------------------ bypass networks


def shrink(x: Tensor, a: Any) -> Any:
    """s = x Aᵀ: [T, in] to [T, r], in A's dtype; each token by its own adapter.

    None where no token of the batch has an adapter at the site; of several widths, each one's.
    """
    if a is None:
        return None
    if isinstance(a, tuple):
        return tuple(shrink(x, one) for one in a)
    a = as_weight(a)
    segments, weight = a.segments, a.weight
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    if segments is None:
        return F.linear(x, weight)
    x = x[segments.start : segments.stop]
    if segments.is_batched:
        # It stays [adapters, tokens, r].
        return _products(x.view(weight.shape[0], segments.size, -1), weight)
    return _segmented_product(x, weight, segments)


def expand_add(y: Tensor, s: Any, b: Any) -> Tensor:
    """y + scale · s Bᵀ: [T, out], in y's dtype; may be written over y."""
    if s is None or b is None:
        return y
    if isinstance(b, tuple):
        for own, one in zip(s, b, strict=True):
            y = expand_add(y, own, one)
        return y
    b = as_weight(b)
    segments, weight = b.segments, b.weight
    if segments is None:
        if y.dtype == s.dtype:
            return torch.addmm(y, s, weight.t(), alpha=b.scale)
        return y.to(s.dtype).addmm_(s, weight.t(), alpha=b.scale).to(y.dtype)
    rows = y[segments.start : segments.stop]
    if not segments.is_batched:
        rows.add_(_segmented_product(s, weight, segments))
    elif y.dtype == s.dtype:
        rows.view(weight.shape[0], segments.size, -1).baddbmm_(s, weight)
    else:
        rows.view(weight.shape[0], segments.size, -1).add_(torch.bmm(s, weight))
    return y


def expand_add_part(y: Tensor, s: Any, b: Any, batch: Any) -> Tensor:
    """y + scale · s Bᵀ in the rank's own columns, those of its rows of B: [T, out]."""
    if s is None or b is None:
        return y
    own = expand_add(own_part(y, -1, batch).contiguous(), s, b)
    z = y.clone()
    own_part(z, -1, batch).copy_(own)
    return z


def _segmented_product(x: Tensor, weight: Tensor, segments: Any) -> Tensor:
    """Each segment's rows times its own matrix: [T, k] by [n, k, m] to [T, m]."""
    out = x.new_empty((x.shape[0], weight.shape[2]))
    if segments.size:
        own = x[segments.gather].view(weight.shape[0], segments.size, -1)
        out.index_copy_(0, segments.tokens, _products(own, weight).flatten(0, 1)[segments.places])
    for i, first, end in segments.loose:
        torch.mm(x[first:end], weight[i], out=out[first:end])
    return out


def shrink_backward(ds: Tensor, a: Any) -> Tensor:
    """dx = ds A."""
    dx: Tensor = ds @ as_weight(a).weight
    return dx


def expand_backward(dz: Tensor, b: Any) -> Tensor:
    """ds = scale · dz B, in B's dtype."""
    b = as_weight(b)
    ds: Tensor = dz.to(b.weight.dtype) @ b.weight
    return ds.mul_(b.scale)


def outer(ds: Tensor, x: Tensor) -> Tensor:
    """dA = dsᵀ x."""
    return ds.t() @ x.to(ds.dtype)


def scaled_outer(dz: Tensor, s: Tensor, b: Any) -> Tensor:
    """dB = scale · dzᵀ s."""
    return (dz.to(s.dtype).t() @ s).mul_(as_weight(b).scale)


def bias_add(y: Tensor, bias: Any, base: Tensor | None = None) -> Tensor:
    """y + scale · bias, or y + (bias - base), each token with its own adapter's bias."""
    if bias is None:
        return y
    if isinstance(bias, tuple):
        for one in bias:
            y = bias_add(y, one, base)
        return y
    if bias.segments is None:
        delta: Tensor = bias.weight * bias.scale if base is None else bias.weight - base
        return (y + delta).to(y.dtype)
    delta = bias.weight[:, 0]  # scaled; zeros for who has none
    if base is not None:
        delta = (delta - base) * torch.tensor(bias.present, device=y.device).unsqueeze(-1)
    sizes = torch.tensor(bias.segments.sizes, device=y.device)
    rows = y[bias.segments.start : bias.segments.stop]
    rows.copy_(rows + delta.repeat_interleave(sizes, 0))
    return y


def sum_tokens(dz: Tensor, bias: Any = None) -> Tensor:
    """The sum over tokens, in fp32 at least; scaled as a bias is."""
    total = _wide(dz).sum(0)
    return total if bias is None else total.mul_(bias.scale)
