"""Drive emitted functions that request the base's products, one by itself or several merged.

A part of a step does itself what is particular to it, such as its adapters, its attention and what
it saves for backward; a product by a weight of the base that several parts request at the same time
is run once, over the tokens of all of them.

Source: Symbiosis (split execution: a base executor shared by clients).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcg.kernels.torch.products import Product, ProductRequest, Result


def run_single(function: ProductRequest[Result]) -> Result:
    """Run a function with nothing beside it."""
    try:
        while True:
            next(function).run()
    except StopIteration as end:
        result: Result = end.value
        return result


def run_merged(functions: Sequence[ProductRequest[Any]]) -> list[Any]:
    """Run functions side by side; products of one key that they request in turn are one.

    A function that requests a base's product waits while others request products of their own,
    which not all have: so they come to the base's next one together.

    Returns:
        What each returns.
    """
    results: list[Any] = [None] * len(functions)
    left = dict(enumerate(functions))
    asked: dict[int, Product] = {}
    while left:
        for index, function in list(left.items()):
            if index in asked:
                continue
            try:
                asked[index] = next(function)
            except StopIteration as end:
                results[index] = end.value
                del left[index]
        own = [index for index, product in asked.items() if product.is_own]
        by_key: dict[tuple[object, ...], list[Product]] = {}
        for index in own or list(asked):
            product = asked.pop(index)
            by_key.setdefault(product.key, []).append(product)
        for first, *others in by_key.values():
            if others:
                first.run_with(others)
            else:
                first.run()
    return results
