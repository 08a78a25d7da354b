"""Merged execution: concurrent functions share the products by the base's weights.

Emitted functions are generators. Each part of a step, such as a batch of requests or a finetuning
window, runs its adapters, attention and saving for backward, and yields requests for products by
the base's weights. A product that several parts request at the same time runs once, over the tokens
of all parts.

Cut execution: a product by a weight of many rows, such as the head's, may take longer than the
remaining time of a step. The product runs for some of the rows, and continues in a later step: x Wᵀ
row by row of W, and dy W as a sum over rows. Work between two products is not cut. Rows run in
blocks, as oneDNN compiles a product for each shape of a weight; an uncut product is a single block.

Source: Symbiosis (split execution: a base executor shared by clients).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic

from pcg.kernels.torch.products import Product, ProductRequest, Result


def run_single(function: ProductRequest[Result]) -> Result:
    """Run a function by itself."""
    try:
        while True:
            next(function).run()
    except StopIteration as end:
        result: Result = end.value
        return result


class MergedExecution(Generic[Result]):
    """Functions that run concurrently.

    Functions that request unshared products run first, while the others wait at a product by the
    base's weights, so that all functions reach their next common product together. A sum over
    several weights runs in parts if another function requests only some of the weights.

    Attributes:
        results: the functions' return values, once they have returned.
    """

    def __init__(self, functions: Sequence[ProductRequest[Result]]) -> None:
        self.results: list[Any] = [None] * len(functions)
        self._left = dict(enumerate(functions))
        self._asked: dict[int, Product] = {}
        # Remaining parts of split requests, and the parts that run now.
        self._parts: dict[int, list[Product]] = {}
        self._running: dict[int, Product] = {}

    def next_groups(self) -> list[list[Product]]:
        """Advance to the next products; return groups to run together, empty at the end."""
        self._add_parts()
        for index, function in list(self._left.items()):
            if index in self._asked:
                continue
            try:
                self._asked[index] = next(function)
            except StopIteration as end:
                self.results[index] = end.value
                del self._left[index]
        own_products = {index: product for index, product in self._asked.items() if product.is_own}
        by_key: dict[tuple[object, ...], list[Product]] = {}
        for index, product in (own_products or self._of_base()).items():
            if product is self._asked[index]:
                del self._asked[index]
            by_key.setdefault(product.key, []).append(product)
        return list(by_key.values())

    def _of_base(self) -> dict[int, Product]:
        """Return the next product of each function: its request, or a shared part of it."""
        if not self._parts and len({product.key for product in self._asked.values()}) < 2:
            return dict(self._asked)
        self._split()
        products, keys = {}, self._keys()
        single = {key for some in keys.values() if len(some) == 1 for key in some}
        counts = Counter(key for some in keys.values() for key in some)
        for index, product in self._asked.items():
            products[index] = product
            if parts := self._parts.get(index):
                # A part that a function waits for, else the most common; equal for all functions.
                part = max(parts, key=lambda p: (p.key in single, counts[p.key], p.key))
                parts.remove(part)
                products[index] = self._running[index] = part
        return products

    def _keys(self) -> dict[int, set[tuple[object, ...]]]:
        keys = {index: {*product.part_keys} for index, product in self._asked.items()}
        return keys | {index: {part.key for part in some} for index, some in self._parts.items()}

    def _split(self) -> None:
        """Split products that share some, but not all, weights with another function's product."""
        keys, begun = self._keys(), {*self._parts}
        for index in keys.keys() - begun:
            mine = keys[index]
            others = [theirs for other, theirs in keys.items() if other in begun or theirs != mine]
            if len(mine) > 1 and any(not mine.isdisjoint(theirs) for theirs in others):
                self._parts[index] = [*self._asked[index].parts()]

    def _add_parts(self) -> None:
        """Add finished parts to their requests, which are complete with the last part."""
        for index, part in self._running.items():
            self._asked[index].add_part(part)
            if not self._parts[index]:
                del self._asked[index], self._parts[index]
        self._running.clear()


def run_together(first: Product, others: Sequence[Product]) -> None:
    """Run products with equal keys as a single product."""
    if others:
        first.run_with(others)
    else:
        first.run()


def run_merged(functions: Sequence[ProductRequest[Any]]) -> list[Any]:
    """Run functions concurrently, merging products with equal keys; return their results."""
    merged: MergedExecution[Any] = MergedExecution(functions)
    while groups := merged.next_groups():
        for first, *others in groups:
            run_together(first, others)
    return merged.results


BLOCK = 1024
"""Rows per block: of 32,000 rows, with the 131 tokens of a chunk, the loss of two tokens. Larger
blocks are not faster (hidden size 512, a core of an AMD EPYC)."""


class CutExecution(Generic[Result]):
    """Functions that run in parts, merged with each other.

    Attributes:
        is_done: True once all functions have returned.
    """

    def __init__(self, functions: Sequence[ProductRequest[Result]]) -> None:
        self.is_done = False
        self._merged: MergedExecution[Result] = MergedExecution(functions)
        self._cut: list[Product] = []
        self._rows = 0

    @property
    def results(self) -> list[Result]:
        """The results of the functions, after all have returned."""
        return self._merged.results

    def run(self, numbers: int) -> int:
        """Run about `numbers` units of work, each a weight's row times a token.

        Returns:
            The units of work done, at least a block; products that cannot be cut do not count.
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
