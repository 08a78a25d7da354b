"""Pieces of the base's graph, which a base executor runs for its clients, and their names.

    linear:WEIGHT+WEIGHT…      x [T, in] to x Wᵀ of the weights, side by side: [T, outs]
    gradient:WEIGHT            dy [T, out] to dx = dy W, [T, in]
    graph:DIGEST@LAYER         a graph that the client has defined, by the weights of a layer

A piece maps tensors of T tokens to tensors of T tokens, row by row, so that requests of any clients
are one: their rows one after the other. It keeps nothing from one call to the next, as the gradient
of a linear operator needs its weight alone (Symbiosis §3.6), and a graph makes again what it needs.
A client writes a graph as text (`pcg.passes.placement.piece_text`), so that graphs of several
clients have one digest where they compute the same.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from pcg.errors import SplitError

LINEAR, GRADIENT, GRAPH = "linear", "gradient", "graph"
UNKNOWN_GRAPH = "this graph was not defined"
"""The beginning of the refusal of a call whose graph the client has to define first."""
_GRAPH_NAME = re.compile(r"([0-9a-f]{64})@([0-9]{1,5})")


def graph_digest(text: str) -> str:
    """Return the name of a graph's text."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """The name of a piece.

    Attributes:
        kind: `linear`, `gradient` or `graph`.
        weights: names of the weights in the base's checkpoint; of a graph, its digest.
        layer: a graph's layer.
    """

    kind: str
    weights: tuple[str, ...]
    layer: int = 0

    def __str__(self) -> str:
        if self.kind == GRAPH:
            return f"{GRAPH}:{self.weights[0]}@{self.layer}"
        return f"{self.kind}:{'+'.join(self.weights)}"

    @classmethod
    def parse(cls, text: str) -> Piece:
        """Read a name as `str` writes it. SplitError: it is none."""
        kind, colon, names = text.partition(":")
        if kind == GRAPH and (found := _GRAPH_NAME.fullmatch(names)):
            return cls(GRAPH, (found[1],), int(found[2]))
        weights = tuple(names.split("+"))
        if not colon or kind not in (LINEAR, GRADIENT) or not all(weights):
            raise SplitError(
                f"{text[:100]!r} names no piece; use {LINEAR}:WEIGHT+…, {GRADIENT}:WEIGHT "
                f"or {GRAPH}:DIGEST@LAYER"
            )
        if kind == GRADIENT and len(weights) > 1:
            raise SplitError(f"{GRADIENT} takes one weight, not {len(weights)}")
        return cls(kind, weights)
