"""The work of some tokens of a step, as latencies count it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Work of a kind.

    Attributes:
        tokens: that go through the program.
        keys: that attention reads for them, summed over tokens.
        sampled: rows of logits.
        trained: of the tokens, those whose loss is taken.
        windows: of finetuning.
    """

    tokens: int = 0
    keys: int = 0
    sampled: int = 0
    trained: int = 0
    windows: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens,
            self.keys + other.keys,
            self.sampled + other.sampled,
            self.trained + other.trained,
            self.windows + other.windows,
        )

    @classmethod
    def of(cls, tokens: int, context: int) -> Load:
        """Of new tokens behind a context."""
        return cls(tokens, keys_of(tokens, context))

    @classmethod
    def of_window(cls, tokens: int, context: int) -> Load:
        """Of a window's tokens behind a context, and their loss."""
        return cls(tokens, keys_of(tokens, context), 0, tokens, 1)


def keys_of(tokens: int, context: int) -> int:
    """Keys that attention reads for new tokens behind a context, summed over tokens."""
    return tokens * context + tokens * (tokens + 1) // 2
