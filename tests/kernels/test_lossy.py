"""Codes of saved activations: e4m3 against torch's cast, and how far values are off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.torch.lossy import (
    BLOCK,
    dequantize_fp8,
    dequantize_int8,
    pack_bf16,
    quantize_fp8,
    quantize_int8,
    unpack_bf16,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KINDS = ["normal", "outliers", "wide", "zeros", "subnormal", "greatest"]
WIDTHS = [1, 32, 64, 128, 130, 384]
DRAWS = {
    "seed": st.integers(0, 99),
    "width": st.sampled_from(WIDTHS),
    "kind": st.sampled_from(KINDS),
}


def numbers(seed: int, width: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Five rows, [5, width], within fp32's range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, width, generator=generator, dtype=torch.float64)
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    if kind == "outliers":
        x[:, seed % width] *= 1e4
    if kind == "wide":
        x *= torch.exp(4 * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    if kind == "zeros":
        x *= 0
    if kind == "subnormal":
        x *= info.smallest_normal
    if kind == "greatest":
        x = x.sign() * info.max
    return x.clamp(-info.max, info.max).to(dtype)


def greatest(x: Tensor) -> Tensor:
    """max |x| of each element's block, over what is finite."""
    finite = x.double().nan_to_num(0.0, 0.0, 0.0).abs()
    blocks = finite.split(BLOCK, -1)
    return torch.cat([b.amax(-1, keepdim=True).expand_as(b) for b in blocks], -1)


@given(dtype=st.sampled_from(DTYPES), **DRAWS)
def test_e4m3_is_off_by_its_bound_at_most(
    seed: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    x = numbers(seed, width, kind, dtype)
    codes, scale = quantize_fp8(x)
    found = dequantize_fp8(codes, scale, dtype)
    assert (codes.dtype, codes.shape) == (torch.uint8, x.shape)
    assert (scale.dtype, scale.shape) == (torch.uint8, (5, -(-width // BLOCK)))
    assert (found.dtype, found.is_contiguous()) == (dtype, True)
    error, of_block = (found.double() - x.double()).abs(), greatest(x)
    bound = torch.maximum(x.double().abs() / 16, of_block / 2**17)
    assert (error <= bound.clamp(min=2.0**-127)).all()
    assert (found.double().abs() <= 2 * of_block).all()


@given(dtype=st.sampled_from(DTYPES), **DRAWS)
def test_codes_are_those_of_torchs_cast(
    seed: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    x = numbers(seed, width, kind, dtype)
    codes, scale = quantize_fp8(x)
    powers = torch.exp2(scale.double() - 127).repeat_interleave(BLOCK, -1)[:, :width]
    theirs = (x.double() / powers).float().to(torch.float8_e4m3fn)
    assert torch.equal(codes, theirs.view(torch.uint8))
    # The least scale that all of a block fits.
    fits = greatest(x) <= 448 * powers
    is_least = (greatest(x) > 224 * powers) | (powers == 2.0**-117) | (greatest(x) == 0)
    assert fits.all()
    assert is_least.all()


@given(dtype=st.sampled_from(DTYPES), **DRAWS)
def test_int8_is_off_by_its_bound_at_most(
    seed: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    x = numbers(seed, width, kind, dtype)
    codes, scale = quantize_int8(x)
    found = dequantize_int8(codes, scale, dtype)
    assert (codes.dtype, codes.shape) == (torch.uint8, x.shape)
    assert (found.dtype, found.is_contiguous()) == (dtype, True)
    error = (found.double() - x.double()).abs()
    bound = greatest(x) / 252 + x.double().abs() / 256
    least = max(2.0**-121, 2.0**-24 if dtype == torch.float16 else 0.0)
    assert (error <= bound.clamp(min=least)).all()


@given(**{**DRAWS, "width": st.sampled_from([2, 32, 64, 128, 130, 384])})
def test_twelve_bits_are_off_by_next_to_nothing(seed: int, width: int, kind: str) -> None:
    x = numbers(seed, width, kind, torch.bfloat16)
    codes, exponent = pack_bf16(x)
    found = unpack_bf16(codes, exponent)
    assert (codes.dtype, codes.shape) == (torch.uint8, (5, 3 * width // 2))
    assert (found.dtype, found.is_contiguous()) == (torch.bfloat16, True)
    error, of_block = (found.double() - x.double()).abs(), greatest(x)
    assert (error <= (of_block / 2**21).clamp(min=2.0**-127)).all()
    is_exact = x.double().abs() >= (of_block / 2**12).clamp(min=2.0**-119)
    assert torch.equal(found[is_exact], x[is_exact])


ENCODINGS = {
    "fp8": (quantize_fp8, lambda *codes: dequantize_fp8(*codes, torch.bfloat16)),
    "int8": (quantize_int8, lambda *codes: dequantize_int8(*codes, torch.bfloat16)),
    "bf16": (pack_bf16, unpack_bf16),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_no_number_stays_none_and_in_its_place(name: str) -> None:
    encode, decode = ENCODINGS[name]
    x = numbers(0, 256, "normal", torch.bfloat16)
    expected = decode(*encode(x))
    ends = {(0, 3): torch.nan, (1, 200): torch.inf, (1, 201): -torch.inf, (2, 255): torch.nan}
    for place, value in ends.items():
        x[place] = value
    x[3] = torch.nan
    found = decode(*encode(x))
    is_other = ~x.isfinite()
    assert not found[is_other].isfinite().any()
    assert found[x.isnan()].isnan().all()
    # The others' scales may change within a token's block, and nowhere else.
    assert found[~is_other].isfinite().all()
    assert torch.equal(found[4], expected[4])
    assert torch.equal(found[0, 128:], expected[0, 128:])


def test_what_is_beyond_the_scales_is_no_number() -> None:
    x = torch.full((1, 32), 1e300, dtype=torch.float64)
    assert dequantize_fp8(*quantize_fp8(x), torch.float64).isnan().all()


def test_no_tokens_have_no_codes() -> None:
    x = torch.empty(0, 256, dtype=torch.bfloat16)
    for encode, decode in ENCODINGS.values():
        assert decode(*encode(x)).shape == x.shape
