"""Rotary position embedding and its gradient."""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import (
    COUNT,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Tile,
    Types,
    declared,
    word,
)
from pcg.ir.types import promote


class Rope(Operator):
    """Rotary embedding: y = x · cos + rotate(x) · sin on the first `rotary_dim` of each head.

    `x: [T, heads, d]`, `cos, sin: [T, rotary_dim]`. The `style` pairs up dims: `half` (i with
    i + rotary_dim/2: Llama, GPT-NeoX) or `interleaved` (2i with 2i + 1: GPT-J, Cohere).
    """

    name = "rope"
    attributes = declared(rotary_dim=COUNT, style=word("half", "interleaved"))
    template = "K.rope_{style}({inputs})"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, cos, sin = types
        turned = attributes["rotary_dim"]
        expected = (x.shape[0], turned)
        fits = len(x.dims) == 3 and turned % 2 == 0 and turned <= int(x.shape[-1])
        if not fits or cos.shape != expected or sin.shape != expected:
            raise TypeCheckError(
                f"rope of {x} takes cos and sin {list(expected)}, not {cos}, {sin}"
            )
        return (x,)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        column, x = tile.column, tile.read(0)
        other, is_first = self._partner(tile, attributes)
        cos, sin = (tile.read(index, self._turning(tile, column)) for index in (1, 2))
        partner = tile.read(0, other)
        y = f"{x} * {cos} + tl.where({is_first}, -{partner}, {partner}) * {sin}"
        turned = attributes["rotary_dim"]
        return y if turned == tile.size(0) else f"tl.where({column} < {turned}, {y}, {x})"

    @staticmethod
    def _partner(tile: Tile, attributes: Attributes) -> tuple[str, str]:
        """The paired column of each, and whether it is the first of its pair."""
        column, turned = tile.column, attributes["rotary_dim"]
        if attributes["style"] == "interleaved":
            first, other = f"{column} % 2 == 0", f"{column} ^ 1"
        else:
            half = turned // 2
            first = f"{column} < {half}"
            other = f"tl.where({first}, {column} + {half}, {column} - {half})"
        if turned < tile.size(0):
            other = f"tl.where({column} < {turned}, {other}, {column})"
        return tile.let("other", other), first

    @staticmethod
    def _turning(tile: Tile, column: str) -> str:
        """A column of cos and sin, which have only the rotated columns."""
        turned = tile.size(1)
        return column if turned == tile.size(0) else f"tl.minimum({column}, {turned - 1})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-2, 0, 0), (-2,)

    def gradient(self, context: Gradient) -> list[str | None]:
        cos, sin = context.input(1), context.input(2)
        dx = context.add("rope_backward", context.incoming, cos, sin, **context.attributes)
        return [dx, None, None]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 3 * outputs[0].elements

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        x, cos, _ = inputs
        turned = x.with_features(*x.features[:-1], int(cos.shape[-1]))
        wide = turned.with_dtype(promote(x.dtype, cos.dtype))
        if attributes["style"] == "interleaved":
            return 3 * wide.size_bytes / 2  # two products and their sum, of half the dims each
        partial = sympy.Integer(0) if turned == x else turned.size_bytes
        if wide.dtype == x.dtype:
            return partial
        return partial + 2 * wide.size_bytes - outputs[0].size_bytes


class RopeBackward(Rope):
    """dx = dy · cos + rotateᵀ(dy · sin)."""

    name = "rope_backward"
    template = "K.rope_{style}_backward({inputs})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().temporaries(inputs, outputs, attributes) + inputs[2].size_bytes  # -sin

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        column, dy = tile.column, tile.read(0)
        other, is_first = self._partner(tile, attributes)
        cos = tile.read(1, self._turning(tile, column))
        sin = tile.read(2, self._turning(tile, other))
        back = f"{tile.read(0, other)} * {sin}"
        y = f"{dy} * {cos} + tl.where({is_first}, {back}, -({back}))"
        turned = attributes["rotary_dim"]
        return y if turned == tile.size(0) else f"tl.where({column} < {turned}, {y}, {dy})"

    def gradient(self, context: Gradient) -> list[str | None]:
        cos, sin = context.input(1), context.input(2)
        return [context.add("rope", context.incoming, cos, sin, **context.attributes), None, None]
