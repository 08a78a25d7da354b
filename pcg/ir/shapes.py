"""Shapes of tensors with known sizes; without sympy, so that recipes are read quickly."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, ...]


def elements(shapes: Shapes) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(prod(shape) for shape in shapes)
