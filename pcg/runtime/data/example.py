"""An example: tokens, and which of them are learned."""

from __future__ import annotations

from dataclasses import dataclass

IGNORED = -100
"""The label of a token that is not learned, as in transformers."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence to learn from.

    Attributes:
        ids: its tokens.
        labels: one for each token: `ids[i]`, or -100 if token i is not learned. Not shifted.
    """

    ids: list[int]
    labels: list[int]

    def cut(self, length: int) -> Example:
        """Return its first tokens, at most `length`."""
        return Example(self.ids[:length], self.labels[:length])

    @property
    def targets(self) -> int:
        """The number of tokens that the loss counts; nothing predicts the first."""
        return sum(label != IGNORED for label in self.labels[1:])
