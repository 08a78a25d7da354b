"""Tensors as Tinker sends them, dense or sparse (CSR), as arrays of numpy.

Nothing is believed of a tensor: its bytes have to be as many as its shape says, and the offsets and
columns of a sparse one have to be in order and within it. A sparse tensor of a few bytes may name
any shape, so that how many numbers a call may have is bounded before they are made room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pcg.errors import DataError
from pcg.runtime.training.trainer.datum import MOST_TARGETS
from pcg.serve.tinker.proto.schema import CLASSES
from pcg.units import shown

Array = NDArray[Any]

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""The numbers of Tinker's types."""

_TYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
    BFLOAT16: np.dtype("<u2"),
}
_INDEX: np.dtype[Any] = np.dtype("<i8")

MOST_NUMBERS = 2**23
"""The numbers that the tensors of one call may have together, zeros of sparse ones included."""


class Room:
    """A count of the numbers that may still come in a call."""

    def __init__(self) -> None:
        self._left = MOST_NUMBERS

    def take(self, count: int, place: str) -> None:
        """Count numbers. DataError: there are more than a call may have."""
        if count > self._left:
            raise DataError(
                f"{place} has {shown(count)} numbers, and {self._left} of the {MOST_NUMBERS} that "
                "one call may have are left; send less at a time"
            )
        self._left -= count


def array_of(message: Any, place: str, room: Room) -> Array:
    """Return a tensor as an array, its rows and columns as it has them.

    Args:
        message: a `Tensor`.
        place: where it is, for errors.
        room: what may still come.
    Returns:
        An array of float32 or int64, of one or two dimensions.
    Raises:
        DataError: its type, its shape and its bytes do not fit together.
    """
    dtype = _TYPES.get(message.dtype)
    if dtype is None:
        raise DataError(f"{place} has the dtype {message.dtype}; use float32 or int64")
    is_sparse = message.HasField("sparse_csr")
    if is_sparse == message.HasField("dense"):
        raise DataError(f"{place} has to have either dense or sparse_csr")
    shape = [int(size) for size in message.shape[:3]]
    if is_sparse:
        return _widened(_of_csr(message, dtype, shape, place, room), message.dtype)
    numbers = _numbers(message.dense, dtype, place)
    room.take(len(numbers), place)
    shape = shape or [len(numbers)]
    rows, columns = (*shape, 1)[:2]
    if len(shape) > 2 or rows < 0 or columns < 1 or rows * columns != len(numbers):
        raise DataError(
            f"{place} has the shape {shown(list(message.shape))} and {len(numbers)} numbers; "
            "use [N] or [N, K] of them"
        )
    return _widened(numbers, message.dtype).reshape(shape)


def _of_csr(message: Any, dtype: np.dtype[Any], shape: list[int], place: str, room: Room) -> Array:
    if len(shape) != 2 or shape[0] < 0 or shape[1] < 1:
        raise DataError(
            f"{place} is sparse and has the shape {shown(list(message.shape))}; use [N, K]"
        )
    if shape[1] > MOST_TARGETS:
        raise DataError(f"{place} has {shape[1]} columns, and may have at most {MOST_TARGETS}")
    room.take(shape[0] * shape[1], place)
    csr = message.sparse_csr
    values = _numbers(csr.values, dtype, place)
    starts = _numbers(csr.crow_indices, _INDEX, f"{place}.crow_indices")
    columns = _numbers(csr.col_indices, _INDEX, f"{place}.col_indices")
    if len(starts) != shape[0] + 1 or len(columns) != len(values):
        raise DataError(
            f"{place} has {shape[0]} rows, {len(starts)} crow_indices, {len(values)} values and "
            f"{len(columns)} col_indices; use a row offset more than rows, and a column a value"
        )
    counts = np.diff(starts)  # wrong if it overflows, which numbers within the bounds do not
    is_within = starts[0] == 0 and starts[-1] == len(values) == starts.max()
    if not is_within or starts.min() or (counts < 0).any():
        raise DataError(
            f"{place}.crow_indices do not rise from 0 to the number of its values, {len(values)}"
        )
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise DataError(f"{place}.col_indices are not all within its {shape[1]} columns")
    found = np.zeros(shape, dtype)
    rows = np.repeat(np.arange(shape[0]), counts)
    places = rows * shape[1] + columns
    if (np.diff(places) <= 0).any():
        raise DataError(f"{place}.col_indices do not rise within each row")
    found[rows, columns] = values
    return found


def _numbers(data: bytes, dtype: np.dtype[Any], place: str) -> Array:
    if len(data) % dtype.itemsize:
        raise DataError(
            f"{place} has {len(data)} bytes, which are no whole numbers of {dtype.itemsize} bytes"
        )
    return np.frombuffer(data, dtype)


def _widened(array: Array, kind: int) -> Array:
    """Return an array as float32 or int64."""
    if kind == BFLOAT16:  # the upper half of a float32
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<i8") if kind == INT32 else array


def tokens_of(data: bytes, place: str, room: Room) -> Array:
    """Return the tokens of a chunk, int64 [N]. DataError: they are not whole."""
    tokens = _numbers(data, _TYPES[INT32], place)
    room.take(len(tokens), place)
    return tokens.astype("<i8")


def plain(array: Array) -> tuple[int, bytes]:
    """Return the type and the bytes of an array as Tinker's client reads them."""
    is_float = np.issubdtype(array.dtype, np.floating)
    kind = FLOAT32 if is_float else INT64
    return kind, array.astype(_TYPES[kind]).tobytes()


def tensor_of(
    array: Array, cells: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None
) -> Any:
    """Return a `Tensor` of an array of floats or ints.

    Args:
        cells: of a sparse one the shape, the row offsets and the columns of its numbers.
    """
    kind, data = plain(array)
    if cells is None:
        return CLASSES["Tensor"](dense=data, dtype=kind, shape=array.shape)
    shape, *indices = cells
    rows, columns = (np.asarray(one, _INDEX).tobytes() for one in indices)
    csr = CLASSES["SparseCsr"](values=data, crow_indices=rows, col_indices=columns)
    return CLASSES["Tensor"](sparse_csr=csr, dtype=kind, shape=shape)
