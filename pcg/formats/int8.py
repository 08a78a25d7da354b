"""int8 by output channel: the matrix in 8 bits, and for `int8` each token's inputs, too.

    q = round(w / s),     s = max |w| of the row / 127
    int8        y = (x8 · qᵀ) ⊙ s_x ⊙ s,    x8 = round(x / s_x), s_x = max |x| of the token / 127
                and the same product of x - x8 ⊙ s_x, for tokens that few large entries make coarse
    int8_weight y = x · (q ⊙ s)ᵀ

The sum of `int8` is an integer, so that a token has the same bits in any batch. Both have
dx = dy (q ⊙ s), in floating point: the gradient passes x's rounding unchanged. On CPUs without the
native kernel oneDNN runs the product by a packed copy of q, or, as its sums overflow without VNNI,
fp32 products of so few columns that they are exact integers. `int8_weight` is the layout of
LLM.int8 checkpoints (bitsandbytes), without its outlier columns.

    8 + 32/in bits a weight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.formats import native
from pcg.formats.format import Format, Layout, Parts, Span, StoredMatrix

_LEAST_SCALE = torch.finfo(torch.float32).tiny
_EXACT = 1024
"""Columns whose products sum to an integer that fp32 has exactly: 127² · 1024 < 2²⁴."""
FEW_STEPS = 10
"""Mean magnitude of a token's x8 below which it is coarse (`benchmarks/quantized.py`): without a
second product the perplexity of SmolLM2-135M grows by 6.6 %, with it by 0.6 %; random Gaussian
tokens have about 30. The native kernel has the same number."""


class Int8(Format):
    """int8 by output channel.

    Args:
        rounds_inputs: True to round inputs to 8 bits, and multiply integers.
    """

    def __init__(self, name: str, rounds_inputs: bool) -> None:
        self.name = name
        self._rounds_inputs = self.has_heads = rounds_inputs
        self.library = "" if rounds_inputs else "bitsandbytes"

    def tensors(self, rows: int, columns: int) -> Layout:
        return {"codes": ((rows, columns), torch.int8), "scales": ((rows,), torch.float32)}

    def quantize(self, weight: Tensor) -> Parts:
        wide = weight.to(torch.float32)
        scales = wide.abs().amax(1).div_(127).clamp_(min=_LEAST_SCALE)
        codes = (wide / scales.unsqueeze(-1)).round_().to(torch.int8)
        return Parts({"codes": codes, "scales": scales}, *weight.shape)

    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        codes, scales = parts["codes"][start:stop], parts["scales"][start:stop]
        if out.dtype is torch.float32:
            out.copy_(codes).mul_(scales.unsqueeze(-1))
        else:
            out.copy_(codes * scales.unsqueeze(-1))

    def described(self, parts: Parts) -> native.Matrix:
        codes, scales, sums = parts["codes"], parts["scales"], parts.tensors.get("sums")
        if self._rounds_inputs:
            can = sums is not None
            return native.Matrix(
                native.Kind.INT8, codes, parts.columns, multiplies=can, scales=scales, sums=sums
            )
        return native.Matrix(native.Kind.INT8_WEIGHT, codes, parts.columns, scales=scales)

    def chosen(self, parts: Parts, rows: Tensor) -> Parts:
        tensors = {name: parts[name][rows] for name in ("codes", "scales")}
        return Parts(tensors, len(rows), parts.columns)

    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        tensors = {
            "codes": parts["codes"][slice(*rows), slice(*columns)].contiguous(),
            "scales": parts["scales"][slice(*rows)].contiguous(),
        }
        return Parts(tensors, rows[1] - rows[0], columns[1] - columns[0])

    def packed(self, parts: Parts) -> Parts:
        if not self._rounds_inputs or parts["codes"].device.type != "cpu":
            return parts
        if native.is_native(parts["codes"].device):
            sums = parts["codes"].sum(1, dtype=torch.int32)
            return Parts({**parts.tensors, "sums": sums}, parts.rows, parts.columns)
        if not torch.cpu._is_vnni_supported():  # oneDNN's sums of pairs overflow 16 bits
            return parts
        packed = torch.ops.onednn.qlinear_prepack(parts["codes"], None)
        return Parts({**parts.tensors, "packed": packed}, parts.rows, parts.columns)

    def read(self, stored: StoredMatrix) -> Parts | None:
        if not stored.has("SCB"):
            return None
        scales = stored.take("SCB").to(torch.float32) / 127
        return Parts(
            {"codes": stored.take("weight"), "scales": scales}, stored.rows, stored.columns
        )

    def write(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            "weight": parts["codes"],
            "SCB": _multiples_of_127(parts["scales"]),
            "weight_format": torch.tensor(0, dtype=torch.uint8),  # rows
        }

    def settings(self, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": list(skipped),
        }

    def linear(self, parts: Parts, x: Tensor, y: Tensor, start: int, stop: int) -> None:
        if not self._rounds_inputs or not len(x):
            super().linear(parts, x, y, start, stop)
            return
        wide = x.to(torch.float32)
        steps, rounded = _rounded(wide)
        scales = parts["scales"][start:stop]
        y.copy_(self._integers(parts, rounded, start, stop).mul_(steps).mul_(scales))
        is_coarse = rounded.abs().sum(1) < FEW_STEPS * parts.columns
        # On GPUs all tokens have a second product, as a count of them would stop the host.
        rows = slice(None) if x.is_cuda else is_coarse.nonzero().squeeze(1)
        rest_steps, rest = _rounded(wide[rows] - rounded[rows] * steps[rows])
        if len(rest):
            added = self._integers(parts, rest, start, stop).mul_(rest_steps).mul_(scales)
            if x.is_cuda:
                added = torch.where(is_coarse.unsqueeze(1), added, 0)
            y[rows] = (y[rows].to(torch.float32) + added).to(y.dtype)

    def _integers(self, parts: Parts, x: Tensor, start: int, stop: int) -> Tensor:
        """Return x qᵀ in fp32, of integers x."""
        if "packed" in parts.tensors and stop - start == parts.rows:
            ones = torch.ones(parts.rows)
            zeros = torch.zeros(parts.rows, dtype=torch.int64)
            unsigned = x.add(128).to(torch.uint8)
            product: Tensor = torch.ops.onednn.qlinear_pointwise(
                unsigned, 1.0, 128, parts["packed"], ones, zeros, None,
                1.0, 0, torch.float32, "none", [], "",
            )  # fmt: skip
            return product
        codes = parts["codes"][start:stop]
        if not x.is_cuda:  # _int_mm is exact on CPUs, too, and takes thirty times as long
            return torch.cat([_exact(x, tile) for tile in codes.split(_EXACT)], 1)
        signed, codes = padded_for_cuda(x.to(torch.int8), codes)
        return torch._int_mm(signed, codes.t())[: len(x), : stop - start].to(torch.float32)


def _exact(x: Tensor, codes: Tensor) -> Tensor:
    """Return x qᵀ in fp32, of integers x, by exact sums over few columns."""
    y = x.new_zeros(len(x), len(codes))
    for some, part in zip(x.split(_EXACT, 1), codes.split(_EXACT, 1), strict=True):
        y.addmm_(some, part.to(x.dtype).t())
    return y


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's step, [T, 1], and its entries in steps, integers of fp32."""
    steps = x.abs().amax(1, keepdim=True).div_(127).clamp_(min=_LEAST_SCALE)
    return steps, (x / steps).round_()


def _multiples_of_127(scales: Tensor) -> Tensor:
    """Return numbers whose 127th parts are the scales, bit by bit."""
    numbers = scales * 127
    for direction in (torch.inf, -torch.inf):
        near = scales * 127
        for _ in range(2):
            near = near.nextafter(torch.full_like(near, direction))
            numbers = numbers.where(numbers / 127 == scales, near)
    return numbers


def padded_for_cuda(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, in] and codes [out, in] with zeros around them, for `torch._int_mm` on CUDA.

    It multiplies 17 tokens or more, and multiples of 8 rows and columns.
    """
    columns = -x.shape[1] % 8
    of_x, of_codes = (columns, max(0, 17 - len(x))), (columns, -len(codes) % 8)
    return tuple(  # type: ignore[return-value]
        torch.nn.functional.pad(matrix, (0, right, 0, below)) if right or below else matrix
        for matrix, (right, below) in ((x, of_x), (codes, of_codes))
    )
