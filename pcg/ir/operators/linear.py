"""Matrix products: the base model's, and those of low-rank bypass networks.

A bypass network's operators take *adapter* parameters. In a batch of many adapters each token uses
its own adapter's weights (segmented products: Punica §4, S-LoRA §5.3), and the scale α/r belongs to
the adapter, so it appears in no attribute.

Long because it is a table: one class an operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, Sharding, partitioned, sharding
from pcg.ir.operators.operator import (
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    cast_bytes,
)
from pcg.ir.types import TORCH_NAMES, TensorType

_CONTRACTED = (partitioned(-1), partitioned(-1))
"""x [.., in] and W [out, in], of a product that sums over parts of `in`."""


def _output_dim(types: Types) -> Aligned:
    """Rows of W, and entries of a bias, make entries of the output."""
    return (0, -2, *(-1,) * (len(types) - 2)), (-1,)


class Linear(Operator):
    """y = x Wᵀ (+ b): `x: [T, in]`, `W: [out, in]`, `b: [out]`."""

    name = "linear"
    is_product = True
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, weight = types[:2]
        if len(weight.dims) != 2 or weight.is_token_wise or x.shape[-1:] != weight.shape[1:]:
            raise TypeCheckError(
                f"linear of {x} by a weight {weight}; expected [out, {x.shape[-1]}]"
            )
        if len(types) == 3 and types[2].shape != weight.shape[:1]:
            raise TypeCheckError(f"linear has weight {weight} but bias {types[2]}")
        return (x.with_shape((*x.shape[:-1], weight.shape[0])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.linear({', '.join(inputs)})"

    def asked_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        (x, weight, *biases) = inputs
        return f"({_asked(x, [weight], biases)})[0]"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield _output_dim(types)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        # Summands of the product, and of the bias, which one rank has and the others have as 0.
        bias = (PRE_REDUCE,) * (len(types) - 2)
        for product in (_CONTRACTED, (PRE_REDUCE, REPLICATED), (REPLICATED, PRE_REDUCE)):
            yield sharding(*product, *bias, PRE_REDUCE)
        for dim in range(-len(types[0].features), -1):
            yield sharding(partitioned(dim), *(REPLICATED,) * (len(types) - 1), partitioned(dim))

    def gradient(self, context: Gradient) -> list[str | None]:
        dy, needs = context.incoming, (*context.needs, False)
        dx = dweight = dbias = None
        if needs[0]:
            dx = context.add("linear_backward", dy, context.input(1))
        if needs[1]:
            dweight = context.add("outer", dy, context.input(0))
        if needs[2]:
            dbias = context.add("sum_tokens", dy, dtype=context.input_type(2).dtype)
        return [dx, dweight, dbias][: len(context.node.inputs)]

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        return (0,) * requires[1] + (1,) * requires[0]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * outputs[0].elements * inputs[0].shape[-1]


def _asked(x: str, weights: Sequence[str], biases: Sequence[str], *rest: str) -> str:
    """A product that the caller runs, by the name of its first weight."""
    arguments = ["batch", f'"{_name(weights[0])}"', x, _tuple(weights)]
    arguments += [_tuple(biases)] if biases else []
    return f"yield from K.product({', '.join([*arguments, *rest])})"


def _name(weight: str) -> str:
    """Of a weight in its layer."""
    return weight.rpartition(".")[2]


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


class LinearGroup(Operator):
    """Linear operators of one input as one product: y_i = x W_iᵀ (+ b_i).

    Inputs: x, the `count` weights, then their biases where `bias`.
    """

    name = "linear_group"
    is_product = True
    inputs = (3, 65)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        count = int(attributes["count"])  # type: ignore[arg-type]
        if len(types) != 1 + count * (2 if attributes["bias"] else 1):
            raise TypeCheckError(f"linear_group has {len(types)} inputs and {dict(attributes)}")
        groups = [(types[0], *types[1 + i :: count]) for i in range(count)]
        return tuple(out for group in groups for out in Linear().infer(group, {}))

    def output_suffixes(self, count: int) -> tuple[str, ...]:
        return ("", *(str(i) for i in range(1, count)))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        count = int(attributes["count"])  # type: ignore[arg-type]
        weights = ", ".join(inputs[1 : 1 + count])
        biases = ", ".join(inputs[1 + count :])
        return f"K.linear_group({inputs[0]}, ({weights})" + (f", ({biases}))" if biases else ")")

    def asked_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        count = int(attributes["count"])  # type: ignore[arg-type]
        return _asked(inputs[0], inputs[1 : 1 + count], inputs[1 + count :])

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * sum(out.elements for out in outputs) * inputs[0].shape[-1]


class LoraLinear(Operator):
    """Linear operators of one input with their LoRA: z_i = x W_iᵀ (+ b_i) + scale · (x A_iᵀ) B_iᵀ.

    Inputs: x, the `count` weights, their biases where `bias`, then all A, then all B. Where some
    outputs have no LoRA, `adapted` are the indices of those that have, and A and B are theirs.
    """

    name = "lora_linear"
    is_product = True
    inputs = (4, 129)
    returns_sequence = True

    @staticmethod
    def adapted(attributes: Attributes) -> tuple[int, ...]:
        """Indices of the outputs that have LoRA."""
        count = int(attributes["count"])  # type: ignore[arg-type]
        found = attributes.get("adapted", tuple(range(count)))
        if not isinstance(found, tuple) or sorted({*range(count)}.intersection(found)) != [*found]:
            raise TypeCheckError(
                f"lora_linear has adapted={found}; expected some of 0 to {count - 1}, in order"
            )
        return found

    def infer(self, types: Types, attributes: Attributes) -> Types:
        count, x = int(attributes["count"]), types[0]  # type: ignore[arg-type]
        bases = 2 * count if attributes["bias"] else count
        adapted = self.adapted(attributes)
        if not adapted or len(types) != 1 + bases + 2 * len(adapted):
            raise TypeCheckError(f"lora_linear has {len(types)} inputs and {dict(attributes)}")
        outs: list[TensorType] = []
        for i in range(count):
            outs += Linear().infer((x, *types[1 + i : 1 + bases : count]), {})
        a, b = types[-2 * len(adapted) : -len(adapted)], types[-len(adapted) :]
        for i, own_a, own_b in zip(adapted, a, b, strict=True):
            (s,) = Shrink().infer((x, own_a), {})
            (outs[i],) = ExpandAdd().infer((outs[i], s, own_b), {})
        return tuple(outs)

    def output_suffixes(self, count: int) -> tuple[str, ...]:
        return ("", *(str(i) for i in range(1, count)))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        groups = ", ".join(_tuple(group) for group in self._groups(inputs, attributes))
        return f"K.lora_linear({inputs[0]}, {groups})"

    def asked_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        weights, biases, a, b = self._groups(inputs, attributes)
        y = _asked(inputs[0], weights, biases, "whole=True")
        return f"K.add_lora(({y}), {inputs[0]}, {weights[0]}, {_tuple(a)}, {_tuple(b)})"

    def _groups(self, inputs: Sequence[str], attributes: Attributes) -> list[Sequence[str]]:
        """Weights, biases, A and B."""
        count, own = int(attributes["count"]), len(self.adapted(attributes))  # type: ignore[arg-type]
        biases = inputs[1 + count : -2 * own]
        return [inputs[1 : 1 + count], biases, inputs[-2 * own : -own], inputs[-own:]]

    def compute_dtype(self, inputs: Types) -> str:
        return inputs[0].dtype  # the base's product; LoRA's are small beside it

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * sum(out.elements for out in outputs) * inputs[0].shape[-1]


class LinearBackward(Operator):
    """dx = dy W, the input gradient of a linear operator."""

    name = "linear_backward"
    is_product = True
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dy, weight = types
        if dy.shape[-1] != weight.shape[0]:
            raise TypeCheckError(f"gradient {dy} does not fit weight {weight}")
        return (dy.with_shape((*dy.shape[:-1], weight.shape[1])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.linear_backward({', '.join(inputs)})"

    def asked_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        dy, weight = inputs
        return f'yield from K.product_backward(batch, "{_name(weight)}", {dy}, {weight})'

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * outputs[0].elements * inputs[0].shape[-1]


class LoraLinearBackward(Operator):
    """The gradients of a linear operator with LoRA, without A's; in programs for Triton.

    ds = scale · dz B, dB = scale · dzᵀ s, dx = dz W + ds A

    `dz: [T, out]`, `W: [out, in]`, `A: [r, in]`, `B: [out, r]`, `s: [T, r]`.
    """

    name = "lora_linear_backward"
    is_product = True
    inputs = (5, 5)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, weight, a, b, s = types
        (ds,) = ExpandBackward().infer((dz, b), {})
        (db,) = ScaledOuter().infer((dz, s, b), {})
        (dx,) = LinearBackward().infer((dz, weight), {})
        if ds.shape != s.shape or a.shape != (s.shape[-1], weight.shape[1]):
            raise TypeCheckError(f"lora_linear_backward of {dz} with {a}, {b} and {s}")
        return ds, db, dx

    def output_suffixes(self, count: int) -> tuple[str, ...]:
        return ("s", "B", "x")

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        dz, weight, *rest = inputs
        called = f'K.lora_linear_backward(batch, "{_name(weight)}", {dz}, {weight}'
        return f"yield from {called}, {', '.join(rest)})"

    def compute_dtype(self, inputs: Types) -> str:
        return inputs[0].dtype  # the base's product; LoRA's are small beside it

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * outputs[2].elements * inputs[0].shape[-1]


class Shrink(Operator):
    """s = x Aᵀ, down to the rank: `x: [T, in]`, `A: [r, in]` give `[T, r]` in A's dtype."""

    name = "shrink"
    linear_in = ((0,), (1,))
    is_product = True
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, weight = types
        if x.shape[-1] != weight.shape[-1]:
            raise TypeCheckError(f"shrink of {x} by {weight}; expected [r, {x.shape[-1]}]")
        return (weight.with_shape((x.shape[0], weight.shape[0])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.shrink({', '.join(inputs)})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield _output_dim(types)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield sharding(*_CONTRACTED, PRE_REDUCE)

    def gradient(self, context: Gradient) -> list[str | None]:
        dx = dweight = None
        if context.needs[0]:
            dx = context.add("shrink_backward", context.incoming, context.input(1))
            dx = context.cast(dx, context.input_type(0).dtype)
        if context.needs[1]:
            dweight = context.add("outer", context.incoming, context.input(0))
        return [dx, dweight]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * outputs[0].elements * inputs[0].shape[-1]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], outputs[0].dtype)


