"""The interface of a weight format: storage, quantization, products, and cuts for ranks.

A format stores a matrix W [out, in] in several tensors. W̃ = dequantize(parts) is the matrix that a
model with this format has; the error against the float matrix is the format's. Unless a format has
a faster product, both products dequantize a tile of rows into one reused buffer:

    y  = x W̃ᵀ          y[:, a:b] = x W̃[a:b]ᵀ
    dx = dy W̃          dx = Σ dy[:, a:b] W̃[a:b]

On CPUs the native kernel (`native.py`) dequantizes and multiplies; PyTorch's operators here define
its results.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pcg.errors import ParallelError, UnsupportedError
from pcg.formats import native
from pcg.native_library import check_unrecorded

TILE_ELEMENTS = 1 << 21
"""Weights of a tile: 8 MiB in fp32, which a core's L2 and a share of its L3 hold."""

Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each stored tensor, by name."""
Span: TypeAlias = tuple[int, int]
"""A range of rows or columns: first, and the end."""


@dataclass(frozen=True)
class Parts:
    """The stored tensors of a matrix [rows, columns].

    Attributes:
        tensors: by the names of `Format.tensors`.
        facts: numbers of the format that are not tensors.
        known: what a format has derived from them.
    """

    tensors: Mapping[str, Tensor]
    rows: int
    columns: int
    facts: Mapping[str, float] = field(default_factory=dict)
    known: dict[str, native.Matrix | None] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def to(self, device: torch.device) -> Parts:
        """Return the parts on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Parts(tensors, self.rows, self.columns, self.facts)


