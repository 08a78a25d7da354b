"""Elementwise operators: unary functions, casts, arithmetic with broadcasting, activations."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from string import Formatter
from typing import ClassVar

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import (
    DTYPE,
    FLAG,
    FLOAT,
    NATURAL,
    NUMBER,
    SIZES,
    Aligned,
    Attributes,
    Bounds,
    Gradient,
    Kind,
    Operator,
    Tile,
    Types,
    broadcast_dims,
    check_gradient,
    declared,
    optional,
    same_dims,
    word,
)
from pcg.ir.types import TORCH_NAMES, broadcast, result_dtype, tensor


class Elementwise(Operator):
    """An operator whose element depends on the same element of each input."""

    tile_template: ClassVar[str] = ""
    """An element in Triton."""

    def tiles(self, attributes: Attributes) -> bool:
        return bool(self.tile_template) or type(self).tile is not Elementwise.tile

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return self.tile_template.format(*(tile.read(index) for index in range(tile.inputs)))


class Unary(Elementwise):
    """y = f(x); `template` is f in PyTorch."""

    reads_output: ClassVar[bool] = False
    """True if its gradient reads y instead of x."""

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])

    def gradient(self, context: Gradient) -> list[str | None]:
        """The operator named `{name}_backward` of dy and of y or x."""
        read = context.output() if self.reads_output else context.input(0)
        op = f"{self.name}_backward"
        return [context.add(op, context.incoming, read, **context.attributes)]


class UnaryBackward(Elementwise):
    """dx of a unary function, from dy and the value that the forward's rule reads."""

    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        check_gradient(*types)
        return (types[0],)


class Neg(Unary):
    """y = -x."""

    name = "neg"
    bounded_in = Bounds({0: "e"})
    linear_in = ((0,),)
    template = tile_template = "-{0}"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("neg", context.incoming)]


class Exp(Unary):
    """y = eˣ; dx = dy y."""

    name = "exp"
    template = "torch.exp({0})"
    tile_template = "tl.exp({0})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("mul", context.incoming, context.output())]


class Rsqrt(Unary):
    """y = 1 / √x; dx = -dy y³ / 2."""

    name = "rsqrt"
    template = "torch.rsqrt({0})"
    tile_template = "tl.rsqrt({0})"

    def gradient(self, context: Gradient) -> list[str | None]:
        cubed = context.add("pow", context.output(), exponent=3.0)
        slope = context.add("mul", cubed, scalar=-0.5)
        return [context.add("mul", context.incoming, slope)]


class Sqrt(Unary):
    """y = √x; dx = dy / (2 y)."""

    name = "sqrt"
    template = "torch.sqrt({0})"
    tile_template = "tl.sqrt({0})"

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


class Clamp(Unary):
    """y = min(max(x, min), max); a missing bound is no bound."""

    name = "clamp"
    attributes = declared(min=optional(NUMBER), max=optional(NUMBER))

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if not attributes.keys() & {"min", "max"}:
            raise TypeCheckError("clamp has neither the attribute min nor max")
        return types

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"torch.clamp({inputs[0]}, {attributes.get('min')}, {attributes.get('max')})"

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        x = tile.read(0)
        if "min" in attributes:
            x = f"tl.maximum({x}, {attributes['min']!r})"
        return f"tl.minimum({x}, {attributes['max']!r})" if "max" in attributes else x


class ClampBackward(UnaryBackward):
    """dx = dy where x was within the bounds."""

    name = "clamp_backward"
    attributes = Clamp.attributes

    def infer(self, types: Types, attributes: Attributes) -> Types:
        Clamp().infer(types[1:], attributes)
        return super().infer(types, attributes)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dy, x = inputs
        return " * ".join([dy, *self._tests(x, attributes)])

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        dy, x = tile.read(0), tile.read(1)
        return f"tl.where({' & '.join(self._tests(x, attributes))}, {dy}, 0.0)"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The second test's booleans, and the first test's copy of dy.
        dx = outputs[0]
        return dx.elements + (len(self._tests("x", attributes)) - 1) * dx.size_bytes

    @staticmethod
    def _tests(x: str, attributes: Attributes) -> list[str]:
        bounds = (("min", ">="), ("max", "<="))
        return [f"({x} {sign} {attributes[b]!r})" for b, sign in bounds if b in attributes]


class Pow(Unary):
    """y = x ** exponent, with a constant exponent."""

    name = "pow"
    attributes = declared(exponent=FLOAT)
    template = "torch.pow({0}, {exponent})"

    def tiles(self, attributes: Attributes) -> bool:
        return attributes["exponent"] in _POWERS

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return _POWERS[float(attributes["exponent"])].format(tile.read(0))

    def gradient(self, context: Gradient) -> list[str | None]:
        exponent = float(context.attributes["exponent"])
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
"""Powers that are a few products; PyTorch computes other powers by exp and log."""


