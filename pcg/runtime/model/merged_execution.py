"""Merged execution: functions that run side by side share the products by the base's weights.

Emitted functions are generators. Each part of a step, such as some requests or a finetuning window,
does its own work, such as adapters, attention and saving for backward, and yields requests for
products by the base's weights; a product that several parts request at the same time runs once,
over the tokens of all of them.

Source: Symbiosis (split execution: a base executor shared by clients).
"""

from __future__ import annotations

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
    """Functions that run side by side.

    Functions that request products of their own go first, while the others wait at a product by
    the base's weights: so all reach their next one together.

    Attributes:
        results: what each has returned, once it has.
    """

    def __init__(self, functions: Sequence[ProductRequest[Result]]) -> None:
        self.results: list[Any] = [None] * len(functions)
        self._left = dict(enumerate(functions))
        self._asked: dict[int, Product] = {}

    def next_groups(self) -> list[list[Product]]:
        """Go on to the next products; returns those that run as one together, none at the end."""
        for index, function in list(self._left.items()):
            if index in self._asked:
                continue
            try:
                self._asked[index] = next(function)
            except StopIteration as end:
                self.results[index] = end.value
                del self._left[index]
        own = [index for index, product in self._asked.items() if product.is_own]
        by_key: dict[tuple[object, ...], list[Product]] = {}
        for index in own or list(self._asked):
            product = self._asked.pop(index)
            by_key.setdefault(product.key, []).append(product)
        return list(by_key.values())


def run_together(first: Product, others: Sequence[Product]) -> None:
    """Run products of one key as one."""
    if others:
        first.run_with(others)
    else:
        first.run()


def run_merged(functions: Sequence[ProductRequest[Any]]) -> list[Any]:
    """Run functions side by side, merging the products of one key; returns each one's result."""
    merged: MergedExecution[Any] = MergedExecution(functions)
    while groups := merged.next_groups():
        for first, *others in groups:
            run_together(first, others)
    return merged.results
