"""The tile of an output over which an operator's Triton meaning is written.

A kernel that runs several operators takes a tile of rows and columns; a row is what lies along the
last dim. An operator says what an element of its output is (`Operator.tile`), by what it reads at
the same place, at another column of the same row, or summed over the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Tile(Protocol):
    """A tile of an operator's output. Values are in the dtype of arithmetic: fp32 for half ones."""

    @property
    def column(self) -> str:
        """Expression of each element's place along the last dim."""

    @property
    def inputs(self) -> int:
        """The number of the operator's inputs."""

    def size(self, index: int) -> int:
        """Size of an input's last dim."""

    def dtype(self, index: int) -> str:
        """An input's dtype, as `bf16`."""

    def read(self, index: int, column: str | None = None, where: str = "") -> str:
        """An input where the output is, broadcast to it.

        Args:
            index: the input's.
            column: its place along the last dim, where that is another.
            where: condition of elements for which there is such a place; any number stands for
                the others.
        """

    def let(self, name: str, expression: str) -> str:
        """A variable with an expression's value; its name begins like that."""

    def rounded(self, expression: str, dtype: str) -> str:
        """The expression as a value of a dtype would hold it."""

    def row_sum(self, name: str, summand: Callable[[Tile], str]) -> str:
        """A variable with the sum of an expression over the row, for each row."""