@dataclass(frozen=True)
class Lookup:
    """A matrix of 4-bit codes by tables, as kernels read it.

        w̃ = values[q] · s, or (q - z) · s without values
        s = scales[row, block], or scale_values[scales[row, block]] · nested[number // 256] + offset

    `number` counts the blocks of the whole matrix, of which this may be a part.

    Attributes:
        codes: [rows, columns / 2], uint8; two codes a byte.
        is_high_first: True if the first code of a byte is in its high half.
        block: columns of a scale.
        scales: [rows, blocks]; 8-bit indices if there are scale_values.
        values: [16], fp32.
        zeros: [rows, blocks], uint8.
        scale_values: [256], fp32.
        nested: fp32.
        first: the number of the part's first block.
        row_blocks: blocks of a row of the whole matrix.
    """

    codes: Tensor
    is_high_first: bool
    block: int
    scales: Tensor
    values: Tensor | None = None
    zeros: Tensor | None = None
    scale_values: Tensor | None = None
    nested: Tensor | None = None
    offset: float = 0.0
    first: int = 0
    row_blocks: int = 0


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of a checkpoint, as a format's reader sees it.

    Attributes:
        module: path of the linear module; its tensors are `module.suffix`.
        rows, columns: [out, in] of the whole matrix.
        has: returns whether the checkpoint has `module.suffix`.
        take: reads `module.suffix`.
        settings: the checkpoint's quantization_config.
    """

    module: str
    rows: int
    columns: int
    has: Callable[[str], bool]
    take: Callable[[str], Tensor]
    settings: Mapping[str, object]


class Format(ABC):
    """A way to store a frozen matrix.

    Attributes:
        name: the format's name in tensor types, options and reports.
        column_block: columns share numbers in blocks of so many; ranks cut between blocks.
        row_block: the same for rows.
        has_partial_blocks: True if the last block of a row may be smaller.
        has_heads: True if the head is quantized with a float model, and a tied embedding with it.
        library: the library whose checkpoint layout `write` follows; empty without a layout.
    """

    name: str
    library: str = ""
    column_block: int = 1
    row_block: int = 1
    has_partial_blocks: bool = False
    has_heads: bool = False

    @abstractmethod
    def tensors(self, rows: int, columns: int) -> Layout:
        """Return shape and dtype of each stored tensor of a matrix."""

    def size_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a stored matrix."""
        stored = self.tensors(rows, columns).values()
        return sum(prod(shape) * dtype.itemsize for shape, dtype in stored)

    def check(self, shape: Sequence[int], name: str) -> None:
        """Check a matrix's shape. UnsupportedError: names the block that does not fit."""
        if shape[-1] % self.column_block and not self.has_partial_blocks:
            raise UnsupportedError(
                f"{self.name} stores blocks of {self.column_block} columns, and {name} is "
                f"{list(shape)}; use another format, or the float weights"
            )

    def check_cut(self, rows: Span, columns: Span, shape: Sequence[int], name: str) -> None:
        """Check that a rank's part ends between blocks. ParallelError: names what would fit."""
        for (start, stop), block, size, kind in (
            (rows, self.row_block, shape[0], "rows"),
            (columns, self.column_block, shape[1], "columns"),
        ):
            if start % block or (stop % block and stop != size):
                degrees = [n for n in range(2, 9) if size % (n * block) == 0]
                fitting = ", ".join(map(str, degrees)) or "none"
                raise ParallelError(
                    f"{name} is cut at {kind} {start} to {stop}, inside a block of {block} of "
                    f"{self.name}; degrees that fit its {size} {kind}: {fitting}"
                )

    @abstractmethod
    def quantize(self, weight: Tensor) -> Parts:
        """Quantize a matrix [out, in]."""

    @abstractmethod
    def dequantize(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        """Write the rows from `start` to `stop` into `out`, in its dtype, by PyTorch."""

    def described(self, parts: Parts) -> native.Matrix | None:
        """Describe a matrix to the native kernel; None if it has no code for the format."""
        lookup = self.lookup(parts)
        return None if lookup is None else _described(lookup)

    def matrix(self, parts: Parts) -> native.Matrix | None:
        """Return the description of a matrix; None where PyTorch multiplies and dequantizes."""
        if "matrix" not in parts.known:
            matrix = self.described(parts) if native.is_native(parts.device) else None
            is_read = matrix is not None and matrix.is_contiguous
            parts.known["matrix"] = matrix if is_read else None
        return parts.known["matrix"]

    def write_rows(self, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        """Dequantize rows into `out`, by the native kernel where it can."""
        matrix = self.matrix(parts)
        if matrix is None or not matrix.dequantize(start, stop, out):
            self.dequantize(parts, start, stop, out)

    @abstractmethod
    def cut(self, parts: Parts, rows: Span, columns: Span) -> Parts:
        """Return a rank's part of a matrix, cut between blocks."""

    def chosen(self, parts: Parts, rows: Tensor) -> Parts:
        """Return the rows by index. UnsupportedError: the format has no embedding tables."""
        raise UnsupportedError(f"pcg reads no embedding tables in {self.name}")

    def packed(self, parts: Parts) -> Parts:
        """Return parts with what products on their device read besides, such as packed copies."""
        return parts

    def lookup(self, parts: Parts) -> Lookup | None:
        """Return the matrix by tables; None if the format has no 4-bit codes by blocks."""
        return None

    def read(self, stored: StoredMatrix) -> Parts | None:
        """Read a matrix that a checkpoint stores in this format; None if it stores no such."""
        return None

    def write(self, parts: Parts, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a whole matrix in a checkpoint, by suffix; `read` reads them.

        Args:
            dtype: of the float matrix.
        """
        raise UnsupportedError(f"transformers reads no checkpoint of {self.name}; use another")

    def settings(self, dtype: str, skipped: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config of a checkpoint with this format.

        Args:
            dtype: of the model's activations, by torch's name.
            skipped: linear modules that are stored in floating point.
        """
        raise UnsupportedError(f"transformers reads no checkpoint of {self.name}; use another")

    def linear(self, parts: Parts, x: Tensor, y: Tensor, start: int, stop: int) -> None:
        """Write x W̃[start:stop]ᵀ into y [T, stop - start], which may have strides."""
        for first, last, tile in self.tiles(parts, start, stop, x):
            torch.mm(x, tile.t(), out=y[:, first - start : last - start])

    def input_gradient(self, parts: Parts, dy: Tensor, dx: Tensor, start: int, stop: int) -> None:
        """Add dy W̃[start:stop], of dy [T, stop - start], to dx [T, in].

        dx may be of a wider dtype.
        """
        for first, last, tile in self.tiles(parts, start, stop, dy):
            part = dy[:, first - start : last - start]
            if dx.dtype is dy.dtype:
                dx.addmm_(part, tile)
            else:
                dx.add_(part @ tile)

    def tiles(
        self, parts: Parts, start: int, stop: int, like: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (first row, end, the rows dequantized), valid until the next is taken."""
        columns = parts.columns
        rows = max(self.row_block, TILE_ELEMENTS // columns // self.row_block * self.row_block)
        buffer = _buffer(min(rows, stop - start) * columns, like)
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            tile = buffer[: (last - first) * columns].view(last - first, columns)
            self.write_rows(parts, first, last, tile)
            yield first, last, tile

    def whole(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return the dequantized matrix in memory of its own."""
        out = torch.empty(parts.rows, parts.columns, dtype=dtype, device=parts.device)
        self.write_rows(parts, 0, parts.rows, out)
        return out


_INTEGERS = {torch.float16: native.Kind.INT4_HALF, torch.bfloat16: native.Kind.INT4_BF16}
"""By the dtype of scales, in which `Int4` multiplies."""


def _described(lookup: Lookup) -> native.Matrix | None:
    if lookup.values is None:
        kind = _INTEGERS.get(lookup.scales.dtype)
    else:
        kind = native.Kind.HIGH_FIRST if lookup.is_high_first else native.Kind.LOW_FIRST
    if kind is None:
        return None
    return native.Matrix(
        kind,
        lookup.codes,
        2 * lookup.codes.shape[1],
        scales=lookup.scales,
        group=lookup.block,
        zeros=lookup.zeros,
        values=lookup.values,
        scale_values=lookup.scale_values,
        nested=lookup.nested,
        first=lookup.first,
        row_blocks=lookup.row_blocks,
        offset=lookup.offset,
    )


def write_scaled(codes: Tensor, pairs: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the two weights of each byte of codes, times their block's scale, into `out`.

    Args:
        codes: [rows, columns / 2], uint8.
        pairs: the weights of each byte before the scale, [256, 2], fp32.
        scales: [rows, blocks], fp32.
    """
    wide = out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
    torch.index_select(pairs, 0, codes.flatten().int(), out=wide.view(-1, 2))
    wide.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))
    if wide is not out:
        out.copy_(wide)


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_kind: dict[tuple[torch.dtype, torch.device], Tensor] = {}


_BUFFERS = _Buffers()


def _buffer(elements: int, like: Tensor) -> Tensor:
    """Return this thread's buffer; a fresh one of 46 MB costs more in page faults than its use."""
    check_unrecorded("another thread would replay what is written into this thread's buffer")
    kind = like.dtype, like.device
    known = _BUFFERS.by_kind.get(kind)
    if known is None or known.numel() < elements:
        with torch.inference_mode(False):  # training writes into it, too
            known = torch.empty(elements, dtype=like.dtype, device=like.device)
        _BUFFERS.by_kind[kind] = known
    return known[:elements]


def compressed_settings(
    kind: str, weights: Mapping[str, Any], skipped: Sequence[str]
) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors for all linear modules but the skipped.

    Args:
        kind: the library's name of the layout, such as pack-quantized.
        weights: its arguments of weights; inputs stay in floating point.
    """
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": None,
        "output_activations": None,
        "format": kind,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(skipped),
        "kv_cache_scheme": None,
    }
