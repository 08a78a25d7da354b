"""Checks of a workload's parameters."""

import math

from pcg.errors import BenchmarkError


def require_positive(name: str, value: float) -> None:
    """Raise a BenchmarkError unless a value is a finite number above 0."""
    if not 0 < value < math.inf:
        raise BenchmarkError(f"{name}={value}; use a finite number above 0")


def require_count(name: str, value: int, least: int = 1) -> None:
    """Raise a BenchmarkError unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BenchmarkError(f"{name}={value!r}; use a whole number of at least {least}")