class ShrinkBackward(LinearBackward):
    """dx = ds A."""

    name = "shrink_backward"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.shrink_backward({', '.join(inputs)})"


class ExpandAdd(Operator):
    """z = y + scale · s Bᵀ, up from the rank onto the base's output, in y's dtype.

    `y: [T, out]`, `s: [T, r]`, `B: [out, r]`.
    """

    name = "expand_add"
    linear_in = ((0, 1), (0, 2))
    is_product = True
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, s, weight = types
        if weight.shape != (y.shape[-1], s.shape[-1]):
            raise TypeCheckError(
                f"expand_add of {s} by {weight} onto {y}; expected [{y.shape[-1]}, {s.shape[-1]}]"
            )
        return (y,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.expand_add({', '.join(inputs)})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, 0, -2), (-1,)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield sharding(PRE_REDUCE, *_CONTRACTED, PRE_REDUCE)
        # Its own columns of a summand: what S-LoRA adds into the base's sum (§6).
        rows = (PRE_REDUCE, REPLICATED, partitioned(-2))
        yield Sharding(rows, (PRE_REDUCE,), "expand_add_part")

    def gradient(self, context: Gradient) -> list[str | None]:
        ds = dweight = None
        if context.needs[1]:
            ds = context.add("expand_backward", context.incoming, context.input(2))
        if context.needs[2]:
            dweight = context.add(
                "scaled_outer", context.incoming, context.input(1), context.input(2)
            )
        return [context.incoming if context.needs[0] else None, ds, dweight]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * outputs[0].elements * inputs[1].shape[-1]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], inputs[1].dtype)


