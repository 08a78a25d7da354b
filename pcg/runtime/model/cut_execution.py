"""Cut execution: functions side by side, whose products run some rows of their weights at a time.

A product by a weight of many rows, such as the head's, takes longer than what a step may have left.
It runs for some of the rows, and goes on in a later step: x Wᵀ row by row of W, and dy W as a sum
over them. What a function does between two products is not cut. Rows run in blocks, as oneDNN
compiles a product for each shape of a weight; a product that runs at once is one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from pcg.kernels.torch.products import Product, ProductRequest, Result
from pcg.runtime.model.merged_execution import MergedExecution, run_together

BLOCK = 1024
"""Rows that run at once: of 32,000, with the 131 tokens of a chunk, the loss of two tokens. In
larger blocks they take as long (hidden size 512, one core of an AMD EPYC)."""


class CutExecution(Generic[Result]):
    """Functions that run in parts, those of each with the others'.

    Attributes:
        is_done: True once all have returned.
    """

    def __init__(self, functions: Sequence[ProductRequest[Result]]) -> None:
        self.is_done = False
        self._merged: MergedExecution[Result] = MergedExecution(functions)
        self._cut: list[Product] = []
        self._rows = 0

    @property
    def results(self) -> list[Result]:
        """The results of the functions, once all have returned."""
        return self._merged.results

    def run(self, numbers: int) -> int:
        """Run on until about so many numbers were multiplied by weights, rows times tokens.

        Returns:
            How many it was, at least a block's; products that cannot be cut do not count.
        """
        ran = 0
        while not self.is_done:
            if not self._cut:
                self._go_on()
                continue
            product = self._cut[0]
            rows = (numbers - ran) // max(product.tokens, 1)
            if ran and rows < min(BLOCK, product.rows - self._rows) // 2:
                break
            if self._rows or rows < product.rows:
                rows = BLOCK
            ran += self._run_rows(product, min(rows, product.rows - self._rows))
        return ran

    def _run_rows(self, product: Product, rows: int) -> int:
        """Run a product for its next rows; returns the numbers."""
        start, tokens = self._rows, product.tokens
        self._rows = start + rows
        is_last = self._rows == product.rows
        product.run_rows(start, start + rows)
        if is_last:
            product.hand_out()
            self._cut, self._rows = self._cut[1:], 0
        return tokens * rows

    def _go_on(self) -> None:
        """Run up to the next products that can be cut, or to the end."""
        groups = self._merged.next_groups()
        self.is_done = not groups
        for first, *others in groups:
            if first.rows:
                self._cut.append(first.joined(others))
            else:
                run_together(first, others)
