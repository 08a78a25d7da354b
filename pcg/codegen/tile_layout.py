"""Layout of a kernel's tiles, and the positions of values' elements in them.

A program has a tile of ROWS rows and COLUMNS columns. Where nothing is summed a row is a token,
with all its features side by side; else it is what is summed, and a token has several:

    row = token · R + group          R rows a token
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pcg.ir.analysis.kernel_group import KernelGroup
from pcg.ir.types import TensorType

_TILE = 2048
"""Elements of a tile where rows are short: four warps load 16 bytes of bf16 a thread, twice."""
_MOST_ROWS = 16
_WARP_ELEMENTS = 512
"""Elements of a tile that a warp holds: 16 registers a thread for each value in fp32."""


@dataclass(frozen=True)
class TilePosition:
    """A position among a value's features: expressions of row and column, "0" where there is one.

    The mask is the condition of elements that are there; empty where all are.
    """

    group: str
    column: str
    mask: str = ""


@dataclass(frozen=True)
class TileShape:
    """R, the columns of a row, and ROWS, COLUMNS and warps of a program."""

    rows_a_token: int
    columns: int
    row_block: int
    column_block: int
    warps: int

    @classmethod
    def of(cls, group: KernelGroup, elements: int = _TILE) -> TileShape:
        """The shape for a group, with tiles of so many elements where its rows are shorter."""
        features = group.type.features
        if group.sums_rows:
            rows, columns = prod(features[:-1]), features[-1]
            column_block = _power_of_two(columns)
        else:
            rows, columns = 1, prod(features)
            column_block = min(_power_of_two(columns), _TILE)
        row_block = max(1, min(elements // column_block, _MOST_ROWS))
        held = row_block * column_block
        warps = max(1, min(_power_of_two(held // _WARP_ELEMENTS), 32))
        return cls(rows, columns, row_block, column_block, warps)

    @property
    def elements(self) -> int:
        return self.row_block * self.column_block

    @property
    def column_blocks(self) -> int:
        """Number of programs for a row."""
        return -(-self.columns // self.column_block)

    @property
    def is_padded(self) -> bool:
        """True if some columns of a tile are behind a row's end."""
        return bool(self.columns % self.column_block)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def position_read(read: TensorType, made: TensorType, place: TilePosition, op: str) -> TilePosition:
    """The position at which an operator reads an input to make its output at a position."""
    own, of_output = read.features, made.features
    if op == "reshape" and own[-1:] != of_output[-1:]:
        linear = _linear(place, of_output[-1])
        if prod(own[:-1]) == 1:
            return TilePosition("0", linear)
        return TilePosition(f"({linear} // {own[-1]})", f"({linear} % {own[-1]})")
    column = "0" if own[-1] == 1 else place.column
    rows, rows_made = prod(own[:-1]), prod(of_output[:-1])
    if rows == rows_made:
        return TilePosition(place.group, column)
    if rows == 1:
        return TilePosition("0", column)
    return TilePosition(_broadcast_group(own[:-1], of_output[:-1], place.group), column)


def _broadcast_group(own: tuple[int, ...], made: tuple[int, ...], group: str) -> str:
    """The row of an input that is repeated along some dims of rows."""
    terms, stride, own_stride = [], 1, 1
    padded = (1,) * (len(made) - len(own)) + own
    for size, size_made in zip(reversed(padded), reversed(made), strict=True):
        if size != 1:
            terms.append(f"{group} // {stride} % {size_made} * {own_stride}")
        stride, own_stride = stride * size_made, own_stride * size
    return f"({' + '.join(terms)})"


def _linear(place: TilePosition, size: int) -> str:
    if place.group == "0":
        return place.column
    return f"({place.group} * {size} + {place.column})"
