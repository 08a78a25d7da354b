"""Blocks of GGUF files: q8_0, q4_0, q4_1, q4_k and q6_k, as llama.cpp stores them.

A row is a sequence of blocks, whose bytes are kept as they are:

    q8_0   32 weights  w̃ = q d                              d fp16, q int8            8.5 bits
    q4_0   32          w̃ = (q - 8) d                        d fp16, q 4 bits          4.5
    q4_1   32          w̃ = q d + m                          d, m fp16                 5
    q4_k   256         w̃ = q (s d) - t m of 32 weights      s, t 6 bits               4.5
    q6_k   256         w̃ = (q - 32) (s d) of 16 weights     s int8, q 6 bits          6.5625

Source: the reference dequantizers of the package gguf, compared bit by bit in tests/formats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pcg.errors import UnsupportedError
from pcg.formats import native
from pcg.formats.format import Format, Layout, Parts, Span

_K = 256


class Gguf(Format):
    """Blocks of a GGUF file.

    Args:
        name: of the format, as GGUF's type in lower case.
        block: weights of a block.
        block_bytes: bytes of a block.
        unpack: from blocks [n, block_bytes] to weights [n, block], fp32.
        pack: the reverse; None if pcg only reads the format.
    """

    def __init__(
        self,
        name: str,
        block: int,
        block_bytes: int,
        unpack: Callable[[Tensor], Tensor],
        pack: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.name = name
        self.has_heads = name == "q8_0"
        self.column_block = block
        self.block_bytes = block_bytes
        self._unpack = unpack
        self._pack = pack

    def tensors(self, rows: int, columns: int) -> Layout:
        return {"blocks": ((rows, columns // self.column_block * self.block_bytes), torch.uint8)}

    def quantize(self, weight: Tensor) -> Parts:
        if self._pack is None:
            raise UnsupportedError(f"pcg reads {self.name} of GGUF files and does not write it")
        rows, columns = weight.shape
        blocks = self._pack(weight.to(torch.float32).reshape(-1, self.column_block))
        return Parts({"blocks": blocks.view(rows, -1)}, rows, columns)

    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        blocks = parts["blocks"][start:stop].reshape(-1, self.block_bytes)
        out.view(-1, self.column_block).copy_(self._unpack(blocks))

    def described(self, parts: Parts) -> native.Matrix:
        return native.Matrix(native.Kind[self.name.upper()], parts["blocks"], parts.columns)

    def chosen(self, parts: Parts, rows: Tensor) -> Parts:
        return Parts({"blocks": parts["blocks"][rows]}, len(rows), parts.columns)

    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        first, last = (
            at // self.column_block * self.block_bytes for at in (columns[0], columns[1])
        )
        blocks = parts["blocks"][slice(*rows), first:last].contiguous()
        return Parts({"blocks": blocks}, rows[1] - rows[0], columns[1] - columns[0])


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the fp16 number at a byte of each block, as fp32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _low_and_high(codes: Tensor) -> Tensor:
    """Return 4-bit codes: the low halves of a block's bytes, then the high ones."""
    return torch.cat([codes & 15, codes >> 4], -1)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32) * _halves(blocks, 0)


def _pack_q8_0(weights: Tensor) -> Tensor:
    steps = weights.abs().amax(1, keepdim=True) / 127
    inverse = torch.where(steps == 0, 0, 1 / steps)
    scaled = weights * inverse
    # Half away from zero, as C's roundf.
    codes = (scaled.abs() + 0.5).floor_().mul_(scaled.sign()).to(torch.int8)
    return torch.cat([steps.to(torch.float16).view(torch.uint8), codes.view(torch.uint8)], 1)


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    codes = _low_and_high(blocks[:, 2:]).to(torch.int8) - 8
    return codes.to(torch.float32) * _halves(blocks, 0)


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    codes = _low_and_high(blocks[:, 4:]).to(torch.float32)
    return codes * _halves(blocks, 0) + _halves(blocks, 2)


def _pack_q4_0(weights: Tensor) -> Tensor:
    place = weights.abs().argmax(1, keepdim=True)
    steps = weights.gather(1, place) / -8
    inverse = torch.where(steps == 0, 0, 1 / steps)
    codes = (weights * inverse + 8.5).floor_().clamp_(0, 15).to(torch.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return torch.cat([steps.to(torch.float16).view(torch.uint8), packed], 1)


def _pack_q4_1(weights: Tensor) -> Tensor:
    least, most = weights.aminmax(dim=1, keepdim=True)
    steps = (most - least) / 15
    inverse = torch.where(steps == 0, 0, 1 / steps)
    codes = ((weights - least) * inverse + 0.5).floor_().clamp_(0, 15).to(torch.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    halves = torch.cat([steps, least], 1).to(torch.float16).view(torch.uint8)
    return torch.cat([halves, packed], 1)


def _unpack_q4_k(blocks: Tensor) -> Tensor:
    scale, least = _halves(blocks, 0), _halves(blocks, 2)
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1).to(torch.float32) * scale
    offsets = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1).to(torch.float32) * least
    pairs = blocks[:, 16:].view(-1, 4, 1, 32)
    codes = torch.cat([pairs & 15, pairs >> 4], 2).view(-1, 8, 32).to(torch.float32)
    return (codes * scales.unsqueeze(-1) - offsets.unsqueeze(-1)).view(-1, _K)


def _unpack_q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, :128].view(-1, 2, 1, 64), blocks[:, 128:192].view(-1, 2, 1, 32)
    codes = torch.cat([low & 15, low >> 4], 2).view(-1, 8, 32)
    tops = torch.cat([high & 3, high >> 2 & 3, high >> 4 & 3, high >> 6], 2).view(-1, 8, 32)
    steps = (codes | tops << 4).to(torch.int8).sub_(32).to(torch.float32).view(-1, 16, 16)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    scales = scales * _halves(blocks, 208)
    return (steps * scales.unsqueeze(-1)).view(-1, _K)


GGUF_FORMATS = (
    Gguf("q8_0", 32, 34, _unpack_q8_0, _pack_q8_0),
    Gguf("q4_0", 32, 18, _unpack_q4_0, _pack_q4_0),
    Gguf("q4_1", 32, 20, _unpack_q4_1, _pack_q4_1),
    Gguf("q4_k", _K, 144, _unpack_q4_k),
    Gguf("q6_k", _K, 210, _unpack_q6_k),
)
