"""fp8 (e4m3) with a scale a channel, or a scale a block of 128 x 128 weights.

    fp8         w̃ = q · s of the row             8 + 32/in bits a weight
    fp8_block   w̃ = q · s of the block           8 + 32/128² bits a weight

Both are computed in fp32. Inputs are not rounded: a checkpoint's dynamic activation scales belong
to kernels, and change no weight. GPUs that multiply fp8 read the codes of `fp8` themselves: an
input of 16 bits is the sum of two of fp8, each with a scale of the token,

    x = x₁ s₁ + x₂ s₂ + e       y = ((x₁ qᵀ) s₁ + (x₂ qᵀ) s₂) ⊙ s

For Gaussian tokens and weights, y is off by 0.0007 of its size; by dequantized weights of bf16, by
0.0023.

Checkpoints: compressed-tensors' float-quantized (`weight_scale`, by channel or one for the matrix)
and transformers' fine-grained fp8 (`weight_scale_inv`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.formats import native
from pcg.formats.format import Format, Layout, Parts, Span, StoredMatrix, compressed_settings

_BLOCK = 128
_MOST = float(torch.finfo(torch.float8_e4m3fn).max)
_TINY = torch.finfo(torch.float32).tiny


_MULTIPLE = 16
"""`torch._scaled_mm` multiplies multiples of so many rows and columns."""


@functools.cache
def multiplies(device: torch.device) -> bool:
    """Return whether a device multiplies fp8: NVIDIA's from compute capability 8.9."""
    is_cuda = device.type == "cuda" and torch.version.cuda is not None
    return is_cuda and torch.cuda.get_device_capability(device) >= (8, 9)


class Fp8(Format):
    """fp8 by channel."""

    name = "fp8"
    library = "compressed-tensors"

    def tensors(self, rows: int, columns: int) -> Layout:
        return {
            "codes": ((rows, columns), torch.float8_e4m3fn),
            "scales": ((rows, 1), torch.float32),
        }

    def quantize(self, weight: Tensor) -> Parts:
        wide = weight.to(torch.float32)
        scales = wide.abs().amax(1, keepdim=True).div_(_MOST).clamp_(min=_TINY)
        codes = (wide / scales).to(torch.float8_e4m3fn)
        return Parts({"codes": codes, "scales": scales}, *weight.shape)

    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        wide = parts["codes"][start:stop].to(torch.float32)
        out.copy_(wide.mul_(parts["scales"][start:stop]))

    def linear(self, parts: Parts, x: Tensor, y: Tensor, start: int, stop: int) -> None:
        is_whole = parts.columns % _MULTIPLE == (stop - start) % _MULTIPLE == 0
        if not is_whole or x.dtype is torch.float32 or not len(x) or not multiplies(x.device):
            super().linear(parts, x, y, start, stop)
            return
        codes, unscaled = parts["codes"][start:stop].t(), x.new_ones((), dtype=torch.float32)
        rest = x.to(torch.float32)
        total: Tensor | float = 0.0
        for _ in range(2):
            steps = rest.abs().amax(1, keepdim=True).div_(_MOST).clamp_(min=_TINY)
            rounded = (rest / steps).to(torch.float8_e4m3fn)
            part = torch._scaled_mm(rounded, codes, unscaled, unscaled, out_dtype=torch.float32)
            total = total + part * steps
            rest = rest - rounded.to(torch.float32) * steps
        y.copy_(total * parts["scales"][start:stop].t())

    def described(self, parts: Parts) -> native.Matrix:
        return native.Matrix(
            native.Kind.FP8, parts["codes"], parts.columns, scales=parts["scales"],
            group=parts.columns,
        )  # fmt: skip

    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        tensors = {
            "codes": parts["codes"][slice(*rows), slice(*columns)].contiguous(),
            "scales": parts["scales"][slice(*rows)].contiguous(),
        }
        return Parts(tensors, rows[1] - rows[0], columns[1] - columns[0])

    def read(self, stored: StoredMatrix) -> Parts | None:
        if not stored.has("weight_scale"):
            return None
        scales = stored.take("weight_scale").to(torch.float32).reshape(-1, 1)
        tensors = {"codes": stored.take("weight"), "scales": scales.expand(stored.rows, 1)}
        return Parts(
            {name: t.contiguous() for name, t in tensors.items()}, stored.rows, stored.columns
        )

    def write(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": parts["codes"], "weight_scale": parts["scales"]}

    def settings(self, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        return compressed_settings("float-quantized", weights, skipped)


class BlockFp8(Format):
    """fp8 by blocks of 128 x 128; the last block of a dim may be smaller."""

    name = "fp8_block"
    library = "transformers"
    column_block = row_block = _BLOCK
    has_partial_blocks = True

    def tensors(self, rows: int, columns: int) -> Layout:
        return {
            "codes": ((rows, columns), torch.float8_e4m3fn),
            "scales": ((-(-rows // _BLOCK), -(-columns // _BLOCK)), torch.float32),
        }

    def quantize(self, weight: Tensor) -> Parts:
        rows, columns = weight.shape
        down, along = self.tensors(rows, columns)["scales"][0]
        padded = weight.new_zeros(down * _BLOCK, along * _BLOCK, dtype=torch.float32)
        padded[:rows, :columns] = weight
        blocked = padded.view(down, _BLOCK, along, _BLOCK)
        scales = blocked.abs().amax((1, 3)).div_(_MOST).clamp_(min=_TINY)
        codes = (weight.to(torch.float32) / self._spread(scales, rows, columns)).to(
            torch.float8_e4m3fn
        )
        return Parts({"codes": codes, "scales": scales}, rows, columns)

    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        first = start // _BLOCK
        scales = parts["scales"][first : -(-stop // _BLOCK)]
        spread = self._spread(scales, stop - first * _BLOCK, parts.columns)
        wide = parts["codes"][start:stop].to(torch.float32)
        out.copy_(wide.mul_(spread[start - first * _BLOCK :]))

    def described(self, parts: Parts) -> native.Matrix:
        return native.Matrix(
            native.Kind.FP8, parts["codes"], parts.columns, scales=parts["scales"],
            group=_BLOCK, group_rows=_BLOCK,
        )  # fmt: skip

    @staticmethod
    def _spread(scales: Tensor, rows: int, columns: int) -> Tensor:
        by_row = scales.repeat_interleave(_BLOCK, 0)[:rows]
        return by_row.repeat_interleave(_BLOCK, 1)[:, :columns]

    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        tensors = {
            "codes": parts["codes"][slice(*rows), slice(*columns)].contiguous(),
            "scales": parts["scales"][
                rows[0] // _BLOCK : -(-rows[1] // _BLOCK),
                columns[0] // _BLOCK : -(-columns[1] // _BLOCK),
            ].contiguous(),
        }
        return Parts(tensors, rows[1] - rows[0], columns[1] - columns[0])

    def read(self, stored: StoredMatrix) -> Parts | None:
        if not stored.has("weight_scale_inv"):
            return None
        scales = stored.take("weight_scale_inv").to(torch.float32)
        tensors = {"codes": stored.take("weight"), "scales": scales}
        return Parts(tensors, stored.rows, stored.columns)

    def write(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": parts["codes"], "weight_scale_inv": parts["scales"]}

    def settings(self, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": list(skipped),
        }
