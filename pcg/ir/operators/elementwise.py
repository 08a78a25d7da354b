"""Elementwise operators: unary functions, casts, and binary arithmetic with broadcasting.

The file is long because it is a part of the operator table: one short entry after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from pcg.errors import TypeCheckError
from pcg.ir.operators.operator import (
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    broadcast_dims,
    same_dims,
)
from pcg.ir.operators.tile import Tile
from pcg.ir.types import TORCH_NAMES, broadcast, result_dtype, tensor


class Elementwise(Operator):
    """An operator whose element depends on the same element of each input.

    `tile_template` is what it is in Triton.
    """

    tile_template: ClassVar[str] = ""

    def tiles(self, attributes: Attributes) -> bool:
        return bool(self.tile_template)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return self.tile_template.format(*(tile.read(index) for index in range(tile.inputs)))


class Unary(Elementwise):
    """y = f(x); `template` is f in PyTorch."""

    template: ClassVar[str] = ""
    saves: ClassVar[tuple[int, ...]] = (0,)
    """What autograd keeps, as in `eager_saves`."""

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return self.template.format(*inputs, **attributes)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        return self.saves


class Neg(Unary):
    """y = -x."""

    name = "neg"
    linear_in = ((0,),)
    template = "-{0}"
    tile_template = "-{0}"
    saves = ()

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("neg", context.incoming)]


class Exp(Unary):
    """y = eˣ; dx = dy y."""

    name = "exp"
    template = "torch.exp({0})"
    tile_template = "tl.exp({0})"
    saves = (~0,)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("mul", context.incoming, context.output())]


class Rsqrt(Unary):
    """y = 1 / √x; dx = -dy y³ / 2."""

    name = "rsqrt"
    template = "torch.rsqrt({0})"
    tile_template = "tl.rsqrt({0})"
    saves = (~0,)

    def gradient(self, context: Gradient) -> list[str | None]:
        cubed = context.add("pow", context.output(), exponent=3.0)
        slope = context.add("mul", cubed, scalar=-0.5)
        return [context.add("mul", context.incoming, slope)]


class Sqrt(Unary):
    """y = √x; dx = dy / (2 y)."""

    name = "sqrt"
    template = "torch.sqrt({0})"
    tile_template = "tl.sqrt({0})"
    saves = (~0,)

    def gradient(self, context: Gradient) -> list[str | None]:
        half = context.add("mul", context.incoming, scalar=0.5)
        return [context.add("div", half, context.output())]


class Cos(Unary):
    """y = cos x; dx = -dy sin x."""

    name = "cos"
    template = "torch.cos({0})"

    def gradient(self, context: Gradient) -> list[str | None]:
        slope = context.add("neg", context.add("sin", context.input(0)))
        return [context.add("mul", context.incoming, slope)]


class Sin(Unary):
    """y = sin x; dx = dy cos x."""

    name = "sin"
    template = "torch.sin({0})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("mul", context.incoming, context.add("cos", context.input(0)))]


class Tanh(Unary):
    """y = tanh x; dx = dy (1 - y²)."""

    name = "tanh"
    template = "torch.tanh({0})"
    tile_template = "2.0 * tl.sigmoid(2.0 * {0}) - 1.0"
    saves = (~0,)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("tanh_backward", context.incoming, context.output())]


class Sigmoid(Unary):
    """y = 1 / (1 + e⁻ˣ); dx = dy y (1 - y)."""

    name = "sigmoid"
    template = "torch.sigmoid({0})"
    tile_template = "tl.sigmoid({0})"
    saves = (~0,)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("sigmoid_backward", context.incoming, context.output())]


class Silu(Unary):
    """y = x · sigmoid(x)."""

    name = "silu"
    template = "F.silu({0})"
    tile_template = "{0} * tl.sigmoid({0})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("silu_backward", context.incoming, context.input(0))]


class Relu(Unary):
    """y = max(x, 0)."""

    name = "relu"
    template = "torch.relu({0})"
    tile_template = "tl.maximum({0}, 0.0)"
    saves = (~0,)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("relu_backward", context.incoming, context.output())]


class Gelu(Unary):
    """The exact GELU, or its tanh form with `approximate = "tanh"`."""

    name = "gelu"
    template = "F.gelu({0}, approximate={approximate!r})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        x = tile.read(0)
        if attributes["approximate"] == "tanh":
            half = tile.let("gelu_half", f"tl.sigmoid(2.0 * {_gelu_inner(x)})")
            return f"{x} * {half}"
        return f"0.5 * {x} * (1.0 + tl.erf({x} * {_SQRT_HALF!r}))"

    def gradient(self, context: Gradient) -> list[str | None]:
        incoming, x = context.incoming, context.input(0)
        return [context.add("gelu_backward", incoming, x, **context.attributes)]


_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654
_SQRT_1_OVER_2_PI = 0.3989422804014327
_GELU_CUBED = 0.044715


def _gelu_inner(x: str) -> str:
    """What tanh is taken of in GELU's tanh form; 1 + tanh u is 2 σ(2 u)."""
    return f"({_SQRT_2_OVER_PI!r} * ({x} + {_GELU_CUBED!r} * {x} * {x} * {x}))"


