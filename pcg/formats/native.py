"""Products by stored matrices and float experts, and dequantization, by the kernel in `native.cpp`.

    y = x W̃ᵀ       W̃ is read once, in the form in which it is stored

PyTorch dequantizes a tile and then multiplies by it; the kernel decodes a few rows of W̃ into
registers, or for many tokens into the cache, and multiplies all tokens by them. Dequantized weights
and products of int8 are those of PyTorch to the bit; float products agree to rounding in fp32. A
token's outputs do not depend on the other tokens of a call.

The kernel needs a C++ compiler and AVX-512 or AVX2; without them PyTorch runs everything.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcg.native_library import NativeFunction, load_optional

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-ffp-contract=off",)
_DTYPES = (torch.float32, torch.bfloat16)


class Kind(IntEnum):
    """The layouts that the kernel decodes, as in `native.cpp`."""

    INT8 = 0
    INT8_WEIGHT = 1
    HIGH_FIRST = 2
    LOW_FIRST = 3
    INT4_HALF = 4
    INT4_BF16 = 5
    FP8 = 6
    Q8_0 = 7
    Q4_0 = 8
    Q4_1 = 9
    Q4_K = 10
    Q6_K = 11
    FLOAT = 12


@functools.cache
def _library() -> Any:
    """Return the library; None where it cannot be compiled, which is logged once."""
    purpose = "products by quantized weights and experts"
    return load_optional(_SOURCE, purpose, *_FLAGS)


@functools.cache
def _function(name: str) -> NativeFunction:
    return NativeFunction(_library(), name)


def is_native(device: torch.device) -> bool:
    """Return whether the kernel reads matrices on a device."""
    return device.type == "cpu" and _library() is not None


@dataclass(frozen=True, eq=False)
class Matrix:
    """A stored matrix, as the kernel reads it.

    Attributes:
        kind: the layout.
        codes: [rows, …].
        columns: of the matrix.
        multiplies: False if the kernel only dequantizes it.
        scales: [rows / group_rows, groups].
        group: columns that share a scale.
        group_rows: rows that share it.
        zeros: of 4-bit integers, as scales.
        values: of the 16 codes, fp32.
        scale_values: of the 256 codes of scales, fp32.
        nested: scales of the scales, of 256 each by their number in the whole matrix.
        first: the number of this matrix's first scale.
        row_blocks: scales of a row of the whole matrix.
        offset: is added to scales.
        sums: of the codes of each row, int32.
    """

    kind: Kind
    codes: Tensor
    columns: int
    _: KW_ONLY
    multiplies: bool = True
    scales: Tensor | None = None
    group: int = 1
    group_rows: int = 1
    zeros: Tensor | None = None
    values: Tensor | None = None
    scale_values: Tensor | None = None
    nested: Tensor | None = None
    first: int = 0
    row_blocks: int = 0
    offset: float = 0.0
    sums: Tensor | None = None

    @property
    def is_contiguous(self) -> bool:
        """True if every tensor lies in memory as the kernel reads it."""
        fields = vars(self).values()
        return all(value.is_contiguous() for value in fields if isinstance(value, Tensor))

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """The fields of the kernel's struct."""
        scales = self.scales
        groups = scales.shape[-1] if scales is not None and scales.dim() == 2 else 1
        return np.array(
            [
                self.kind,
                len(self.codes),
                self.columns,
                _address(self.codes),
                self.codes.stride(0) * self.codes.itemsize,
                _address(scales),
                groups,
                self.group,
                self.group_rows,
                _address(self.zeros),
                _address(self.values),
                _address(self.scale_values),
                _address(self.nested),
                self.first,
                self.row_blocks,
                int(np.float32(self.offset).view(np.int32)),
                _address(self.sums),
            ],
            dtype=np.int64,
        )

    def dequantize(self, start: int, stop: int, out: Tensor) -> bool:
        """Write rows into `out`, in its dtype; return False if the kernel does not write it."""
        if out.dtype not in _DTYPES or not out.is_contiguous():
            return False
        _function("pcg_dequantize")(
            self.numbers.ctypes.data, start, stop, out.data_ptr(),
            out.dtype is torch.bfloat16, torch.get_num_threads(), keeps=self,
        )  # fmt: skip
        return True


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Matrices:
    """Matrices of the same columns below each other, by which the kernel multiplies.

    Attributes:
        rows: of all together.
    """

    def __init__(self, every: Sequence[Matrix]) -> None:
        self._every = every  # whose memory the numbers name
        self._take(np.concatenate([matrix.numbers for matrix in every]))

    def _take(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers
        self._matrices = numbers.ctypes.data, numbers.size // len(self._every[0].numbers)
        self._multiply = _function("pcg_multiply")
        self.rows = int(numbers.reshape(-1, len(self._every[0].numbers))[:, _ROWS].sum())

    @classmethod
    def of_floats(cls, weight: Tensor) -> Matrices:
        """Return the matrices of a float tensor [n, out, in]; rows are contiguous."""
        matrices = cls([Matrix(Kind.FLOAT, weight[0], weight.shape[2])])
        numbers = np.tile(matrices._numbers, (len(weight), 1))
        numbers[:, _CODES] += np.arange(len(weight)) * weight.stride(0) * weight.itemsize
        matrices._take(numbers)
        return matrices

    def multiply(self, x: Tensor, y: Tensor) -> bool:
        """Write x W̃ᵀ into y [tokens, rows]; return False if the kernel does not read x."""
        if not _is_read(x, y):
            return False
        self._multiply(
            *self._matrices, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), y.stride(0),
            x.dtype is torch.bfloat16, torch.get_num_threads(), keeps=self,
        )  # fmt: skip
        return True

    def multiply_chosen(self, x: Tensor, order: Tensor, sizes: Tensor, y: Tensor) -> bool:
        """Multiply rows by the experts that they chose; return False if the kernel does not.

        Args:
            x: [T, in] or [T k, in], whose rows make one or k choices.
            order: the choices [T k] in the order of their experts, int64.
            sizes: the number of choices of each expert, [E], int64; an expert has as many matrices
                as any other.
            y: receives the output of each choice, [T k, out].
        """
        if not _is_read(x, y):
            return False
        first, count = self._matrices
        _function("pcg_multiply_chosen")(
            first, count // len(sizes), order.data_ptr(), sizes.data_ptr(), len(sizes),
            x.data_ptr(), x.stride(0), len(y) // len(x), y.data_ptr(), y.stride(0),
            x.dtype is torch.bfloat16, torch.get_num_threads(), keeps=self,
        )  # fmt: skip
        return True


