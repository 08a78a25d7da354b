"""Reward functions with TRL's signature: a number for each completion."""

from collections.abc import Sequence
from typing import Any


def raises(completions: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for a completion that raises something, else 0."""
    return [float("raise" in text) for text in completions]
