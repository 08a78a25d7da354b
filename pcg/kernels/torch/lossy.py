"""Lossy saved activations: codes with a scale for each block, and norms of such values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.torch.base_operators import widened

BLOCK = 128
_BIAS = 127
_NO_NUMBER = -128
_LEAST, _MOST = -117, 127
"""Exponents of scales: the least code times the least scale, 2⁻¹²⁶, is a normal number of fp32."""
_MANTISSA_BITS = 7
_SPAN = 13
"""Exponents below a block's greatest that 4 bits have beside zero's and that of infinity.

The least is 8 of bf16's, so that its last place, 2⁻¹²⁶, is a normal number of fp32."""
_ENDLESS = 15 << _MANTISSA_BITS


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes of x / 2ᵉ, and e + 127 of each block; see the operator."""
    size = x.shape[-1]
    blocks = _blocks(x)
    mantissa, exponent = torch.frexp(_greatest(blocks))
    # max |x| = m 2ᵖ with m in [1/2, 1), and 448 = 0.875 · 2⁹.
    exponent = exponent - 9 + (mantissa > 0.875)
    scale = exponent.clamp(_LEAST, _MOST)
    inverse = torch.ldexp(torch.ones_like(mantissa), -scale)
    inverse.masked_fill_(exponent > _MOST, torch.nan)
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    scaled = _without_infinities(blocks * inverse.to(dtype).unsqueeze(-1))
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[..., :size]
    return codes.contiguous(), (scale + _BIAS).to(torch.uint8)


def dequantize_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each code times its block's scale: exact in every dtype, but for overflow."""
    size, wide = codes.shape[-1], torch.float32 if dtype == torch.float16 else dtype
    blocks = _blocks(codes).view(torch.float8_e4m3fn).to(wide)
    ones = torch.ones_like(scale, dtype=torch.promote_types(wide, torch.float32))
    factor = torch.ldexp(ones, scale.to(torch.int32) - _BIAS)
    blocks *= factor.to(wide).unsqueeze(-1)
    most = torch.finfo(dtype).max
    x = blocks.clamp_(-most, most).flatten(-2)[..., :size].to(dtype)
    return x.contiguous()


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return round(127 x / max |x|), and max |x| / 127 of each block; see the operator."""
    size = x.shape[-1]
    blocks = _blocks(x)
    scale = _greatest(blocks) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0).nan_to_num_(0.0, 0.0, 0.0)
    wide = _without_infinities(blocks * inverse.unsqueeze(-1))
    codes = wide.round_().clamp_(-127, 127).nan_to_num_(_NO_NUMBER).to(torch.int8)
    return codes.view(torch.uint8).flatten(-2)[..., :size].contiguous(), scale


def dequantize_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each code times its block's scale."""
    blocks = _blocks(codes.view(torch.int8))
    most = torch.finfo(dtype).max
    wide = blocks.to(scale.dtype).mul_(scale.unsqueeze(-1)).clamp_(-most, most)
    wide.masked_fill_(blocks == _NO_NUMBER, torch.nan)
    return wide.to(dtype).flatten(-2)[..., : codes.shape[-1]].contiguous()


