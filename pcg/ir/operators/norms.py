"""RMS norm and layer norm over the last dim, in fp32, with their input gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import (
    FLAG,
    FLOAT,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Tile,
    Types,
    cast_bytes,
    check_gradient,
    check_norm,
    declared,
    widened,
)


class Norm(Operator):
    """A norm of x, the first input; a scale and a bias follow."""

    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        check_norm(types[0], types[1:])
        return (types[0],)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        """Yield feature dims before the normalised dim; a weight or bias may also have them."""
        for dim in range(-len(types[0].features), -1):
            has = [dim if len(other.dims) >= -dim else 0 for other in types[1:]]
            yield (dim, *has), (dim,)


class NormBackward(Operator):
    """dx of a norm, from dy, x, and the weight, if any."""

    inputs = (2, 3)
    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, x, *weights = types
        check_gradient(dy, x)
        check_norm(x, tuple(weights))
        return (x,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        weight = inputs[2] if len(inputs) == 3 else "None"
        return f"K.{self.name}({inputs[0]}, {inputs[1]}, {weight}, {_named(attributes)})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # At the product of g and x: both in fp32 and their product, before the output exists.
        wide = widened(inputs[1])
        copies = cast_bytes(inputs[1], wide.dtype)
        if len(inputs) == 3 or inputs[0].dtype != wide.dtype:
            copies += wide.size_bytes
        return copies + wide.size_bytes - outputs[0].size_bytes


def _named(attributes: Attributes) -> str:
    return ", ".join(f"{name}={attributes[name]!r}" for name in sorted(attributes))


class RmsNorm(Norm):
    """y = x / sqrt(mean(x²) + eps) · (offset + w).

    With `round_first` the normalised x is rounded to x's dtype before the weight (Llama); else
    after it (Gemma, OLMo-2). Without a weight the scale is 1.
    """

    name = "rms_norm"
    attributes = declared(eps=FLOAT, offset=FLOAT, round_first=FLAG)
    inputs = (1, 2)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        weight = inputs[1] if len(inputs) == 2 else "None"
        return f"K.rms_norm({inputs[0]}, {weight}, {_named(attributes)})"

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        y = f"{tile.read(0)} * {_rstd(tile, 0, attributes['eps'])}"
        if tile.inputs == 1:
            return y
        if attributes["round_first"]:
            y = tile.let("normed", tile.rounded(y, tile.dtype(0)))
        return f"{y} * {_rms_scale(tile, 1, attributes)}"

    def gradient(self, context: Gradient) -> list[str | None]:
        weight = [context.input(1)] if len(context.node.inputs) == 2 else []
        attributes = {k: v for k, v in context.attributes.items() if k != "round_first"}
        dx = context.add(
            "rms_norm_backward", context.incoming, context.input(0), *weight, **attributes
        )
        return [dx, None][: len(context.node.inputs)]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # At the norm's sum: the copy in fp32 and its square, before the output exists.
        wide = widened(inputs[0])
        return cast_bytes(inputs[0], wide.dtype) + wide.size_bytes - outputs[0].size_bytes


def _rstd(tile: Tile, x: int, eps: object) -> str:
    squares = tile.row_sum("squares", lambda row: f"{row.read(x)} * {row.read(x)}")
    return tile.let("rstd", f"tl.rsqrt({squares} / {tile.size(x)} + {eps!r})")


def _rms_scale(tile: Tile, weight: int, attributes: Attributes) -> str:
    factor, offset = tile.read(weight), attributes["offset"]
    return f"({factor} + {offset!r})" if offset else factor


class RmsNormBackward(NormBackward):
    """dx = rstd (g - x rstd² mean(g x)) of rms_norm, with g = dy (offset + w)."""

    name = "rms_norm_backward"
    attributes = declared(eps=FLOAT, offset=FLOAT)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        def g(at: Tile) -> str:
            if at.inputs == 2:
                return at.read(0)
            return f"{at.read(0)} * {_rms_scale(at, 2, attributes)}"

        rstd = _rstd(tile, 1, attributes["eps"])
        product = tile.row_sum("product", lambda row: f"{g(row)} * {row.read(1)}")
        mean = f"{product} / {tile.size(1)}"
        return f"{rstd} * ({g(tile)} - {tile.read(1)} * ({rstd} * {rstd} * ({mean})))"


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) · w + b.

    Inputs: x, then w with `weight`, then b with `bias`.
    """

    name = "layer_norm"
    attributes = declared(eps=FLOAT, weight=FLAG, bias=FLAG)
    inputs = (1, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if len(types) != 1 + bool(attributes["weight"]) + bool(attributes["bias"]):
            raise TypeCheckError(f"layer_norm has {len(types)} inputs and {dict(attributes)}")
        return super().infer(types, attributes)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        rest = list(inputs[1:])
        weight = rest.pop(0) if attributes["weight"] else "None"
        bias = rest.pop(0) if attributes["bias"] else "None"
        return f"K.layer_norm({inputs[0]}, {weight}, {bias}, eps={attributes['eps']!r})"

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        y, _ = _standardized(tile, 0, attributes["eps"])
        if attributes["weight"]:
            y = f"{y} * {tile.read(1)}"
        return f"{y} + {tile.read(tile.inputs - 1)}" if attributes["bias"] else y

    def gradient(self, context: Gradient) -> list[str | None]:
        weight = [context.input(1)] if context.attributes["weight"] else []
        eps = context.attributes["eps"]
        dx = context.add(
            "layer_norm_backward", context.incoming, context.input(0), *weight, eps=eps
        )
        return [dx, None, None][: len(context.node.inputs)]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        if not attributes["weight"] or len(inputs[1].dims) == 1:
            return sympy.Integer(0)
        wide = widened(inputs[0])  # the product with a weight per head is in fp32
        return cast_bytes(inputs[0], wide.dtype) + wide.size_bytes - outputs[0].size_bytes


def _standardized(tile: Tile, x: int, eps: object) -> tuple[str, str]:
    """Return (x - mean) / sqrt(var + eps), and 1 / sqrt(var + eps) of each row."""
    total = tile.row_sum("total", lambda row: row.read(x))
    mean = tile.let("mean", f"{total} / {tile.size(x)}")
    squares = tile.row_sum(
        "squares", lambda row: f"({row.read(x)} - {mean}) * ({row.read(x)} - {mean})"
    )
    rstd = tile.let("rstd", f"tl.rsqrt({squares} / {tile.size(x)} + {eps!r})")
    return f"(({tile.read(x)} - {mean}) * {rstd})", rstd


class LayerNormBackward(NormBackward):
    """dx = rstd (g - mean(g) - xhat mean(g xhat)) of layer_norm, with g = dy w."""

    name = "layer_norm_backward"
    attributes = declared(eps=FLOAT)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        def g(at: Tile) -> str:
            return at.read(0) if at.inputs == 2 else f"({at.read(0)} * {at.read(2)})"

        eps, n = attributes["eps"], tile.size(1)
        standardized, rstd = _standardized(tile, 1, eps)
        total = tile.row_sum("gradients", g)
        product = tile.row_sum("product", lambda row: f"{g(row)} * {_standardized(row, 1, eps)[0]}")
        return f"{rstd} * ({g(tile)} - {total} / {n} - {standardized} * ({product} / {n}))"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Besides g and x: native_layer_norm's normalised x, and dx in fp32.
        return super().temporaries(inputs, outputs, attributes) + widened(inputs[1]).size_bytes
