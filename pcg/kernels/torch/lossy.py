"""Saved activations in e4m3 with a scale for each block, and norms from what they made."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.kernels.torch.norms import widened

BLOCK = 128
_BIAS = 127
_GREATEST = 448.0
"""The greatest e4m3 number."""
_LEAST, _MOST = -117, 127
"""Exponents of scales: the least code times the least scale, 2⁻¹²⁶, is a normal number of fp32."""
_MANTISSA_BITS = 7
_SPAN = 13
"""Exponents below a block's greatest that 4 bits have beside zero's and that of infinity."""
_ENDLESS = 15 << _MANTISSA_BITS


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x / 2ᵉ, and e + 127 of each block of the last dim; see `quantize_fp8`."""
    size = x.shape[-1]
    blocks = _blocks(x)
    most = blocks.abs().nan_to_num_(0.0, 0.0, 0.0).amax(-1)
    mantissa, exponent = torch.frexp(widened(most))
    # max |x| = m 2ᵖ with m in [1/2, 1), and 448 = 0.875 · 2⁹.
    scale = (exponent - 9 + (mantissa > 0.875)).clamp_(_LEAST, _MOST)
    inverse = torch.ldexp(torch.ones_like(mantissa), -scale)
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    scaled = blocks * inverse.to(dtype).unsqueeze(-1)
    # Torch's cast may saturate, and an infinity has no code.
    scaled.masked_fill_(scaled.abs() > _GREATEST, torch.nan)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[..., :size]
    return codes.contiguous(), (scale + _BIAS).to(torch.uint8)


def dequantize_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, each times its block's scale: exact in every dtype, but for overflow."""
    size, wide = codes.shape[-1], torch.float32 if dtype == torch.float16 else dtype
    blocks = _blocks(codes).view(torch.float8_e4m3fn).to(wide)
    exponent = scale.to(torch.int32) - _BIAS
    one = torch.ones_like(scale, dtype=torch.promote_types(wide, torch.float32))
    factor = torch.ldexp(one, exponent)
    blocks *= factor.to(wide).unsqueeze(-1)
    most = torch.finfo(dtype).max
    x = blocks.clamp_(-most, most).flatten(-2)[..., :size].to(dtype)
    return x.contiguous()


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """round(127 x / max |x|), and max |x| / 127 of each block; see the operator `quantize_int8`."""
    size = x.shape[-1]
    wide = widened(_blocks(x))
    scale = wide.abs().nan_to_num_(0.0, 0.0, 0.0).amax(-1) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0).nan_to_num_(0.0, 0.0, 0.0)
    codes = (wide * inverse.unsqueeze(-1)).round_().clamp_(-128, 127)
    codes = codes.masked_fill_(~wide.isfinite(), -128).to(torch.int8).view(torch.uint8)
    return codes.flatten(-2)[..., :size].contiguous(), scale


def dequantize_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, each times its block's scale."""
    blocks = _blocks(codes.view(torch.int8))
    wide = blocks.to(scale.dtype).mul_(scale.unsqueeze(-1)).masked_fill_(blocks == -128, torch.nan)
    return wide.to(dtype).flatten(-2)[..., : codes.shape[-1]].contiguous()


def pack_bf16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 12 bits, and the greatest exponent of each block; see the operator `pack_bf16`.

    The upper 8 bits of all elements come first, then the lower 4 of an element of the first half
    with those of one of the second.
    """
    size = x.shape[-1]
    blocks = _blocks(x)
    bits = blocks.view(torch.int16)
    exponents = (bits >> _MANTISSA_BITS) & 0xFF
    most = exponents.masked_fill(exponents == 0xFF, 0).amax(-1, keepdim=True)
    most = most.clamp_(min=_SPAN + 1)
    lowest = most - _SPAN
    # Below the lowest exponent, multiples of the lowest's last place.
    place = torch.ldexp(torch.ones_like(most, dtype=torch.float32), _BIAS + _MANTISSA_BITS - lowest)
    small = (blocks.abs() * place).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int16)
    magnitude = bits & 0x7FFF
    code = torch.where(exponents >= lowest, magnitude - ((lowest - 1) << _MANTISSA_BITS), small)
    endless = _ENDLESS | (bits & 0x7F)
    code = torch.where(exponents == 0xFF, endless, code) | ((bits >> 4) & 0x800)
    code = code.flatten(-2)[..., :size]
    first, second = (code & 0xF).to(torch.uint8).chunk(2, -1)
    codes = torch.cat(((code >> 4).to(torch.uint8), first | (second << 4)), -1)
    return codes, most.squeeze(-1).to(torch.uint8)


def unpack_bf16(codes: Tensor, exponent: Tensor) -> Tensor:
    """The bf16 numbers of `pack_bf16`'s codes."""
    size = codes.shape[-1] * 2 // 3
    high, low = codes.split((size, size // 2), -1)
    code = (high.to(torch.int16) << 4) | torch.cat((low & 0xF, low >> 4), -1)
    blocks = _blocks(code)
    lowest = exponent.to(torch.int16).unsqueeze(-1) - _SPAN
    magnitude = blocks & 0x7FF
    place = torch.ldexp(torch.ones_like(lowest, dtype=torch.float32), lowest - _BIAS - 7)
    small = (magnitude * place).to(torch.bfloat16).view(torch.int16)
    bits = torch.where(
        magnitude >> _MANTISSA_BITS == 0, small, magnitude + ((lowest - 1) << _MANTISSA_BITS)
    )
    bits = torch.where(magnitude >= _ENDLESS, 0x7F80 | (magnitude & 0x7F), bits)
    bits |= (blocks & 0x800) << 4
    x: Tensor = bits.view(torch.bfloat16).flatten(-2)[..., :size]
    return x.contiguous()


def _blocks(x: Tensor) -> Tensor:
    """x [.., n] as [.., ceil(n / 128), 128], with zeros behind."""
    missing = -x.shape[-1] % BLOCK
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, BLOCK))


def standardized(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """(x - mean) rstd in x's dtype, and rstd of each row; the mean is 0 unless `centered`."""
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
        g = g * (widened(weight) + offset if offset else widened(weight))
    inner = torch.linalg.vecdot(g, wide).div_(-n).unsqueeze(-1)
    if centered:
        g = g - g.mean(-1, keepdim=True)
    dx = torch.addcmul(g, wide, inner)
    return dx.mul_(rstd.unsqueeze(-1)).to(standardized.dtype)
