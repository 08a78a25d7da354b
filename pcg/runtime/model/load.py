"""The load of a step: its tokens and other work, as latencies are predicted from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one kind.

    Attributes:
        tokens: tokens that go through the program.
        keys: keys that attention reads for them, summed over tokens.
        sampled: rows of logits.
        trained: tokens whose loss is computed.
        windows: windows of finetuning.
        ends: backward units of the last layer to go back, which needs no gradient of its inputs; an
            update may follow.
        chunks: sequences of which more than one token runs.
        read: keys that attention reads for them, those of each sequence once.
    """

    tokens: int = 0
    keys: int = 0
    sampled: int = 0
    trained: int = 0
    windows: int = 0
    ends: int = 0
    chunks: int = 0
    read: int = 0

    @property
    def only_decodes(self) -> bool:
        """True if each sequence runs a token, and nothing runs beside them."""
        return not (self.chunks or self.windows)

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens,
            self.keys + other.keys,
            self.sampled + other.sampled,
            self.trained + other.trained,
            self.windows + other.windows,
            self.ends + other.ends,
            self.chunks + other.chunks,
            self.read + other.read,
        )

    @classmethod
    def of(cls, tokens: int, context: int) -> Load:
        return cls(tokens, keys_of(tokens, context), read=context + tokens)

    @classmethod
    def of_rows(cls, tokens: int, row: int) -> Load:
        """Return the load of so many tokens of sequences that have `row` tokens each."""
        whole, rest = divmod(tokens, row)
        return cls(tokens, whole * keys_of(row, 0) + keys_of(rest, 0), read=tokens)


def keys_of(tokens: int, context: int) -> int:
    """Count the keys that attention reads for new tokens behind a context."""
    return tokens * context + tokens * (tokens + 1) // 2
