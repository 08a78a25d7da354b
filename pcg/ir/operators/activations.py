"""Activation functions and their gradients, elementwise."""

from __future__ import annotations

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.arithmetic import Unary, UnaryBackward
from pcg.ir.operators.base import (
    Attributes,
    Bounds,
    Operator,
    Tile,
    Types,
    check_gradient,
    declared,
    word,
)

_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654
_SQRT_1_OVER_2_PI = 0.3989422804014327
_GELU_CUBED = 0.044715


class Tanh(Unary):
    """y = tanh x; dx = dy (1 - y²)."""

    name = "tanh"
    bounded_in = Bounds({0: "e"})
    template = "torch.tanh({0})"
    tile_template = "2.0 * tl.sigmoid(2.0 * {0}) - 1.0"
    reads_output = True


class TanhBackward(UnaryBackward):
    """dx = dy (1 - y²)."""

    name = "tanh_backward"
    bounded_in = Bounds({1: "2 |dy| e"})
    template = "torch.ops.aten.tanh_backward({0}, {1})"
    tile_template = "{0} * (1.0 - {1} * {1})"


class Sigmoid(Unary):
    """y = 1 / (1 + e⁻ˣ); dx = dy y (1 - y)."""

    name = "sigmoid"
    bounded_in = Bounds({0: "e / 4"})
    template = "torch.sigmoid({0})"
    tile_template = "tl.sigmoid({0})"
    reads_output = True


class SigmoidBackward(UnaryBackward):
    """dx = dy y (1 - y)."""

    name = "sigmoid_backward"
    bounded_in = Bounds({1: "|dy| e"})
    template = "torch.ops.aten.sigmoid_backward({0}, {1})"
    tile_template = "{0} * {1} * (1.0 - {1})"


class Silu(Unary):
    """y = x · sigmoid(x)."""

    name = "silu"
    bounded_in = Bounds({0: "1.1 e"})
    template = "F.silu({0})"
    tile_template = "{0} * tl.sigmoid({0})"


class SiluBackward(UnaryBackward):
    """dx = dy σ(x) (1 + x (1 - σ(x)))."""

    name = "silu_backward"
    bounded_in = Bounds({1: "|dy| e / 2"})
    template = "torch.ops.aten.silu_backward({0}, {1})"
    tile_template = "{0} * tl.sigmoid({1}) * (1.0 + {1} * (1.0 - tl.sigmoid({1})))"


class Relu(Unary):
    """y = max(x, 0)."""

    name = "relu"
    bounded_in = Bounds({0: "e"})
    template = "torch.relu({0})"
    tile_template = "tl.maximum({0}, 0.0)"
    reads_output = True


class ReluBackward(UnaryBackward):
    """dx = dy where the output was positive."""

    name = "relu_backward"
    template = "torch.ops.aten.threshold_backward({0}, {1}, 0)"
    tile_template = "tl.where({1} > 0.0, {0}, 0.0)"


class PackSigns(Operator):
    """Bits of the positive elements, eight in a byte: `[.., n]` gives u8 `[.., n / 8]`."""

    name = "pack_signs"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        size = int(types[0].shape[-1])
        if size % 8:
            raise TypeCheckError(f"pack_signs of {types[0]}: {size} is no multiple of 8")
        return (types[0].with_shape((*types[0].shape[:-1], size // 8)).with_dtype("u8"),)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[0].elements  # a byte for each bit, and shifted


class ReluBackwardPacked(UnaryBackward):
    """dx = dy where the output was positive, from its packed signs."""

    name = "relu_backward_packed"
    has_kernel = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, signs = types
        check_gradient(signs, PackSigns().infer((dy,), {})[0])
        return (dy,)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        byte = tile.read(1, f"({tile.column}) // 8")
        return f"tl.where((({byte} >> (({tile.column}) % 8)) & 1) != 0, {tile.read(0)}, 0.0)"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return outputs[0].elements  # a byte for each bit


class Gelu(Unary):
    """The exact GELU, or its tanh form with `approximate = "tanh"`."""

    name = "gelu"
    attributes = declared(approximate=word("none", "tanh"))
    bounded_in = Bounds({0: "1.13 e"})
    template = "F.gelu({0}, approximate={approximate!r})"

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        x = tile.read(0)
        if attributes["approximate"] == "tanh":
            half = tile.let("gelu_half", f"tl.sigmoid(2.0 * {_tanh_argument(x)})")
            return f"{x} * {half}"
        return f"0.5 * {x} * (1.0 + tl.erf({x} * {_SQRT_HALF!r}))"


class GeluBackward(UnaryBackward):
    """dx of gelu, from dy and x."""

    name = "gelu_backward"
    attributes = Gelu.attributes
    bounded_in = Bounds({1: "0.8 |dy| e"})
    template = "torch.ops.aten.gelu_backward({0}, {1}, approximate={approximate!r})"

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        dy, x = tile.read(0), tile.read(1)
        if attributes["approximate"] == "tanh":
            half = tile.let("gelu_half", f"tl.sigmoid(2.0 * {_tanh_argument(x)})")
            slope = f"{_SQRT_2_OVER_PI!r} * (1.0 + {3 * _GELU_CUBED!r} * {x} * {x})"
            return f"{dy} * ({half} + 2.0 * {x} * {half} * (1.0 - {half}) * {slope})"
        area = f"0.5 * (1.0 + tl.erf({x} * {_SQRT_HALF!r}))"
        return f"{dy} * ({area} + {x} * {_SQRT_1_OVER_2_PI!r} * tl.exp(-0.5 * {x} * {x}))"


def _tanh_argument(x: str) -> str:
    """The argument u of tanh in GELU's tanh form; 1 + tanh u is 2 σ(2 u)."""
    return f"({_SQRT_2_OVER_PI!r} * ({x} + {_GELU_CUBED!r} * {x} * {x} * {x}))"