class Cast(Unary):
    """The same numbers in another dtype."""

    name = "cast"
    attributes = declared(dtype=DTYPE)
    bounded_in = Bounds({0: "e"})
    tile_template = "{0}"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[0].with_dtype(attributes["dtype"]),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"{inputs[0]}.to(torch.{TORCH_NAMES[attributes['dtype']]})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.cast(context.incoming, context.input_type(0).dtype)]


def _takes_tensors(arguments: object) -> bool:
    """Return whether a template has the tensors {0}, {1} and so on, and no other field."""
    if not isinstance(arguments, str):
        return False
    try:
        fields = {field for _, field, _, _ in Formatter().parse(arguments) if field is not None}
    except ValueError:
        return False
    return bool(fields) and fields == {str(place) for place in range(len(fields))}


_TARGET = Kind(
    "an overload of PyTorch, as aten.elu.default",
    lambda value: isinstance(value, str) and re.fullmatch(r"\w+\.\w+\.\w+", value) is not None,
)
_ARGUMENTS = Kind("a list of arguments with {0} for the first tensor", _takes_tensors)


class Carried(Operator):
    """An operator outside the table, carried unchanged, with PyTorch's gradient.

    `target` is its overload, `arguments` its argument list with {0} for the first tensor.
    """

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"torch.ops.{attributes['target']}({attributes['arguments'].format(*inputs)})"

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = {
            key: value
            for key, value in context.attributes.items()
            if key in CarriedBackward.attributes
        }

        def of(place: int) -> str:
            inputs = (context.incoming, *context.inputs)
            return context.add("carried_backward", *inputs, place=place, **attributes)

        return [of(place) if need else None for place, need in enumerate(context.needs)]


class Pointwise(Carried):
    """An operator that PyTorch tags pointwise, on up to three tensors with broadcasting."""

    name = "pointwise"
    attributes = declared(target=_TARGET, arguments=_ARGUMENTS, dtype=DTYPE)
    inputs = (1, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        shape = functools.reduce(broadcast, (type_.shape for type_ in types))
        return (tensor(attributes["dtype"], *shape),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return broadcast_dims(types, self.infer(types, attributes)[0])


class Rowwise(Carried):
    """An operator over feature dims of a tensor, counted from the end in `arguments`.

    `reads` are the feature dims of its first input, `features` those of the result. A second input
    has places in these dims, as of `scatter`.
    """

    name = "rowwise"
    attributes = declared(
        target=_TARGET, arguments=_ARGUMENTS, dtype=DTYPE, reads=SIZES, features=SIZES
    )
    inputs = (1, 2)
    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if types[0].features != attributes["reads"]:
            raise TypeCheckError(f"{types[0]} has not the features {attributes['reads']}")
        tokens = types[0].shape[: int(types[0].is_token_wise)]
        return (tensor(attributes["dtype"], *tokens, *attributes["features"]),)


class CarriedBackward(Operator):
    """The gradient of a carried operator's input `place`, by PyTorch's autograd."""

    name = "carried_backward"
    attributes = declared(
        target=_TARGET, arguments=_ARGUMENTS, place=NATURAL, features=optional(SIZES)
    )
    inputs = (2, 4)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, *inputs = types
        if attributes["place"] >= len(inputs):
            raise TypeCheckError(f"{len(inputs)} inputs have none at place {attributes['place']}")
        dx = inputs[attributes["place"]]
        if "features" in attributes:
            shape = (*dx.shape[: int(dx.is_token_wise)], *attributes["features"])
        else:
            shape = functools.reduce(broadcast, (type_.shape for type_ in inputs))
        check_gradient(dy, dy.with_shape(shape))
        if not (dy.is_float and dx.is_float):
            raise TypeCheckError(f"{dx} has no gradient by {dy}")
        return (dx,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dy, *arguments = inputs
        place, name = attributes["place"], "value"
        while name in arguments:
            name += "_"
        x, arguments[place] = arguments[place], name
        function = f"lambda {name}: {Carried().source(arguments, attributes)}"
        return f"torch.func.vjp({function}, {x})[1]({dy})[0]"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return inputs[0].size_bytes  # y


class Detach(Unary):
    """y = x, through which no gradient flows."""

    name = "detach"
    constant_in = (0,)
    template = "{0}.detach()"
    is_view = True

    def gradient(self, context: Gradient) -> list[str | None]:
        return [None]


class Binary(Operator):
    """x ∘ y with broadcasting, or x ∘ scalar; with `reversed`, scalar ∘ x."""

    attributes = declared(scalar=optional(NUMBER), reversed=optional(FLAG))
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
        return promoted

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        left, right = inputs[0], inputs[1] if len(inputs) == 2 else repr(attributes["scalar"])
        if attributes.get("reversed"):
            left, right = right, left
        return f"{left} {self.symbol} {right}"

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
    bounded_in = Bounds({0: "|y| e", 1: "|x| e"})
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


# -------------------------------------------------------------------------------------- activations


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
