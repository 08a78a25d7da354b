"""Counts of n-grams, and those that two texts have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams of a text."""
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def shared(one: Counter[tuple[str, ...]], other: Counter[tuple[str, ...]]) -> int:
    """Count the n-grams of one that the other has, each as often as both have it."""
    return (one & other).total()
