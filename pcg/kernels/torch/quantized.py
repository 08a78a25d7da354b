"""Products by quantized weights, which run by their formats; see `pcg.formats.format`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from pcg.formats import native
from pcg.formats.format import Format, Lookup, Parts
from pcg.kernels.torch.products import StandIn, has_stand_in, stand_in_of, stand_in_tensor


class LookupProducts(Protocol):
    """Products of a backend by matrices of 4-bit codes."""

    def supports(self, x: Tensor) -> bool:
        """Return whether the products take tokens of x's dtype on its device."""

    def linear(self, x: Tensor, lookup: Lookup, y: Tensor) -> None:
        """Write x W̃ᵀ into y."""

    def input_gradient(self, dy: Tensor, lookup: Lookup, dx: Tensor) -> None:
        """Add dy W̃ to dx."""


@dataclass(frozen=True)
class Block:
    """A matrix as it is stored.

    Attributes:
        products: a backend's products by 4-bit codes; None for the format's own.
    """

    format: Format
    parts: Parts
    products: LookupProducts | None = None

    def linear(self, x: Tensor, y: Tensor) -> None:
        """Write x W̃ᵀ into y."""
        products, lookup = self.products, self._lookup
        if products is not None and lookup is not None and products.supports(x):
            products.linear(x, lookup, y)
        else:
            self.format.linear(self.parts, x, y, 0, self.parts.rows)

    def input_gradient(self, dy: Tensor, dx: Tensor) -> None:
        """Add dy W̃ to dx."""
        products, lookup = self.products, self._lookup
        if products is not None and lookup is not None and products.supports(dy):
            products.input_gradient(dy, lookup, dx)
        else:
            self.format.input_gradient(self.parts, dy, dx, 0, self.parts.rows)

    @property
    def matrix(self) -> native.Matrix | None:
        """The matrix as the native kernel multiplies by it; None where another product does."""
        return self.format.matrix(self.parts) if self.products is None else None

    @cached_property
    def _lookup(self) -> Lookup | None:
        return self.format.lookup(self.parts)


@dataclass(frozen=True, eq=False)
class QuantizedWeight(StandIn):
    """A quantized weight [out, in], or several below each other, as those of experts."""

    blocks: tuple[Block, ...]
    _groups: dict[tuple[QuantizedWeight, ...], QuantizedWeight] = field(
        default_factory=dict, init=False, repr=False
    )
    _experts: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _floats: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(block.parts.size_bytes for block in self.blocks)

    @cached_property
    def _rows(self) -> int:
        return sum(block.parts.rows for block in self.blocks)

    @cached_property
    def matrices(self) -> native.Matrices | None:
        """The blocks as the native kernel multiplies by them; None where another product does."""
        return native.joined([block.matrix for block in self.blocks])

    def linear(self, x: Tensor, others: Sequence[QuantizedWeight]) -> Tensor:
        weight = self.joined(others) if others else self
        y = x.new_empty(x.shape[0], weight._rows)
        matrices = weight.matrices
        if matrices is None or not matrices.multiply(x, y):
            for block, (start, stop) in weight._spans():
                block.linear(x, y[:, start:stop])
        return y

    def joined(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight:
        key = tuple(others)
        group = self._groups.get(key)
        if group is None:
            blocks = [block for weight in (self, *others) for block in weight.blocks]
            group = self._groups[key] = QuantizedWeight(tuple(blocks))
        return group

    def experts(self, weight: Tensor) -> Sequence[Tensor]:
        """Return stand-ins for the matrices of a stand-in [E, out, in]."""
        if not self._experts:
            count, *shape = weight.shape
            size = len(self.blocks) // count
            for first in range(0, len(self.blocks), size):
                matrix = QuantizedWeight(self.blocks[first : first + size])
                self._experts.append(stand_in_tensor(shape, weight.dtype, matrix))
        return self._experts

    def input_gradient(self, dy: Tensor) -> Tensor:
        # A sum over tiles, which half precision would round after each.
        dtype = torch.promote_types(dy.dtype, torch.float32)
        dx = dy.new_zeros(len(dy), self.blocks[0].parts.columns, dtype=dtype)
        for block, (start, stop) in self._spans():
            block.input_gradient(dy[:, start:stop], dx)
        return dx.to(dy.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        (block,) = self.blocks
        return block.format.whole(block.format.chosen(block.parts, ids), dtype)

    def adapted_lengths(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        lengths = a.new_empty(len(b))
        for block, (start, stop) in self._spans():
            for first, last, tile in block.format.tiles(block.parts, 0, stop - start, a):
                rows = slice(start + first, start + last)
                adapted = torch.addmm(tile, b[rows], a, alpha=scale)
                lengths[rows] = torch.linalg.vector_norm(adapted, dim=1)
        return lengths

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the float matrix [out, in], those of experts below each other."""
        return torch.cat([block.format.whole(block.parts, dtype) for block in self.blocks])

    def kept(self, dtype: torch.dtype) -> Tensor:
        """Return the float matrix, which stays in memory."""
        if dtype not in self._floats:
            self._floats[dtype] = self.dequantized(dtype)
        return self._floats[dtype]

    def digest(self) -> str:
        digest = hashlib.sha256()
        for block in self.blocks:
            digest.update(block.format.name.encode())
            for name in block.format.tensors(block.parts.rows, block.parts.columns):
                tensor = block.parts[name].cpu().contiguous()
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _spans(self) -> Iterator[tuple[Block, tuple[int, int]]]:
        start = 0
        for block in self.blocks:
            yield block, (start, start + block.parts.rows)
            start += block.parts.rows


def float_weight(weight: Tensor, *, keeps: bool = False) -> Tensor:
    """Return a weight, or the dequantized matrices of a quantized one, kept with it if asked."""
    stand_in = stand_in_of(weight) if has_stand_in(weight) else None
    if isinstance(stand_in, QuantizedWeight):
        make = stand_in.kept if keeps else stand_in.dequantized
        return make(weight.dtype).view(weight.shape)
    return weight


def expert_matrices(weight: Tensor) -> Tensor | Sequence[Tensor]:
    """Return the matrices of experts [E, out, in] by index; stand-ins for quantized ones."""
    stand_in = stand_in_of(weight) if has_stand_in(weight) else None
    return stand_in.experts(weight) if isinstance(stand_in, QuantizedWeight) else weight


def native_experts(weight: Tensor) -> native.Matrices | None:
    """Return the matrices of quantized experts for the native kernel; None if it has no such."""
    stand_in = stand_in_of(weight)
    return stand_in.matrices if isinstance(stand_in, QuantizedWeight) else None