class Clamp(Unary):
    """y = min(max(x, min), max); a missing bound is no bound."""

    name = "clamp"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if not attributes.keys() & {"min", "max"}:
            raise TypeCheckError("clamp has neither the attribute min nor max")
        return types

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"torch.clamp({inputs[0]}, {attributes.get('min')}, {attributes.get('max')})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        x = tile.read(0)
        if "min" in attributes:
            x = f"tl.maximum({x}, {attributes['min']!r})"
        return f"tl.minimum({x}, {attributes['max']!r})" if "max" in attributes else x

    def gradient(self, context: Gradient) -> list[str | None]:
        return [
            context.add("clamp_backward", context.incoming, context.input(0), **context.attributes)
        ]


class Pow(Unary):
    """y = x ** exponent, with a constant exponent."""

    name = "pow"
    template = "torch.pow({0}, {exponent})"

    def tiles(self, attributes: Attributes) -> bool:
        return attributes["exponent"] in _POWERS

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return _POWERS[float(attributes["exponent"])].format(tile.read(0))  # type: ignore[arg-type]

    def gradient(self, context: Gradient) -> list[str | None]:
        exponent = float(context.attributes["exponent"])  # type: ignore[arg-type]
        if exponent == 0.0:
            return [context.add("mul", context.incoming, scalar=0.0)]
        power = context.input(0)
        if exponent != 2.0:
            power = context.add("pow", power, exponent=exponent - 1.0)
        slope = context.add("mul", power, scalar=exponent)
        return [context.add("mul", context.incoming, slope)]


_POWERS = {
    -1.0: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
}
"""Powers that are a few products; PyTorch takes others by exp and log."""


