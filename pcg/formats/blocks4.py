"""nf4 and fp4 of bitsandbytes: 4-bit codes in blocks of 64 weights, with doubly quantized scales.

    w̃ = code[q] · s,     s = nested_code[s8] · nested_scale + offset

A block is 64 consecutive weights of a row; two codes lie in a byte, the first in its high half.
`s8` is a scale per block in 8 bits; 256 of them, counted over the whole matrix, share a nested
scale. That is 4 + 8/64 + 32/(64·256) = 4.127 bits a weight.

Source: QLoRA (Dettmers et al. 2023), section 3; the layout is that of bitsandbytes 0.50, compared
bit by bit in tests/formats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pcg.errors import WeightsError
from pcg.formats.format import Format, Layout, Lookup, Parts, Span, StoredMatrix, write_scaled

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""Magnitudes of fp4 codes times 12; codes from 8 are their negatives."""
_BLOCK = 64
_NESTED_BLOCK = 256
_TINY = torch.finfo(torch.float32).tiny


class Blocks4(Format):
    """nf4 or fp4, as the code's name; `nests` is True with doubly quantized scales."""

    column_block = _BLOCK
    library = "bitsandbytes"

    def __init__(self, code: str, nests: bool) -> None:
        self.name = code if nests else f"{code}_single"
        self._code_name = code
        self._nests = nests

    def tensors(self, rows: int, columns: int) -> Layout:
        blocks = columns // _BLOCK
        codes: Layout = {"codes": ((rows, columns // 2), torch.uint8)}
        if not self._nests:
            return {**codes, "scales": ((rows, blocks), torch.float32)}
        return {
            **codes,
            "scales": ((rows, blocks), torch.uint8),
            "nested_scales": ((-(-rows * blocks // _NESTED_BLOCK),), torch.float32),
        }

    def quantize(self, weight: Tensor) -> Parts:
        rows, columns = weight.shape
        blocks = weight.to(torch.float32).view(rows, columns // _BLOCK, _BLOCK)
        scales = blocks.abs().amax(-1)
        values, order = _code(self._code_name).to(weight.device).sort()
        relative = blocks / scales.clamp(min=_TINY).unsqueeze(-1)
        codes = order[_nearest(relative, values).long()].to(torch.uint8)
        codes = codes.view(rows, columns // 2, 2)
        tensors = {"codes": codes[..., 0] << 4 | codes[..., 1], "scales": scales}
        if not self._nests:
            return Parts(tensors, rows, columns)
        offset = scales.mean()
        count = rows * columns // _BLOCK
        nested = scales.new_zeros(-(-count // _NESTED_BLOCK), _NESTED_BLOCK)
        nested.view(-1)[:count] = (scales - offset).flatten()
        nested_scales = nested.abs().amax(-1)
        inverse = 1 / nested_scales.clamp(min=_TINY).unsqueeze(-1)
        codes8 = _nearest(nested * inverse, _nested_code(weight.device)).flatten()[:count]
        tensors |= {"scales": codes8.view(rows, -1), "nested_scales": nested_scales}
        return Parts(tensors, rows, columns, _facts(columns, float(offset)))

    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        codes = parts["codes"][start:stop]
        pairs = _pairs(self._code_name, codes.device)
        write_scaled(codes, pairs, self._scales(parts, start, stop), out)

    def _scales(self, parts: Parts, start: int, stop: int) -> Tensor:
        scales, facts = parts["scales"][start:stop], parts.facts
        if not self._nests:
            return scales
        device = scales.device
        # The block's number in the whole matrix, of which this may be a rank's part.
        rows = torch.arange(start, stop, device=device) + int(facts["first_row"])
        columns = torch.arange(scales.shape[1], device=device) + int(facts["first_block"])
        numbers = rows.unsqueeze(-1) * int(facts["row_blocks"]) + columns
        nested = parts["nested_scales"][numbers // _NESTED_BLOCK]
        return _nested_code(device)[scales.int()].mul_(nested).add_(facts["offset"])

    def lookup(self, parts: Parts) -> Lookup:
        codes, facts = parts["codes"], parts.facts
        values = _values(self._code_name, codes.device)
        if not self._nests:
            return Lookup(codes, True, _BLOCK, parts["scales"], values)
        row_blocks = int(facts["row_blocks"])
        return Lookup(
            codes,
            True,
            _BLOCK,
            parts["scales"],
            values,
            scale_values=_nested_code(codes.device),
            nested=parts["nested_scales"],
            offset=facts["offset"],
            first=int(facts["first_row"]) * row_blocks + int(facts["first_block"]),
            row_blocks=row_blocks,
        )

    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        first, last = columns[0] // _BLOCK, columns[1] // _BLOCK
        tensors = {
            "codes": parts["codes"][slice(*rows), columns[0] // 2 : columns[1] // 2].contiguous(),
            "scales": parts["scales"][slice(*rows), first:last].contiguous(),
        }
        size = rows[1] - rows[0], columns[1] - columns[0]
        if not self._nests:
            return Parts(tensors, *size)
        tensors["nested_scales"] = parts["nested_scales"]
        places = {
            "first_row": parts.facts["first_row"] + rows[0],
            "first_block": parts.facts["first_block"] + first,
        }
        return Parts(tensors, *size, {**parts.facts, **places})

    def read(self, stored: StoredMatrix) -> Parts | None:
        state = f"weight.quant_state.bitsandbytes__{self._code_name}"
        if not stored.has(state):
            return None
        facts = json.loads(bytes(stored.take(state).tolist()))
        shape = [stored.rows, stored.columns]
        nests = "nested_offset" in facts
        if facts["blocksize"] != _BLOCK or list(facts["shape"]) != shape or nests != self._nests:
            raise WeightsError(
                f"{stored.module}.weight has {'nested' if nests else 'single'} scales of blocks of "
                f"{facts['blocksize']}, of shape {facts['shape']}; {self.name} has blocks of "
                f"{_BLOCK}, and the model the shape {shape}"
            )
        tensors = {
            "codes": stored.take("weight").view(stored.rows, stored.columns // 2),
            "scales": stored.take("weight.absmax").view(stored.rows, -1),
        }
        if not nests:
            return Parts(tensors, stored.rows, stored.columns)
        tensors["nested_scales"] = stored.take("weight.nested_absmax")
        facts_here = _facts(stored.columns, facts["nested_offset"])
        return Parts(tensors, stored.rows, stored.columns, facts_here)

    def write(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        facts: dict[str, object] = {
            "quant_type": self._code_name,
            "blocksize": _BLOCK,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": [parts.rows, parts.columns],
        }
        tensors = {
            "weight": parts["codes"].reshape(-1, 1),
            "weight.absmax": parts["scales"].flatten(),
            "weight.quant_map": _code(self._code_name),
        }
        if self._nests:
            facts |= {
                "nested_blocksize": _NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": parts.facts["offset"],
            }
            tensors["weight.nested_absmax"] = parts["nested_scales"]
            tensors["weight.nested_quant_map"] = _nested_code().clone()
        state = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        return {**tensors, f"weight.quant_state.bitsandbytes__{self._code_name}": state}

    def settings(self, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self._code_name,
            "bnb_4bit_use_double_quant": self._nests,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(skipped),
        }


def _facts(columns: int, offset: float) -> dict[str, float]:
    """Return the offset of scales, and the place in the whole matrix of a matrix that is whole."""
    return {
        "offset": offset, "first_row": 0, "first_block": 0, "row_blocks": columns // _BLOCK,
    }  # fmt: skip


def _code(name: str) -> Tensor:
    if name == "nf4":
        return torch.tensor(_NF4)
    magnitudes = torch.tensor(_FP4) / 12
    return torch.cat([magnitudes, -magnitudes])


def _nearest(values: Tensor, code: Tensor) -> Tensor:
    """Return the index of the nearest entry of a sorted code."""
    middles = (code[1:] + code[:-1]) / 2
    return torch.bucketize(values, middles.to(values.device)).to(torch.uint8)


@cache
@torch.inference_mode(False)
def _values(name: str, device: torch.device) -> Tensor:
    return _code(name).to(device)


@cache
@torch.inference_mode(False)
def _pairs(name: str, device: torch.device) -> Tensor:
    """Return the two weights of each byte, [256, 2], before their scale."""
    code, byte = _code(name), torch.arange(256)
    return torch.stack([code[byte >> 4], code[byte & 15]], -1).to(device)


@cache
@torch.inference_mode(False)
def _nested_code(device: torch.device = torch.device("cpu")) -> Tensor:  # noqa: B008
    """Return the 256 values of an 8-bit scale, sorted.

    From 1e-6 to 1 in seven decades: decade i has 2^i values of each sign, the middles of equal
    parts of [0.1, 1]; 0 and 1 are added. Source: 8-bit approximations for parallelism in deep
    learning (Dettmers 2015), dynamic tree quantization.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1)
        middles = (bounds[:-1] + bounds[1:]) / 2
        scaled = (10 ** (decade - 6) * middles).tolist()
        values += [*scaled, *(-value for value in scaled)]
    return torch.tensor(sorted(values)).to(device)
