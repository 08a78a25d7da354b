"""4-bit integers by group: GPTQ, AWQ and compressed-tensors' packed integers.

    w̃ = (q - z) · s,      q, z in 0..15, one s and z for a group of columns in a row

Two codes lie in a byte, the first in its low half: 4 + (16 + 8)/group bits a weight. The arithmetic
is that of the libraries: in the scales' dtype. A checkpoint with `desc_act` groups columns in any
order (`int4_g128_act`), by `g_idx`.

Checkpoints pack eight codes in an int32, low bits first:

    GPTQ                qweight [in/8, out], qzeros [groups, out/8], scales [groups, out],
                        g_idx [in]; qzeros hold z - 1, but for checkpoint_format gptq_v2
    AWQ                 qweight [in, out/8], qzeros [groups, out/8]: columns 0 2 4 6 1 3 5 7
    compressed-tensors  weight_packed [out, in/8], weight_scale [out, groups], and for asymmetric
                        ones weight_zero_point [out/8, groups]; codes are offset by 8
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.errors import UnsupportedError, WeightsError
from pcg.formats.format import (
    Format,
    Layout,
    Lookup,
    Parts,
    Span,
    StoredMatrix,
    compressed_settings,
)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in an int32 of AWQ of each of eight columns."""
_MIDDLE = 8


