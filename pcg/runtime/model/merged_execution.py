"""Merged execution: functions that run side by side share the products by the base's weights.

Emitted functions are generators. Each part of a step, such as some requests or a finetuning window,
does its own work, such as adapters, attention and saving for backward, and yields requests for
products by the base's weights; a product that several parts request at the same time runs once,
over the tokens of all of them.

Source: Symbiosis (split execution: a base executor shared by clients).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcg.kernels.torch.products import Product, ProductRequest, Result


def run_single(function: ProductRequest[Result]) -> Result:
    """Run a function by itself."""
    try:
        while True:
            next(function).run()
    except StopIteration as end:
        result: Result = end.value
        return result


def run_merged(functions: Sequence[ProductRequest[Any]]) -> list[Any]:
    """Run functions side by side, merging the products of one key; returns each one's result.

    Functions that request products of their own go first, while the others wait at a product by
    the base's weights: so all reach their next one together.
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