class Cast(Unary):
    """The same numbers in another dtype."""

    name = "cast"
    saves = ()

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[0].with_dtype(str(attributes["dtype"])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"{inputs[0]}.to(torch.{TORCH_NAMES[str(attributes['dtype'])]})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return tile.read(0)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.cast(context.incoming, context.input_type(0).dtype)]


class Binary(Elementwise):
    """x ∘ y with broadcasting, or x ∘ scalar; with `reversed`, scalar ∘ x."""

    inputs = (1, 2)
    symbol: ClassVar[str] = ""

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if (len(types) == 1) != ("scalar" in attributes):
            raise TypeCheckError(f"{self.name} takes two tensors, or one and the attribute scalar")
        if len(types) == 1:
            scalar = attributes["scalar"]
            dtype = types[0].dtype
            if isinstance(scalar, float) and not types[0].is_float:
                dtype = "f32"
            elif dtype == "bool" and type(scalar) is int:
                dtype = "i64"
            return (types[0].with_dtype(self.result_dtype(dtype)),)
        if "reversed" in attributes:
            raise TypeCheckError(f"{self.name} of two tensors is not reversed; swap the two")
        dtype = self.result_dtype(result_dtype(*types))
        return (tensor(dtype, *broadcast(types[0].shape, types[1].shape)),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return broadcast_dims(types, self.infer(types, attributes)[0])

    def result_dtype(self, promoted: str) -> str:
        """The dtype of the result, from that of the operands."""
        return promoted

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        left, right = inputs[0], inputs[1] if len(inputs) == 2 else repr(attributes["scalar"])
        if attributes.get("reversed"):
            left, right = right, left
        return f"{left} {self.symbol} {right}"

    def tiles(self, attributes: Attributes) -> bool:
        return math.isfinite(float(attributes.get("scalar", 0.0)))  # type: ignore[arg-type]

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return self.source([tile.read(index) for index in range(tile.inputs)], attributes)


class Add(Binary):
    """z = x + y."""

    name = "add"
    linear_in = ((0, 1),)
    symbol = "+"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [
            context.reduced(context.incoming, i) if need else None
            for i, need in enumerate(context.needs)
        ]


class Sub(Binary):
    """z = x - y."""

    name = "sub"
    linear_in = ((0, 1),)
    symbol = "-"

    def gradient(self, context: Gradient) -> list[str | None]:
        gradients: list[str | None] = []
        for i, need in enumerate(context.needs):
            negative = (i == 1) != bool(context.attributes.get("reversed"))
            incoming = context.incoming
            if need and negative:
                incoming = context.add("neg", incoming)
            gradients.append(context.reduced(incoming, i) if need else None)
        return gradients


class Mul(Binary):
    """z = x · y; dx = dz y, dy = dz x."""

    name = "mul"
    linear_in = ((0,), (1,))
    symbol = "*"

    def gradient(self, context: Gradient) -> list[str | None]:
        if "scalar" in context.attributes:
            scaled = context.add("mul", context.incoming, scalar=context.attributes["scalar"])
            return [context.reduced(scaled, 0)]
        gradients: list[str | None] = [None, None]
        for i in (0, 1):
            if context.needs[i]:
                scaled = context.add("mul", context.incoming, context.input(1 - i))
                gradients[i] = context.reduced(scaled, i)
        return gradients

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        if "scalar" in attributes:
            return ()
        return tuple(1 - i for i in (0, 1) if requires[i])


class Div(Binary):
    """z = x / y; dx = dz / y, dy = -dz z / y."""

    name = "div"
    symbol = "/"

    def result_dtype(self, promoted: str) -> str:
        return promoted if promoted in ("f64", "f32", "bf16", "f16") else "f32"

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = context.attributes
        if attributes.get("reversed"):
            # y = c / x; dx = -dy y / x
            product = context.add("mul", context.incoming, context.output())
            return [context.add("neg", context.add("div", product, context.input(0)))]
        if "scalar" in attributes:
            return [context.add("div", context.incoming, scalar=attributes["scalar"])]
        quotient = context.add("div", context.incoming, context.input(1))
        gradients: list[str | None] = [None, None]
        if context.needs[0]:
            gradients[0] = context.reduced(quotient, 0)
        if context.needs[1]:
            product = context.add("mul", quotient, context.output())
            gradients[1] = context.reduced(context.add("neg", product), 1)
        return gradients

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        if "scalar" in attributes:
            return (0,) if attributes.get("reversed") else ()
        return (0, 1) if requires[1] else (1,)


class UnaryBackward(Elementwise):
    """dx of a unary function, from dy and what the rule of the forward operator asks for."""

    inputs = (2, 2)
    template: ClassVar[str] = ""

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return self.template.format(*inputs, **attributes)


class SiluBackward(UnaryBackward):
    """dx = dy σ(x) (1 + x (1 - σ(x)))."""

    name = "silu_backward"
    template = "torch.ops.aten.silu_backward({0}, {1})"
    tile_template = "{0} * tl.sigmoid({1}) * (1.0 + {1} * (1.0 - tl.sigmoid({1})))"


class GeluBackward(UnaryBackward):
    """dx of gelu, from dy and x."""

    name = "gelu_backward"
    template = "torch.ops.aten.gelu_backward({0}, {1}, approximate={approximate!r})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        dy, x = tile.read(0), tile.read(1)
        if attributes["approximate"] == "tanh":
            half = tile.let("gelu_half", f"tl.sigmoid(2.0 * {_gelu_inner(x)})")
            slope = f"{_SQRT_2_OVER_PI!r} * (1.0 + {3 * _GELU_CUBED!r} * {x} * {x})"
            return f"{dy} * ({half} + 2.0 * {x} * {half} * (1.0 - {half}) * {slope})"
        area = f"0.5 * (1.0 + tl.erf({x} * {_SQRT_HALF!r}))"
        return f"{dy} * ({area} + {x} * {_SQRT_1_OVER_2_PI!r} * tl.exp(-0.5 * {x} * {x}))"


class TanhBackward(UnaryBackward):
    """dx = dy (1 - y²)."""

    name = "tanh_backward"
    template = "torch.ops.aten.tanh_backward({0}, {1})"
    tile_template = "{0} * (1.0 - {1} * {1})"


class SigmoidBackward(UnaryBackward):
    """dx = dy y (1 - y)."""

    name = "sigmoid_backward"
    template = "torch.ops.aten.sigmoid_backward({0}, {1})"
    tile_template = "{0} * {1} * (1.0 - {1})"


class ReluBackward(UnaryBackward):
    """dx = dy where the output was positive."""

    name = "relu_backward"
    template = "torch.ops.aten.threshold_backward({0}, {1}, 0)"
    tile_template = "tl.where({1} > 0.0, {0}, 0.0)"


class PackSigns(Operator):
    """Which elements are positive, eight in a byte: `[.., n]` gives u8 `[.., n / 8]`."""

    name = "pack_signs"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        size = int(types[0].shape[-1])
        if size % 8:
            raise TypeCheckError(f"pack_signs of {types[0]}: {size} is no multiple of 8")
        return (types[0].with_shape((*types[0].shape[:-1], size // 8)).with_dtype("u8"),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.pack_signs({inputs[0]})"


class ReluBackwardPacked(UnaryBackward):
    """dx = dy where the output was positive, from its packed signs."""

    name = "relu_backward_packed"
    template = "K.relu_backward_packed({0}, {1})"
    has_template = True

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        byte = tile.read(1, f"({tile.column}) // 8")
        return f"tl.where((({byte} >> (({tile.column}) % 8)) & 1) != 0, {tile.read(0)}, 0.0)"


class ClampBackward(UnaryBackward):
    """dx = dy where x was within the bounds."""

    name = "clamp_backward"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dy, x = inputs
        tests = []
        if "min" in attributes:
            tests.append(f"({x} >= {attributes['min']})")
        if "max" in attributes:
            tests.append(f"({x} <= {attributes['max']})")
        return " * ".join([dy, *tests])

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        dy, x = tile.read(0), tile.read(1)
        tests = [f"({x} >= {attributes['min']!r})"] if "min" in attributes else []
        tests += [f"({x} <= {attributes['max']!r})"] if "max" in attributes else []
        return f"tl.where({' & '.join(tests)}, {dy}, 0.0)"


class Pointwise(Operator):
    """An operator outside the table that PyTorch tags pointwise, carried as it is.

    `target` is its overload, `arguments` its argument list with {0} for the tensor, and its
    gradient is PyTorch's own.
    """

    name = "pointwise"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[0].with_dtype(str(attributes["dtype"])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        arguments = str(attributes["arguments"]).format(inputs[0])
        return f"torch.ops.{attributes['target']}({arguments})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = {k: v for k, v in context.attributes.items() if k != "dtype"}
        dx = context.add("pointwise_backward", context.incoming, context.input(0), **attributes)
        return [context.cast(dx, context.input_type(0).dtype)]

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        return (0,)


class PointwiseBackward(Operator):
    """dx of a pointwise operator, by PyTorch's autograd."""

    name = "pointwise_backward"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[1],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        arguments = str(attributes["arguments"]).format("x")
        function = f"lambda x: torch.ops.{attributes['target']}({arguments})"
        return f"torch.func.vjp({function}, {inputs[1]})[1]({inputs[0]})[0]"


OPERATORS: tuple[Operator, ...] = (
    Add(),
    Cast(),
    Clamp(),
    ClampBackward(),
    Cos(),
    Div(),
    Exp(),
    Gelu(),
    GeluBackward(),
    Mul(),
    Neg(),
    PackSigns(),
    Pointwise(),
    PointwiseBackward(),
    Pow(),
    Relu(),
    ReluBackward(),
    ReluBackwardPacked(),
    Rsqrt(),
    Sigmoid(),
    SigmoidBackward(),
    Silu(),
    SiluBackward(),
    Sin(),
    Sqrt(),
    Sub(),
    Tanh(),
    TanhBackward(),
)