class Int4(Format):
    """4-bit integers by group of columns.

    Args:
        group: columns of a group; 0 for a whole row.
        any_order: True if columns are grouped in any order.
    """

    def __init__(self, group: int, any_order: bool = False) -> None:
        self.group = group
        self.any_order = any_order
        self.name = f"int4_g{group}" if group else "int4_row"
        self.name += "_act" if any_order else ""
        self.library = "" if any_order else "compressed-tensors"
        self.column_block = 2 if any_order or not group else group

    def tensors(self, rows: int, columns: int) -> Layout:
        groups = columns // self.group if self.group else 1
        stored: Layout = {
            "codes": ((rows, columns // 2), torch.uint8),
            "scales": ((rows, groups), torch.float16),
            "zeros": ((rows, groups), torch.uint8),
        }
        return {**stored, "groups": ((columns,), torch.int32)} if self.any_order else stored

    def quantize(self, weight: Tensor) -> Parts:
        rows, columns = weight.shape
        grouped = weight.to(torch.float32).view(rows, -1, self.group or columns)
        least = grouped.amin(-1).clamp_(max=0)
        most = grouped.amax(-1).clamp_(min=0)
        scales = ((most - least) / 15).to(torch.float16).clamp_(min=_TINY)
        zeros = (-least / scales.float()).round_().clamp_(0, 15)
        codes = (grouped / scales.float().unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1))
        tensors = {
            "codes": _packed(codes.clamp_(0, 15).to(torch.uint8).view(rows, columns)),
            "scales": scales,
            "zeros": zeros.to(torch.uint8),
        }
        if self.any_order:
            tensors["groups"] = torch.arange(columns, dtype=torch.int32) // self.group
        return Parts(tensors, rows, columns)

    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        codes, scales = parts["codes"][start:stop], parts["scales"][start:stop]
        steps = torch.stack([codes & 15, codes >> 4], -1).to(torch.int8)
        zeros = parts["zeros"][start:stop].to(torch.int8)
        if self.any_order:
            groups = parts["groups"]
            steps = steps.view(out.shape).sub_(zeros[:, groups])
            out.copy_(steps.to(scales.dtype).mul_(scales[:, groups]))
            return
        steps = steps.view(*scales.shape, -1).sub_(zeros.unsqueeze(-1))
        out.view(steps.shape).copy_(steps.to(scales.dtype).mul_(scales.unsqueeze(-1)))

    def lookup(self, parts: Parts) -> Lookup | None:
        if self.any_order:
            return None
        block = self.group or parts.columns
        return Lookup(parts["codes"], False, block, parts["scales"], zeros=parts["zeros"])

    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        part = slice(*rows)
        tensors = {"codes": parts["codes"][part, columns[0] // 2 : columns[1] // 2].contiguous()}
        if self.any_order:
            groups = slice(None)
            tensors["groups"] = parts["groups"][slice(*columns)]
        else:
            size = self.group or parts.columns
            groups = slice(columns[0] // size, -(-columns[1] // size))
        for name in ("scales", "zeros"):
            tensors[name] = parts[name][part, groups].contiguous()
        return Parts(tensors, rows[1] - rows[0], columns[1] - columns[0])

    def read(self, stored: StoredMatrix) -> Parts | None:
        if stored.has("weight_packed"):
            codes, scales, zeros, order = self._packed_integers(stored)
        elif stored.has("qweight"):
            codes, scales, zeros, order = _columns_first(stored)
        else:
            return None
        if codes.shape != (stored.rows, stored.columns):
            raise WeightsError(
                f"{stored.module} has 4-bit codes of {list(codes.shape)}; the model wants "
                f"{[stored.rows, stored.columns]}"
            )
        tensors = {"codes": _packed(codes), "scales": scales, "zeros": zeros.to(torch.uint8)}
        if self.any_order:
            if order is None:
                raise WeightsError(f"{stored.module} has no g_idx, and desc_act needs it")
            tensors["groups"] = order.to(torch.int32)
        return Parts(tensors, stored.rows, stored.columns)

    def write(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        codes = parts["codes"]
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        return {
            "weight_packed": _words(codes),
            "weight_scale": parts["scales"],
            "weight_zero_point": _words(parts["zeros"].t()).t().contiguous(),
            "weight_shape": torch.tensor([parts.rows, parts.columns]),
        }

    def settings(self, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
        weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": False}
        strategy: dict[str, Any] = {"strategy": "channel"}
        if self.group:
            strategy = {"strategy": "group", "group_size": self.group}
        return compressed_settings("pack-quantized", {**weights, **strategy}, skipped)

    def _packed_integers(
        self, stored: StoredMatrix
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read a matrix of compressed-tensors."""
        codes = _nibbles(stored.take("weight_packed"))[:, : stored.columns]
        scales = stored.take("weight_scale").contiguous()
        zeros = torch.full(scales.shape, _MIDDLE, dtype=torch.uint8)
        if stored.has("weight_zero_point"):
            packed = stored.take("weight_zero_point").t()
            zeros = _nibbles(packed)[:, : stored.rows].t().contiguous()
        order = stored.take("weight_g_idx") if stored.has("weight_g_idx") else None
        return codes, scales, zeros, order


_TINY = float(torch.finfo(torch.float16).tiny)


def int4_format(name: str) -> Int4 | None:
    """Return the format of a name such as `int4_g128` or `int4_row`; None for another name."""
    match = re.fullmatch(r"int4_(?:g(\d+)(_act)?|row)", name)
    return None if match is None else Int4(int(match[1] or 0), match[2] is not None)


def gptq_name(settings: Mapping[str, object]) -> str:
    """Return the name of the format of a GPTQ or AWQ checkpoint, by its settings."""
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise UnsupportedError(f"the checkpoint is quantized to {bits} bits; pcg reads 4 bits")
    group = settings.get("group_size", settings.get("q_group_size"))
    if type(group) is not int:
        raise UnsupportedError(f"group_size={group!r}; use an int, or -1")
    return Int4(max(group, 0), bool(settings.get("desc_act"))).name


def _columns_first(stored: StoredMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Read a matrix of GPTQ or AWQ, whose tensors are [in, out]."""
    scales = stored.take("scales").t().contiguous()
    packed = stored.take("qweight")
    zeros = _nibbles(stored.take("qzeros"))
    if stored.settings.get("quant_method") == "awq":
        order = [_AWQ_ORDER[place % 8] + place // 8 * 8 for place in range(stored.rows)]
        codes = _nibbles(packed)[:, order].t()
        return codes, scales, zeros[:, order].t().contiguous(), None
    codes = _nibbles(packed.t())
    if stored.settings.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1 & 15
    order_of_groups = stored.take("g_idx") if stored.has("g_idx") else None
    return codes, scales, zeros.t().contiguous(), order_of_groups


def _nibbles(packed: Tensor) -> Tensor:
    """Return the eight codes of each int32 of the last dim, low bits first, as uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)


def _words(codes: Tensor) -> Tensor:
    """Return int32 of eight codes each along the last dim, low bits first; zeros at the end."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).to(torch.int64)
    shifts = torch.arange(0, 32, 4)
    words: Tensor = (padded.view(*padded.shape[:-1], -1, 8) << shifts).sum(-1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)


def _packed(codes: Tensor) -> Tensor:
    pairs = codes.contiguous().view(*codes.shape[:-1], -1, 2)
    return pairs[..., 1] << 4 | pairs[..., 0]
