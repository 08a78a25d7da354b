"""Drive emitted functions that ask for the base's products, run_single or several run_merged.

What is particular to a part of a step, such as its adapters, its attention and what it keeps for
backward, it does itself; a product by a weight of the base that several parts ask for at the same
time is run once, over the tokens of all of them.

Source: Symbiosis (split execution: a base executor shared by clients).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

Result = TypeVar("Result")


class Product(Protocol):
    """What emitted functions ask for; see `pcg.kernels.torch.products`."""

    key: tuple[object, ...]
    is_own: bool

    def run(self) -> None:
        """Run it by itself."""

    def run_with(self, others: Sequence[Self]) -> None:
        """Run it and others of the same key as one."""


ProductRequest: TypeAlias = Generator[Product, None, Result]
"""A function that asks for products."""


def run_single(function: ProductRequest[Result]) -> Result:
    """Run a function with nothing beside it."""
    try:
        while True:
            next(function).run()
    except StopIteration as end:
        result: Result = end.value
        return result


def run_merged(functions: Sequence[ProductRequest[Any]]) -> list[Any]:
    """Run functions side by side; products of one key that they ask for in turn are one.

    Who asks for the base's waits while others ask for products of their own, which not all have: so
    they come to the base's next one run_merged.

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
