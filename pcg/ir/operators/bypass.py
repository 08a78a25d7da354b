"""Operators of bypass networks other than products and vectors: dropout, and bottlenecks.

They take *adapter* parameters, like those of `lora`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.graph import Attribute
from pcg.ir.operators.base import (
    DTYPE,
    FLAG,
    NATURAL,
    Aligned,
    Attributes,
    Bounds,
    Gradient,
    Kind,
    Operator,
    Types,
    cast_bytes,
    declared,
    optional,
    word,
)
from pcg.ir.operators.linear import Product, weight_name
from pcg.ir.types import DTYPE_BYTES, TOKENS, TORCH_NAMES

DROPOUT_TOKENS = 64
"""Tokens of a sequence that share a draw of dropout's random numbers, so that a token's numbers do
not depend on the windows of its sequence."""


class Dropout(Operator):
    """y = x · mask / (1 - p): each element is dropped with probability p, only in training.

    The mask's generator is seeded by the step's batch, the layer and `key`, unique within the
    layer. Backward therefore redraws the mask, and neither it nor y is saved; the gradient is the
    operator itself with the same key. `dtype` is y's, if it differs from x's.
    """

    name = "dropout"
    attributes = declared(
        p=Kind("a float with 0 < p <= 1", lambda p: type(p) is float and 0 < p <= 1),
        key=NATURAL,
        dtype=optional(DTYPE),
    )
    bounded_in = Bounds({0: "e / (1 - p)"})
    is_random = True
    linear_in = ((0,),)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if not types[0].is_token_wise:
            raise TypeCheckError(f"dropout of {types[0]}, which has no tokens")
        return (types[0].with_dtype(attributes.get("dtype", types[0].dtype)),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        x = inputs[0]
        if "dtype" in attributes:
            x = f"{x}.to(torch.{TORCH_NAMES[attributes['dtype']]})"
        return f"K.dropout(batch, {x}, {attributes['p']}, {attributes['key']})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The copy with dropped elements, and a block with some rows of other chunks.
        row_bytes = outputs[0].size_bytes.subs(TOKENS, 1)
        return cast_bytes(inputs[0], outputs[0].dtype) + DROPOUT_TOKENS * row_bytes

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = {name: context.attributes[name] for name in ("p", "key")}
        dx = context.add("dropout", context.incoming, **attributes)
        return [context.cast(dx, context.input_type(0).dtype)]


class Activate(Operator):
    """h = σ(s + scale · d) in a bottleneck: `s: [T, size]`, `d: [size]`; `function` names σ."""

    name = "activate"
    template = "K.activate({inputs}, {function!r})"
    inputs = (2, 2)
    gradients: ClassVar[Mapping[str, tuple[str, dict[str, Attribute]]]] = {
        "gelu": ("gelu_backward", {"approximate": "none"}),
        "gelu_new": ("gelu_backward", {"approximate": "tanh"}),
        "relu": ("relu_backward", {}),
        "silu": ("silu_backward", {}),
        "tanh": ("tanh_backward", {}),
    }
    """σ -> the operator of its input gradient, and that operator's attributes."""
    attributes = declared(function=word(*gradients))

    def infer(self, types: Types, attributes: Attributes) -> Types:
        s, bias = types
        if len(s.dims) != 2 or bias.shape != s.shape[1:]:
            raise TypeCheckError(f"activate of {s} with {bias}; expected [{s.shape[-1]}]")
        return (s,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, -1), (-1,)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return outputs[0].size_bytes  # the function's argument

    def gradient(self, context: Gradient) -> list[str | None]:
        op, attributes = self.gradients[context.attributes["function"]]
        if op == "tanh_backward":
            argument = context.output()
        else:
            argument = context.add("bias_add", context.input(0), context.input(1))
        ds = context.add(op, context.incoming, argument, **attributes)
        dtype = context.input_type(1).dtype
        dbias = context.add("sum_tokens", ds, context.input(1), dtype=dtype)
        return [ds if context.needs[0] else None, dbias if context.needs[1] else None]


class Replaced(Operator):
    """y [T, …, n] with f(x) in the rows of adapters that have a weight W of their own; it serves.

    f is x Wᵀ + b (`linear`), W[x] (`embedding`), or x ⊙ W + b (`scale`), with `offset` x ⊙ (1 + W);
    b: [n], the base's, may be missing. `x: [T, m]`, ids [T], or as y; `W: [n, m]`, [V, n], [n].
    """

    name = "replaced"
    template = "K.{name}({inputs}, function={function!r}, offset={offset!r})"
    attributes = declared(function=word("linear", "embedding", "scale"), offset=FLAG)
    inputs = (3, 4)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, x, weight, *biases = types
        function, size = attributes["function"], y.shape[-1:]
        fits = y.is_token_wise and x.is_token_wise and all(b.shape == size for b in biases)
        fits &= len(y.dims) == 2 or (len(y.dims) > 2 and function == "scale")
        if function == "linear":
            fits &= len(x.dims) == 2 and weight.shape == (*size, *x.shape[1:])
        elif function == "embedding":
            fits &= len(weight.dims) == 2 and weight.shape[1:] == size and not biases
            fits &= not x.is_float and len(x.dims) == 1
        else:
            fits &= x.shape == y.shape and weight.shape == size
        if not fits:
            raise TypeCheckError(f"replaced by {function} of {', '.join(map(str, types))}")
        return (y,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        for dim in range(-len(types[0].features), -1):
            yield (dim, dim, *(0 for _ in types[2:])), (dim,)
        dims = {"linear": (-1, 0, -2), "embedding": (-1, 0, -1), "scale": (-1, -1, -1)}
        yield (*dims[attributes["function"]], *(-1 for _ in types[3:])), (-1,)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        is_product = attributes["function"] == "linear"
        return outputs[0].elements * (2 * inputs[1].shape[-1] if is_product else 1)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The input and results in the weight's dtype, of all tokens at most; y is no new tensor.
        y, x, weight, *biases = inputs
        results = (1 + len(biases)) * y.elements * DTYPE_BYTES[weight.dtype] - y.size_bytes
        is_cast = attributes["function"] != "embedding"
        return results + (cast_bytes(x, weight.dtype) if is_cast else 0)


class BottleneckBackward(Product):
    """The gradients of a bottleneck adapter from its inner size on; in programs for Triton.

    With h = σ(s + scale · d): ds = σ'(s + scale · d) ⊙ (scale · dz U), dU = scale · dzᵀ h, and dd =
    scale · Σ ds. `dz: [T, out]`, `U: [out, size]`, `s: [T, size]`, `d: [size]`; `function` names σ.
    """

    name = "bottleneck_backward"
    attributes = Activate.attributes
    inputs = (4, 4)
    suffixes = ("s", "up", "bias")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, up, s, bias = types
        (h,) = Activate().infer((s, bias), attributes)
        if up.shape != (dz.shape[-1], h.shape[-1]) or dz.shape[:-1] != s.shape[:-1]:
            raise TypeCheckError(f"bottleneck_backward of {dz} by {up} and {s}")
        return s, up, bias

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        name, arguments = weight_name(inputs[1]), ", ".join(inputs)
        function = attributes["function"]
        return f'yield from K.bottleneck_backward(batch, "{name}", {arguments}, {function!r})'

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 4 * inputs[0].elements * inputs[1].shape[-1]