def pack_bf16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of 12 bits, and the greatest exponent of each block; see the operator.

    The upper 8 bits of all elements come first, then the lower 4 of an element of the first half
    with those of an element of the second.
    """
    size = x.shape[-1]
    blocks = _blocks(x)
    bits = blocks.view(torch.int16)
    exponents = (bits >> _MANTISSA_BITS).bitwise_and_(0xFF)
    is_endless = exponents == 0xFF
    most = exponents.masked_fill_(is_endless, 0).amax(-1, keepdim=True).clamp_(min=_SPAN + 8)
    lowest = most - _SPAN
    is_small = exponents < lowest
    del exponents
    # Below the lowest exponent, multiples of the lowest's last place.
    place = torch.ldexp(torch.ones_like(most, dtype=torch.float32), _BIAS + _MANTISSA_BITS - lowest)
    small = (blocks * place).abs_().round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int16)
    code = (bits & 0x7FFF).sub_((lowest - 1) << _MANTISSA_BITS)
    code = torch.where(is_small, small, code)
    small = (bits & 0x7F).bitwise_or_(_ENDLESS)
    code = torch.where(is_endless, small, code)
    code |= torch.bitwise_and(bits >> 4, 0x800, out=small)
    del small
    code = code.flatten(-2)[..., :size]
    low = (code & 0xF).to(torch.uint8)
    first, second = low.chunk(2, -1)
    codes = torch.cat(((code >> 4).to(torch.uint8), first | (second << 4)), -1)
    return codes, most.squeeze(-1).to(torch.uint8)


def unpack_bf16(codes: Tensor, exponent: Tensor) -> Tensor:
    """Return the bf16 numbers of `pack_bf16`'s codes."""
    size = codes.shape[-1] * 2 // 3
    high, low = codes.split((size, size // 2), -1)
    code = high.to(torch.int16) << 4
    code |= torch.cat((low & 0xF, low >> 4), -1)
    blocks = _blocks(code)
    lowest = exponent.to(torch.int16).unsqueeze(-1) - _SPAN
    magnitude = blocks & 0x7FF
    place = torch.ldexp(torch.ones_like(lowest, dtype=torch.float32), lowest - _BIAS - 7)
    small = (magnitude * place).to(torch.bfloat16).view(torch.int16)
    normal = magnitude + ((lowest - 1) << _MANTISSA_BITS)
    bits = torch.where(magnitude < 1 << _MANTISSA_BITS, small, normal)
    normal = (magnitude & 0x7F).bitwise_or_(0x7F80)
    bits = torch.where(magnitude >= _ENDLESS, normal, bits)
    bits |= torch.bitwise_and(blocks, 0x800, out=magnitude) << 4
    values: Tensor = bits.view(torch.bfloat16).flatten(-2)[..., :size]
    return values.contiguous()


def _greatest(blocks: Tensor) -> Tensor:
    """max |x| of each block's finite elements, in fp32 at least."""
    return widened(blocks.abs().nan_to_num_(0.0, 0.0, 0.0).amax(-1))


def _without_infinities(x: Tensor) -> Tensor:
    """Replace infinities of x by NaN, in place."""
    return x.addcmul_(x, x.new_zeros(()))


def _blocks(x: Tensor) -> Tensor:
    """x [.., n] as [.., ceil(n / 128), 128], with zeros behind; as [.., 1, n] if n is less."""
    if x.shape[-1] < BLOCK:
        return x.unsqueeze(-2)
    missing = -x.shape[-1] % BLOCK
    blocks: Tensor = (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, BLOCK))
    return blocks


def standardized(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Return (x - mean) rstd in x's dtype, and rstd of each row; the mean is 0 if not centered."""
    wide = widened(x)
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps))
    scale = rstd.unsqueeze(-1)
    return (wide * scale if wide is x else wide.mul_(scale)).to(x.dtype), rstd


def standardized_backward(
    dy: Tensor,
    standardized: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    centered: bool,
) -> Tensor:
    """dx = rstd (g - mean(g) - x̂ mean(g x̂)) with g = dy (offset + weight)."""
    wide, n = widened(standardized), standardized.shape[-1]
    g = widened(dy)
    if weight is not None:
        scale = widened(weight) + offset if offset else widened(weight)
        g = g * scale if g is dy else g.mul_(scale)
    inner = torch.linalg.vecdot(g, wide).div_(-n).unsqueeze(-1)
    dx = wide * inner if wide is standardized else wide.mul_(inner)
    dx += g
    if centered:
        dx -= g.mean(-1, keepdim=True)
    return dx.mul_(rstd.unsqueeze(-1)).to(standardized.dtype)
