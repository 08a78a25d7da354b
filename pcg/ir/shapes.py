"""Shapes of tensors with known sizes; without sympy, so that recipes are read fast."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, ...]


def elements(shapes: Shapes) -> int:
    """Numbers of tensors of these shapes."""
    return sum(prod(shape) for shape in shapes)
