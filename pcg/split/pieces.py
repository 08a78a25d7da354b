"""Pieces of the base's graph, which a base executor runs for its clients, and their names.

    linear:WEIGHT+WEIGHT…      x [T, in] to x Wᵀ of the weights, side by side: [T, outs]
    gradient:WEIGHT            dy [T, out] to dx = dy W, [T, in]

A piece maps tensors of T tokens to tensors of T tokens, row by row, so that requests of any clients
are one: their rows one after the other. It keeps nothing from one call to the next, as the gradient
of a linear operator needs its weight alone (Symbiosis §3.6). Larger pieces of a layer's graph that
are so, such as a product, a norm and another product, are further kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcg.errors import SplitError

LINEAR, GRADIENT = "linear", "gradient"


@dataclass(frozen=True, slots=True)
class Piece:
    """The name of a piece.

    Attributes:
        kind: `linear` or `gradient`.
        weights: names of the weights in the base's checkpoint.
    """

    kind: str
    weights: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{'+'.join(self.weights)}"

    @classmethod
    def parse(cls, text: str) -> Piece:
        """Read a name as `str` writes it. SplitError: it is none."""
        kind, colon, names = text.partition(":")
        weights = tuple(names.split("+"))
        if not colon or kind not in (LINEAR, GRADIENT) or not all(weights):
            raise SplitError(
                f"{text[:100]!r} names no piece; use {LINEAR}:WEIGHT+… or {GRADIENT}:WEIGHT"
            )
        if kind == GRADIENT and len(weights) > 1:
            raise SplitError(f"{GRADIENT} takes one weight, not {len(weights)}")
        return cls(kind, weights)