class ExpandBackward(LinearBackward):
    """ds = scale · dz B, in B's dtype."""

    name = "expand_backward"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (ds,) = super().infer(types, attributes)
        return (ds.with_dtype(types[1].dtype),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.expand_backward({', '.join(inputs)})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], outputs[0].dtype)


class Outer(Operator):
    """dA = dsᵀ x summed over the adapter's tokens: `ds: [T, r]`, `x: [T, in]` give `[r, in]`."""

    name = "outer"
    is_product = True
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        left, right = types[:2]
        return (left.with_shape((left.shape[-1], right.shape[-1])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.outer({', '.join(inputs)})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[0].elements * inputs[1].shape[-1]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[1], outputs[0].dtype)


class AskedOuter(Outer):
    """An outer product that the caller runs, for what the attribute `of` names; for Triton.

    So those of several jobs are one launch.
    """

    name = "asked_outer"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"yield from K.asked_outer(batch, {attributes['of']!r}, {', '.join(inputs)})"


class ScaledOuter(Outer):
    """dB = scale · dzᵀ s, in B's dtype: `dz: [T, out]`, `s: [T, r]`, `B: [out, r]`."""

    name = "scaled_outer"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[2],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.scaled_outer({', '.join(inputs)})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], outputs[0].dtype)


