"""Lossy encodings of saved activations, and norms that are differentiated from their results.

    codes, scale = quantize_fp8(x)    e4m3 codes of x / 2ᵉ, and e of each block of 128 elements
    x̂ = dequantize_fp8(codes, scale)  |x̂ - x| <= max(2⁻⁴ |x|, 2⁻¹⁰ 2ᵉ), and 2ᵉ < max |x| / 224
    x̂ = dequantize_int8(codes, s)     |x̂ - x| <= max |x| / 254 over the block, codes round(x / s)
    x̂ = unpack_bf16(pack_bf16(x))     |x̂ - x| <= 2⁻²¹ max |x|, and 0 from 2⁻¹² max |x| on

A block lies within a token, along its last dim, so no token's values, or NaN, affect another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import (
    DTYPE,
    FLAG,
    FLOAT,
    Aligned,
    Attributes,
    Bounds,
    Operator,
    Types,
    cast_bytes,
    check_gradient,
    check_norm,
    declared,
    widened,
)
from pcg.ir.types import DTYPE_BYTES, TORCH_NAMES, TensorType

BLOCK = 128
"""Elements that share a scale."""


def _padded(x: TensorType, bytes_each: int, more_if_padded: int) -> sympy.Expr:
    """Return the bytes at this many per element; more if the last block of 128 is padded."""
    n = x.features[-1]
    if n % BLOCK == 0 or n < BLOCK:
        return bytes_each * x.elements
    return (bytes_each + more_if_padded) * x.elements * -(-n // BLOCK) * BLOCK / n


class Encoder(Operator):
    """Codes of a value in fewer bytes, followed by a common factor of each block."""

    error: ClassVar[str]
    """The error e of a decoded value, by its x and the maximum |x| of its block."""


class Decoder(Operator):
    """The values of codes."""

    inputs = (2, 2)


class QuantizeFp8(Encoder):
    """e4m3 codes of x / 2ᵉ, u8 `[.., n]`, and e + 127 of each block, u8 `[.., ceil(n / 128)]`.

    e is the least with max |x| <= 448 · 2ᵉ over the block's finite elements, from -117 to 127. An
    infinity becomes NaN, which e4m3 has.
    """

    name = "quantize_fp8"
    error = "e4m3, off by e <= max(2^-4 |x|, 2^-17 max |x|)"
    suffixes = ("", "scale")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (x,) = types
        if not x.is_float or not x.features:
            raise TypeCheckError(f"quantize_fp8 of {x}; expected floats with a feature dim")
        codes = x.with_dtype("u8")
        return codes, codes.with_shape((*x.shape[:-1], -(-x.features[-1] // BLOCK)))

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        for dim in range(-len(types[0].features), -1):
            yield (dim,), (dim, dim)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The scaled copy, in fp32 for fp16; a padded one, and its codes.
        x = inputs[0]
        element_bytes = DTYPE_BYTES[x.dtype]
        return _padded(x, 4 if x.dtype == "f16" else element_bytes, element_bytes + 1)


class DequantizeFp8(Decoder):
    """x̂ in `dtype` from its codes and the scales of their blocks; finite if the code is."""

    name = "dequantize_fp8"
    attributes = declared(dtype=DTYPE)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        codes, scale = types
        expected = (*codes.shape[:-1], -(-codes.features[-1] // BLOCK))
        if (codes.dtype, scale.dtype) != ("u8", "u8") or scale.shape != expected:
            raise TypeCheckError(f"dequantize_fp8 of {codes} by {scale}; expected {list(expected)}")
        return (codes.with_dtype(attributes["dtype"]),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dtype = TORCH_NAMES[attributes["dtype"]]
        return f"K.dequantize_fp8({inputs[0]}, {inputs[1]}, torch.{dtype})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        for dim in range(-len(types[0].features), -1):
            yield (dim, dim), (dim,)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        out = outputs[0]
        element_bytes = DTYPE_BYTES[out.dtype]
        return _padded(out, 4, 0) if out.dtype == "f16" else _padded(out, 0, element_bytes)


class QuantizeInt8(Encoder):
    """round(x / s) of 8 bits, u8 `[.., n]`, and s = max |x| / 127 of each block, fp32.

    The maximum is over the block's finite elements; other elements become NaN, encoded as -128.
    """

    name = "quantize_int8"
    error = "int8, off by e <= max |x| / 252 + 2^-8 |x|"
    suffixes = ("", "scale")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (x,) = types
        codes, scale = QuantizeFp8().infer(types, attributes)
        return codes, scale.with_dtype(widened(x).dtype)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return QuantizeFp8().aligned(types, attributes)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        x = inputs[0]
        return _padded(x, DTYPE_BYTES[widened(x).dtype], DTYPE_BYTES[x.dtype] + 1)


class DequantizeInt8(Decoder):
    """x̂ in `dtype` from its codes and the scales of their blocks."""

    name = "dequantize_int8"
    attributes = declared(dtype=DTYPE)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        codes, scale = types
        expected = (*codes.shape[:-1], -(-codes.features[-1] // BLOCK))
        if codes.dtype != "u8" or not scale.is_float or scale.shape != expected:
            raise TypeCheckError(f"dequantize_int8 of {codes} by {scale}; expected {[*expected]}")
        return (codes.with_dtype(attributes["dtype"]),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dtype = TORCH_NAMES[attributes["dtype"]]
        return f"K.dequantize_int8({inputs[0]}, {inputs[1]}, torch.{dtype})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return DequantizeFp8().aligned(types, attributes)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The product in fp32; for fp32 outputs the product is the output, and a mask remains.
        out = outputs[0]
        wide = DTYPE_BYTES[inputs[1].dtype]
        return _padded(out, 1 if out.dtype == inputs[1].dtype else wide, 3 if wide == 4 else 8)


class PackBf16(Encoder):
    """bf16 in 12 bits: codes, u8 `[.., 3n / 2]`, and each block's largest exponent, u8.

    A code is a sign, an exponent of 4 bits below the block's largest, and bf16's own mantissa.
    Values of at least 2⁻¹³ of the block's largest power of two, 2ᴱ, are exact; smaller values are
    rounded to a multiple of 2ᴱ⁻²⁰. Infinities and NaN stay.
    """

    name = "pack_bf16"
    error = "12 bits, off by e <= 2^-21 max |x|, and by 0 from 2^-12 max |x| on"
    suffixes = ("", "exponent")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (x,) = types
        if x.dtype != "bf16" or not x.features or x.features[-1] % 2:
            raise TypeCheckError(f"pack_bf16 of {x}; expected bf16 with an even last dim")
        n, codes = x.features[-1], x.with_dtype("u8")
        lead = x.shape[:-1]
        return codes.with_shape((*lead, 3 * n // 2)), codes.with_shape((*lead, -(-n // BLOCK)))

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        for dim in range(-len(types[0].features), -1):
            yield (dim,), (dim, dim)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The product in fp32, the partial code, and masks of small and of infinite values.
        return _padded(inputs[0], 7, 2)


class UnpackBf16(Decoder):
    """x̂ in bf16 from its codes of 12 bits and their blocks' exponents."""

    name = "unpack_bf16"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        codes, exponent = types
        n = codes.features[-1] * 2 // 3
        expected = (*codes.shape[:-1], -(-n // BLOCK))
        if (codes.dtype, exponent.dtype) != ("u8", "u8") or codes.features[-1] % 3:
            raise TypeCheckError(f"unpack_bf16 of {codes} and {exponent}")
        if exponent.shape != expected:
            raise TypeCheckError(f"unpack_bf16 of {codes} by {exponent}; expected {list(expected)}")
        return (codes.with_shape((*codes.shape[:-1], n)).with_dtype("bf16"),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        for dim in range(-len(types[0].features), -1):
            yield (dim, dim), (dim,)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _padded(outputs[0], 11, 2)


class Standardized(Operator):
    """x̂ = (x - mean) rstd in x's dtype, and rstd = 1 / sqrt(var + eps) of each row, fp32.

    The mean is 0 unless `centered`. This is a norm's result before its weight.
    """

    name = "standardized"
    attributes = declared(eps=FLOAT, centered=FLAG)
    suffixes = ("", "rstd")
    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (x,) = types
        return x, widened(x).with_shape(x.shape[:-1])

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        eps, centered = attributes["eps"], attributes["centered"]
        return f"K.standardized({inputs[0]}, eps={eps!r}, centered={centered!r})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The copy in fp32 and its square, before the output exists; without the mean, another copy.
        wide = widened(inputs[0])
        copies = cast_bytes(inputs[0], wide.dtype)
        if attributes["centered"] and wide == inputs[0]:
            copies = wide.size_bytes
        return copies + wide.size_bytes - outputs[0].size_bytes


class StandardizedBackward(Operator):
    """dx = rstd (g - mean(g) - x̂ mean(g x̂)) with g = dy (offset + w).

    mean(g) is 0 unless `centered`. Inputs: dy, x̂, rstd, and the weight if any.
    """

    name = "standardized_backward"
    attributes = declared(offset=FLOAT, centered=FLAG)
    inputs = (3, 4)
    sums_rows = True
    bounded_in = Bounds({1: "rstd (e |mean(g x̂)| + (|x̂| + e) mean(|g| e))"})

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, x, rstd, *weights = types
        check_gradient(dy, x)
        if rstd.shape != x.shape[:-1]:
            raise TypeCheckError(f"standardized_backward of {x} takes rstd of each row, not {rstd}")
        check_norm(x, tuple(weights))
        return (x,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        weight = inputs[3] if len(inputs) == 4 else "None"
        options = ", ".join(f"{name}={attributes[name]!r}" for name in ("offset", "centered"))
        return f"K.{self.name}({', '.join(inputs[:3])}, {weight}, {options})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # At the product of g and x̂: both in fp32 and their product, before the output exists.
        wide = widened(inputs[1])
        if inputs[1].dtype == wide.dtype:
            return wide.size_bytes
        return 3 * wide.size_bytes - outputs[0].size_bytes
