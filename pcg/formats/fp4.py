"""mxfp4 and nvfp4: fp4 codes (e2m1) in blocks of a row, each with a scale.

    mxfp4   w̃ = code · 2^(s - 127)         blocks of 32, s in 8 bits         4.25 bits a weight
    nvfp4   w̃ = code · s / g               blocks of 16, s in e4m3, one g    4.5 bits a weight

Two codes lie in a byte, the first in its low half. Checkpoints are compressed-tensors':
weight_packed, weight_scale, and for nvfp4 weight_global_scale; and gpt-oss': weight_blocks
[rows, blocks, 16] and weight_scales (transformers 5.24, `convert_moe_packed_tensors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pcg.formats.format import (
    Format,
    Layout,
    Lookup,
    Parts,
    Span,
    StoredMatrix,
    compressed_settings,
    write_scaled,
)

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of codes 0 to 7; codes from 8 are their negatives."""
_MOST = 6.0
_MOST_OF_SCALE = 448.0
_TINY = torch.finfo(torch.float32).tiny


class Fp4(Format):
    """mxfp4, or nvfp4."""

    library = "compressed-tensors"

    def __init__(self, name: str) -> None:
        self.name = name
        self._has_global = name == "nvfp4"
        self.column_block = 16 if self._has_global else 32

    def tensors(self, rows: int, columns: int) -> Layout:
        kind = torch.float8_e4m3fn if self._has_global else torch.uint8
        stored: Layout = {
            "codes": ((rows, columns // 2), torch.uint8),
            "scales": ((rows, columns // self.column_block), kind),
        }
        return {**stored, "global_scale": ((1,), torch.float32)} if self._has_global else stored

    def quantize(self, weight: Tensor) -> Parts:
        rows, columns = weight.shape
        blocks = weight.to(torch.float32).view(rows, -1, self.column_block)
        most = blocks.abs().amax(-1)
        tensors = {}
        if self._has_global:
            global_scale = _MOST * _MOST_OF_SCALE / most.max().clamp(min=_TINY)
            scales = (most / _MOST * global_scale).to(torch.float8_e4m3fn)
            tensors["global_scale"] = global_scale.reshape(1)
        else:
            # The largest power of two with which no weight is beyond the largest code.
            exponent = torch.ceil(torch.log2(most.clamp(min=_TINY) / _MOST))
            scales = exponent.add_(127).clamp_(0, 254).to(torch.uint8)
        tensors["scales"] = scales
        factors = self._factors(Parts(tensors, rows, columns), 0, rows).clamp_(min=_TINY)
        relative = blocks / factors.unsqueeze(-1)
        magnitudes = torch.tensor(_MAGNITUDES, device=weight.device)
        middles = (magnitudes[1:] + magnitudes[:-1]) / 2
        codes = torch.bucketize(relative.abs(), middles).to(torch.uint8)
        codes = codes.add_((relative < 0).to(torch.uint8) << 3).view(rows, -1, 2)
        tensors["codes"] = codes[..., 1] << 4 | codes[..., 0]
        return Parts(tensors, rows, columns)

    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        codes = parts["codes"][start:stop]
        write_scaled(codes, _pairs(codes.device), self._factors(parts, start, stop), out)

    def _factors(self, parts: Parts, start: int, stop: int) -> Tensor:
        scales = parts["scales"][start:stop]
        if self._has_global:
            return scales.to(torch.float32) / parts["global_scale"]
        return torch.exp2(scales.to(torch.float32) - 127)

    def lookup(self, parts: Parts) -> Lookup:
        scales, device = parts["scales"], parts["codes"].device
        every = torch.arange(256, device=device).to(torch.uint8)
        if self._has_global:
            every = every.view(torch.float8_e4m3fn)
        scale_values = self._factors(Parts({**parts.tensors, "scales": every}, 1, 256), 0, 256)
        return Lookup(
            parts["codes"],
            False,
            self.column_block,
            scales.view(torch.uint8),
            _values(device),
            scale_values=scale_values,
        )

    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        part, block = slice(*rows), self.column_block
        tensors = {
            **parts.tensors,
            "codes": parts["codes"][part, columns[0] // 2 : columns[1] // 2].contiguous(),
            "scales": parts["scales"][part, columns[0] // block : columns[1] // block].contiguous(),
        }
        return Parts(tensors, rows[1] - rows[0], columns[1] - columns[0])

    def read(self, stored: StoredMatrix) -> Parts | None:
        if stored.has("weight_blocks") and not self._has_global:
            codes, scales = stored.take("weight_blocks"), stored.take("weight_scales")
            tensors = {"codes": codes.flatten(-2), "scales": scales}
            return Parts(tensors, stored.rows, stored.columns)
        if not stored.has("weight_packed"):
            return None
        tensors = {"codes": stored.take("weight_packed"), "scales": stored.take("weight_scale")}
        if self._has_global:
            tensors["global_scale"] = stored.take("weight_global_scale").to(torch.float32)
        return Parts(tensors, stored.rows, stored.columns)

    def write(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {"weight_packed": parts["codes"], "weight_scale": parts["scales"]}
        if self._has_global:
            tensors["weight_global_scale"] = parts["global_scale"]
        return tensors

    def settings(self, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group" if self._has_global else "group",
            "group_size": self.column_block,
        }
        return compressed_settings(f"{self.name}-pack-quantized", weights, skipped)


@cache
@torch.inference_mode(False)
def _values(device: torch.device) -> Tensor:
    magnitudes = torch.tensor(_MAGNITUDES)
    return torch.cat([magnitudes, -magnitudes]).to(device)


@cache
@torch.inference_mode(False)
def _pairs(device: torch.device) -> Tensor:
    """Return the two weights of each byte, [256, 2], before their scale."""
    code, byte = _values(device), torch.arange(256, device=device)
    return torch.stack([code[byte & 15], code[byte >> 4]], -1)