_ROWS, _CODES = 1, 3
"""The places of the rows and the address of codes in a matrix's numbers."""


def _is_read(x: Tensor, y: Tensor) -> bool:
    """Return whether the kernel reads x [tokens, in] and writes y of its dtype."""
    is_known = type(x) is Tensor and x.dtype in _DTYPES and x.dtype is y.dtype
    return is_known and x.stride(1) == y.stride(1) == 1


def joined(every: Sequence[Matrix | None]) -> Matrices | None:
    """Return matrices below each other; None unless the kernel multiplies by all."""
    known = [matrix for matrix in every if matrix is not None and matrix.multiplies]
    return Matrices(known) if len(known) == len(every) else None


def of_floats(weights: Sequence[Tensor]) -> Matrices | None:
    """Return float matrices [out, in] below each other; None unless the kernel reads all."""
    if not weights or not all(w.dim() == 2 and reads(w.unsqueeze(0)) for w in weights):
        return None
    return Matrices([Matrix(Kind.FLOAT, weight, weight.shape[1]) for weight in weights])


def reads(weight: Tensor) -> bool:
    """Return whether the kernel multiplies by the float matrices of [n, out, in]."""
    is_plain = type(weight) is Tensor and weight.dtype in _DTYPES and weight.stride(2) == 1
    return is_plain and is_native(weight.device)