class BiasAdd(Operator):
    """z = y + scale · b', or with a base operator's bias b, which b' replaces, z = y + (b' - b).

    `y: [T, out]`; `b': [out]`, the adapter's bias; `b: [out]`, the base's, may be missing.
    """

    name = "bias_add"
    inputs = (2, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, *biases = types
        if any(bias.shape != y.shape[1:] for bias in biases):
            raise TypeCheckError(f"bias_add of {', '.join(map(str, biases))} onto {y}")
        return (y,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.bias_add({', '.join(inputs)})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1,) * len(types), (-1,)

    def gradient(self, context: Gradient) -> list[str | None]:
        dbias = None
        if context.needs[1]:
            # The scale is the parameter's own; one that replaces the base's has none.
            scaled = [context.input(1)] if len(context.node.inputs) == 2 else []
            dtype = context.input_type(1).dtype
            dbias = context.add("sum_tokens", context.incoming, *scaled, dtype=dtype)
        dy = context.incoming if context.needs[0] else None
        return [dy, dbias, None][: len(context.node.inputs)]


class SumTokens(Operator):
    """The sum over the adapter's tokens: `[T, n]` gives `[n]`; scaled as a parameter `[n]` is."""

    name = "sum_tokens"
    inputs = (1, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[0].with_shape(types[0].shape[1:]).with_dtype(str(attributes["dtype"])),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return (
            f"K.sum_tokens({', '.join(inputs)}).to(torch.{TORCH_NAMES[str(attributes['dtype'])]})"
        )


class AskedSumTokens(SumTokens):
    """A sum over tokens that the caller runs, for what the attribute `of` names; for Triton."""

    name = "asked_sum_tokens"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        called = f"K.asked_sum_tokens(batch, {attributes['of']!r}, {', '.join(inputs)})"
        return f"(yield from {called}).to(torch.{TORCH_NAMES[str(attributes['dtype'])]})"


OPERATORS: tuple[Operator, ...] = (
    AskedOuter(),
    AskedSumTokens(),
    BiasAdd(),
    ExpandAdd(),
    ExpandBackward(),
    Linear(),
    LinearBackward(),
    LinearGroup(),
    LoraLinear(),
    LoraLinearBackward(),
    Outer(),
    ScaledOuter(),
    Shrink(),
    ShrinkBackward(),
    SumTokens(),
)
