"""Cut execution: functions side by side, whose products run some rows of their weights at a time.

A product by a weight of many rows, such as the head's, takes longer than what a step may have left.
It runs for some of the rows, and goes on in a later step: x Wᵀ row by row of W, and dy W as a sum
over them. What a function does between two products is not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from pcg.kernels.torch.products import Product, ProductRequest, Result
from pcg.runtime.model.merged_execution import MergedExecution, run_together


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
        """Run on until so many numbers were multiplied by weights, rows times tokens.

        Returns:
            How many it was; products that cannot be cut do not count.
        """
        ran = 0
        while not self.is_done and (ran < numbers or not self._cut):
            if not self._cut:
                self._go_on()
                continue
            product = self._cut[0]
            tokens = max(product.tokens, 1)
            stop = min(product.rows, self._rows + -(-(numbers - ran) // tokens))
            ran += tokens * (stop - self._rows)
            is_last = stop == product.rows
            product.run_rows(self._rows, stop)
            self._rows = stop
            if is_last:
                product.hand_out()
                self._cut, self._rows = self._cut[1:], 0
        return ran

    def _go_on(self) -> None:
        """Run up to the next products that can be cut, or to the end."""
        groups = self._merged.next_groups()
        self.is_done = not groups
        for first, *others in groups:
            if first.rows:
                self._cut.append(first.joined(others))
            else:
                run_together(first, others)
