"""Operators of bypass networks beside LoRA's products, which stand in `linear`.

Like those they take *adapter* parameters, and in a batch of many adapters each token is treated by
its own adapter; a token whose adapter has no parameter at the site passes unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.graph import Attribute
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Sharding, partitioned, sharding
from pcg.ir.operators.operator import Aligned, Attributes, Gradient, Operator, Types
from pcg.ir.types import TORCH_NAMES


class Dropout(Operator):
    """y = x · mask / (1 - p): each element is dropped with probability p, in training alone.

    The mask is drawn from a generator seeded by the step's batch, the layer and `key`, which no
    other dropout of the layer has. So backward draws it again, and neither it nor y is kept; the
    gradient is the operator itself with the same key. `dtype` is y's, where it is not x's.
    """

    name = "dropout"
    is_random = True
    linear_in = ((0,),)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if not types[0].is_token_wise:
            raise TypeCheckError(f"dropout of {types[0]}, which has no tokens")
        if not 0.0 < float(attributes["p"]) <= 1.0:  # type: ignore[arg-type]
            raise TypeCheckError(f"dropout with p={attributes['p']}; expected 0 < p <= 1")
        return (types[0].with_dtype(str(attributes.get("dtype", types[0].dtype))),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        x = inputs[0]
        if "dtype" in attributes:
            x = f"{x}.to(torch.{TORCH_NAMES[str(attributes['dtype'])]})"
        return f"K.dropout(batch, {x}, {attributes['p']}, {attributes['key']})"

    def gradient(self, context: Gradient) -> list[str | None]:
        attributes = {name: context.attributes[name] for name in ("p", "key")}
        dx = context.add("dropout", context.incoming, **attributes)
        return [context.cast(dx, context.input_type(0).dtype)]


class Scale(Operator):
    """z = l ⊙ (y - b) + b, in y's dtype: each token by its own adapter's l.

    `y: [T, n]`, `l: [n]`; `b: [n]`, what is not scaled, may be missing.
    """

    name = "scale"
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, *vectors = types
        if len(y.dims) != 2 or any(vector.shape != y.shape[1:] for vector in vectors):
            raise TypeCheckError(
                f"scale of {y} by {', '.join(map(str, vectors))}; expected [{y.shape[-1]}]"
            )
        return (y,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.scale({', '.join(inputs)})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1,) * len(types), (-1,)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        base = (PRE_REDUCE,) * (len(types) - 2)
        yield sharding(PRE_REDUCE, REPLICATED, *base, PRE_REDUCE)
        if not base:
            yield sharding(REPLICATED, PRE_REDUCE, PRE_REDUCE)

    def gradient(self, context: Gradient) -> list[str | None]:
        dy = dvector = None
        if context.needs[0]:
            dy = context.add("scale", context.incoming, context.input(1))
        if context.needs[1]:
            dtype = context.input_type(1).dtype
            read = [context.input(0), *(context.input(2) for _ in context.node.inputs[2:])]
            dvector = context.add("inner", context.incoming, *read, dtype=dtype)
        return [dy, dvector, None][: len(context.node.inputs)]


class Inner(Operator):
    """dl = Σ dz ⊙ (y - b) over the adapter's tokens: `dz: [T, n]`, `y: [T, n]` give `[n]`.

    `b: [n]` may be missing.
    """

    name = "inner"
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        left, right = types[:2]
        if left.shape != right.shape or len(left.dims) != 2:
            raise TypeCheckError(f"inner of {left} and {right}")
        return (left.with_shape(left.shape[1:]).with_dtype(str(attributes["dtype"])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dtype = TORCH_NAMES[str(attributes["dtype"])]
        return f"K.inner({', '.join(inputs)}).to(torch.{dtype})"


class AskedInner(Inner):
    """An inner product that the caller runs, for what the attribute `of` names; for Triton."""

    name = "asked_inner"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        called = f"K.asked_inner(batch, {attributes['of']!r}, {', '.join(inputs)})"
        return f"(yield from {called}).to(torch.{TORCH_NAMES[str(attributes['dtype'])]})"


class ColumnNorm(Operator):
    """n = ||W + scale · B A||, the length of each output's weights (DoRA §4).

    `W: [out, in]`, `A: [r, in]`, `B: [out, r]` give `[out]` in A's dtype. It is taken for a
    constant: no gradient flows through it (DoRA §4.3).
    """

    name = "column_norm"
    is_product = True
    constant_in = (0, 1, 2)
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        weight, a, b = types
        if (b.shape[0], a.shape[1]) != weight.shape or a.shape[0] != b.shape[1]:
            raise TypeCheckError(f"column_norm of {weight} with {a} and {b}")
        return (a.with_shape((weight.shape[0],)),)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        # Rows make entries of their own; sums over parted columns are joined. As there is no
        # gradient, what is not parted may be held either way.
        for held in (WHOLE, REPLICATED):
            yield sharding(partitioned(-2), held, partitioned(-2), partitioned(-1))
            for given in (WHOLE, REPLICATED):
                columns = (partitioned(-1), partitioned(-1), held)
                yield Sharding(columns, (given,), "column_norm_part")

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.column_norm({', '.join(inputs)})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [None, None, None]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[0].elements * inputs[1].shape[0]


class ColumnFactor(Operator):
    """f = m / n, DoRA's factor of each output: `m: [out]` the magnitude, `n: [out]` the length."""

    name = "column_factor"
    inputs = (2, 2)
    constant_in = (1,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if types[0].shape != types[1].shape:
            raise TypeCheckError(f"column_factor of {types[0]} and {types[1]}")
        return (types[0],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.column_factor({', '.join(inputs)})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, -1), (-1,)

    def gradient(self, context: Gradient) -> list[str | None]:
        return [context.add("div", context.incoming, context.input(1)), None]


class VeraDown(Operator):
    """A site's A: the first `size` columns of the shared matrix, which is not trained (VeRA §3)."""

    name = "vera_down"
    is_view = True
    constant_in = (0,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (whole,) = types
        size = int(attributes["size"])  # type: ignore[arg-type]
        if len(whole.dims) != 2 or not 0 < size <= int(whole.shape[1]):
            raise TypeCheckError(f"vera_down of {whole} to {size} columns")
        return (whole.with_shape((whole.shape[0], size)),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.vera_down({inputs[0]}, {attributes['size']})"

    def gradient(self, context: Gradient) -> list[str | None]:
        return [None]


class VeraUp(Operator):
    """A site's B: the first rows of the shared matrix, λ_b ⊙ B ⊙ λ_d (VeRA §3).

    `B: [largest out, r]`, which is not trained, `λ_b: [out]`, `λ_d: [r]` give `[out, r]`.
    """

    name = "vera_up"
    inputs = (3, 3)
    constant_in = (0,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        whole, lambda_b, lambda_d = types
        out, rank = (vector.shape[0] for vector in (lambda_b, lambda_d))
        if len(whole.dims) != 2 or int(whole.shape[0]) < int(out) or whole.shape[1] != rank:
            raise TypeCheckError(f"vera_up of {whole} by {lambda_b} and {lambda_d}")
        return (whole.with_shape((out, rank)),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.vera_up({', '.join(inputs)})"

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        vectors = sympy.Add(*(type_.size_bytes for type_ in inputs[1:]))
        return vectors + 2 * outputs[0].size_bytes  # of the shared matrix the site's rows

    def gradient(self, context: Gradient) -> list[str | None]:
        inputs = [context.input(i) for i in range(3)]
        return [None, *context.add_many("vera_up_backward", context.incoming, *inputs)]


class VeraUpBackward(Operator):
    """dλ_b and dλ_d: the rows' and the columns' sums of dB' ⊙ B, weighted by the other vector."""

    name = "vera_up_backward"
    inputs = (4, 4)
    suffixes = ("d",)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        gradient, whole, lambda_b, lambda_d = types
        if VeraUp().infer((whole, lambda_b, lambda_d), {})[0].shape != gradient.shape:
            raise TypeCheckError(f"gradient {gradient} does not fit {lambda_b} and {lambda_d}")
        return lambda_b, lambda_d

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.vera_up_backward({', '.join(inputs)})"

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        vectors = sympy.Add(*(type_.size_bytes for type_ in (*inputs[2:], *outputs)))
        return vectors + 2 * inputs[0].size_bytes  # of the shared matrix the site's rows


class SingularDown(Operator):
    """AdaLoRA's A with its singular values: `A: [r, in]`, `E: [r, 1]` give E ⊙ A, `[r, in]`."""

    name = "singular_down"
    inputs = (2, 2)
    linear_in = ((0,), (1,))

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-2, -2), (-2,)
        yield (-1, 0), (-1,)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        a, e = types
        if len(a.dims) != 2 or e.shape != (a.shape[0], 1):
            raise TypeCheckError(f"singular_down of {a} by {e}; expected [{a.shape[0]}, 1]")
        return (a,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.singular_down({', '.join(inputs)})"

    def gradient(self, context: Gradient) -> list[str | None]:
        inputs = [context.input(i) for i in range(2)]
        return [*context.add_many("singular_down_backward", context.incoming, *inputs)]


class SingularDownBackward(Operator):
    """dA = E ⊙ dA', and dE, the rows' sums of A ⊙ dA'."""

    name = "singular_down_backward"
    inputs = (3, 3)
    suffixes = ("e",)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        gradient, a, e = types
        if SingularDown().infer((a, e), {})[0].shape != gradient.shape:
            raise TypeCheckError(f"gradient {gradient} does not fit {a} and {e}")
        return a, e

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.singular_down_backward({', '.join(inputs)})"


class Activate(Operator):
    """h = σ(s + scale · d) in a bottleneck: `s: [T, size]`, `d: [size]`; `function` names σ."""

    name = "activate"
    inputs = (2, 2)
    gradients: ClassVar[Mapping[str, tuple[str, dict[str, Attribute]]]] = {
        "gelu": ("gelu_backward", {"approximate": "none"}),
        "gelu_new": ("gelu_backward", {"approximate": "tanh"}),
        "relu": ("relu_backward", {}),
        "silu": ("silu_backward", {}),
        "tanh": ("tanh_backward", {}),
    }
    """σ -> the operator of its input gradient, and that one's attributes."""

    def infer(self, types: Types, attributes: Attributes) -> Types:
        s, bias = types
        if len(s.dims) != 2 or bias.shape != s.shape[1:]:
            raise TypeCheckError(f"activate of {s} with {bias}; expected [{s.shape[-1]}]")
        if attributes["function"] not in self.gradients:
            raise TypeCheckError(f"activate has no function {attributes['function']!r}")
        return (s,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.activate({', '.join(inputs)}, {attributes['function']!r})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, -1), (-1,)

    def gradient(self, context: Gradient) -> list[str | None]:
        op, attributes = self.gradients[str(context.attributes["function"])]
        if op == "tanh_backward":
            argument = context.output()
        else:
            argument = context.add("bias_add", context.input(0), context.input(1))
        ds = context.add(op, context.incoming, argument, **attributes)
        dtype = context.input_type(1).dtype
        dbias = context.add("sum_tokens", ds, context.input(1), dtype=dtype)
        return [ds if context.needs[0] else None, dbias if context.needs[1] else None]


class BottleneckBackward(Operator):
    """The gradients of a bottleneck adapter from its width on; in programs for Triton.

    With h = σ(s + scale · d): ds = σ'(s + scale · d) ⊙ (scale · dz U), dU = scale · dzᵀ h, and
    dd = scale · Σ ds. `dz: [T, out]`, `U: [out, size]`, `s: [T, size]`, `d: [size]`; `function`
    names σ.
    """

    name = "bottleneck_backward"
    is_product = True
    inputs = (4, 4)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, up, s, bias = types
        (h,) = Activate().infer((s, bias), attributes)
        if up.shape != (dz.shape[-1], h.shape[-1]):
            raise TypeCheckError(f"bottleneck_backward of {dz} by {up} and {s}")
        return s, up, bias

    def output_suffixes(self, count: int) -> tuple[str, ...]:
        return ("s", "up", "bias")

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dz, up, *rest = inputs
        called = f'K.bottleneck_backward(batch, "{up.rpartition(".")[2]}", {dz}, {up}'
        return f"yield from {called}, {', '.join(rest)}, {attributes['function']!r})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 4 * inputs[0].elements * inputs[1].shape[-1]


OPERATORS: tuple[Operator, ...] = (
    Activate(),
    AskedInner(),
    BottleneckBackward(),
    ColumnFactor(),
    ColumnNorm(),
    Dropout(),
    Inner(),
    Scale(),
    SingularDown(),
    SingularDownBackward(),
    VeraDown(),
    VeraUp(),
    VeraUpBackward(),
)
