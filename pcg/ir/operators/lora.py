"""Products of low-rank bypass networks.

They take *adapter* parameters: in a batch of many adapters each token uses its own adapter's
weights (segmented products: Punica §4, S-LoRA §5.3). The scale α/r belongs to the adapter.

Programs for Triton leave LoRA's summand of a product to the kernel that reads the sum:

    y, d = lora_linear(x, W, A, B) {deferred=True}      z = add_deferred(y, d)

d is scale · (x Aᵀ) Bᵀ, held as s = x Aᵀ and a reference to B, from which the kernel of z computes
it. d is empty if the runtime has already added LoRA to y: for long prompts, and for adapters that
are not table rows.

Training programs for Triton join the LoRA of several sites into a single operator:

    s_i = shrink(x, A_i)                         shrink_group(x, A…)
    z_i = expand_add(y_i, s_i, B_i)              expand_add_group(y…, s…, B…)
    dx = Σ_i dz_i W_i + ds_i A_i                 lora_group_backward(dz…, W…, A…, B…, s…)
    dA_i = outer(ds_i, x)                        asked_outer_group(ds…, x)

A group takes as many launches as a single site; its sums equal those of the replaced operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, Sharding, partitioned, sharding
from pcg.ir.operators.base import (
    COUNT,
    FLAG,
    NATURAL,
    PRESENT,
    SIZES,
    TEXT,
    Aligned,
    Attributes,
    Bounds,
    Gradient,
    Operator,
    Tile,
    Types,
    cast_bytes,
    check_gradient,
    declared,
    optional,
    same_dims,
)
from pcg.ir.operators.linear import (
    CONTRACTED,
    Linear,
    LinearBackward,
    Product,
    output_dim,
    product_request,
    tuple_source,
    weight_name,
)
from pcg.ir.types import TensorType


class Shrink(Product):
    """s = x Aᵀ, down to the rank: `x: [T, in]`, `A: [r, in]` give `[T, r]` in A's dtype."""

    name = "shrink"
    linear_in = ((0,), (1,))
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, weight = types
        if len(x.dims) != 2 or len(weight.dims) != 2 or x.shape[1] != weight.shape[1]:
            raise TypeCheckError(f"shrink of {x} by {weight}; expected [r, {x.shape[-1]}]")
        return (weight.with_shape((x.shape[0], weight.shape[0])),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield output_dim(types)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield sharding(*CONTRACTED, PRE_REDUCE)

    def gradient(self, context: Gradient) -> list[str | None]:
        dx = dweight = None
        if context.needs[0]:
            dx = context.add("shrink_backward", context.incoming, context.input(1))
            dx = context.cast(dx, context.input_type(0).dtype)
        if context.needs[1]:
            dweight = context.add("outer", context.incoming, context.input(0))
        return [dx, dweight]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], outputs[0].dtype)


class ShrinkBackward(LinearBackward):
    """dx = ds A."""

    name = "shrink_backward"


class ExpandAdd(Product):
    """z = y + scale · s Bᵀ, up from the rank onto the base's output, in y's dtype.

    `y: [T, out]`, `s: [T, r]`, `B: [out, r]`.
    """

    name = "expand_add"
    linear_in = ((0, 1), (0, 2))
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, s, weight = types
        if weight.shape != (y.shape[-1], s.shape[-1]) or y.shape[:-1] != s.shape[:-1]:
            raise TypeCheckError(
                f"expand_add of {s} by {weight} onto {y}; expected [{y.shape[-1]}, {s.shape[-1]}]"
            )
        return (y,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, 0, -2), (-1,)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield sharding(PRE_REDUCE, *CONTRACTED, PRE_REDUCE)
        # Its own columns of a summand: S-LoRA's addition into the base's sum (§6).
        rows = (PRE_REDUCE, REPLICATED, partitioned(-2))
        yield Sharding(rows, (PRE_REDUCE,), "expand_add_part")

    def gradient(self, context: Gradient) -> list[str | None]:
        ds = dweight = None
        dy = self._own_columns(context)
        if context.needs[1]:
            ds = context.add("expand_backward", dy, context.input(2))
        if context.needs[2]:
            dweight = context.add("scaled_outer", dy, context.input(1), context.input(2))
        return [context.incoming if context.needs[0] else None, ds, dweight]

    def _own_columns(self, context: Gradient) -> str:
        return context.incoming

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[1].elements * inputs[2].shape[0]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], inputs[1].dtype)


class ExpandAddPart(ExpandAdd):
    """z = y + scale · s Bᵀ in the rank's own columns: `y: [T, out]`, `s: [T, r]`, `B: [out/n, r]`.

    y and z are summands: other ranks add to the other columns.
    """

    name = "expand_add_part"
    template = "K.{name}({inputs}, batch)"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, s, weight = types
        columns = _parts(y, weight) * weight.shape[0]
        fits = weight.shape[1:] == s.shape[-1:] and y.shape[:-1] == s.shape[:-1]
        if not fits or columns != y.shape[-1]:
            raise TypeCheckError(f"expand_add_part of {s} by {weight} onto {y}")
        return (y,)

    def _own_columns(self, context: Gradient) -> str:
        degree = _parts(context.input_type(0), context.input_type(2))
        return context.add("taken_part", context.incoming, dim=-1, degree=degree)


def _parts(y: TensorType, weight: TensorType) -> int:
    """Return the number of ranks that share a weight's rows, for y with all columns."""
    return int(y.shape[-1]) // int(weight.shape[0])


class ExpandBackward(LinearBackward):
    """ds = scale · dz B, in B's dtype."""

    name = "expand_backward"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        (ds,) = super().infer(types, attributes)
        return (ds.with_dtype(types[1].dtype),)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], outputs[0].dtype)


class Outer(Product):
    """dA = dsᵀ x summed over the adapter's tokens: `ds: [T, r]`, `x: [T, in]` give `[r, in]`."""

    name = "outer"
    bounded_in = Bounds({1: "|ds|ᵀ e"})
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        left, right = types[:2]
        if left.shape[:-1] != right.shape[:-1]:
            raise TypeCheckError(f"{self.name} of {left} and {right}, which have other rows")
        return (left.with_shape((left.shape[-1], right.shape[-1])),)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[0].elements * inputs[1].shape[-1]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[1], outputs[0].dtype)


class OuterRequest(Outer):
    """An outer product requested from the caller, for the value that `of` names; for Triton."""

    name = "asked_outer"
    attributes = declared(of=TEXT)
    template = "yield from K.{name}(batch, {of!r}, {inputs})"


class ScaledOuter(Outer):
    """dB = scale · dzᵀ s, in B's dtype: `dz: [T, out]`, `s: [T, r]`, `B: [out, r]`."""

    name = "scaled_outer"
    bounded_in = Bounds({1: "scale |dz|ᵀ e"})
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        check_gradient(super().infer(types, attributes)[0], types[2])
        return (types[2],)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return cast_bytes(inputs[0], outputs[0].dtype)


class LoraLinear(Product):
    """Linear operators of the same input with LoRA: z_i = x W_iᵀ (+ b_i) + scale · (x A_iᵀ) B_iᵀ.

    Inputs: x, the `count` weights, their biases with `bias`, then all A, then all B. If only some
    outputs have LoRA, `adapted` has their indices, and A and B are theirs. With `deferred`, their
    LoRA summands are separate outputs, after the others; see `pcg.ir.operators.lora`.
    """

    name = "lora_linear"
    attributes = declared(count=COUNT, bias=FLAG, adapted=optional(SIZES), deferred=PRESENT)
    inputs = (4, 129)
    returns_sequence = True
    computes_in_first = True  # the base's product; LoRA's products are small in comparison

    @staticmethod
    def adapted(attributes: Attributes) -> tuple[int, ...]:
        count = attributes["count"]
        indices: tuple[int, ...] = attributes.get("adapted", tuple(range(count)))
        if sorted({*range(count)}.intersection(indices)) != [*indices]:
            raise TypeCheckError(
                f"lora_linear has adapted={indices}; expected some of 0 to {count - 1}, in order"
            )
        return indices

    def infer(self, types: Types, attributes: Attributes) -> Types:
        count, x = attributes["count"], types[0]
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
        if attributes.get("deferred"):
            outs += [outs[i] for i in adapted]
        return tuple(outs)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        if attributes.get("deferred"):
            (weight, *_), _, a, b = self._groups(inputs, attributes)
            product = f"K.linear({inputs[0]}, {weight}, {weight}.group_bias)"
            return self._deferred(inputs[0], product, weight, a, b)
        groups = ", ".join(tuple_source(group) for group in self._groups(inputs, attributes))
        return f"K.lora_linear({inputs[0]}, {groups})"

    def request_source(self, inputs: Sequence[str], attributes: Attributes) -> str | None:
        weights, biases, a, b = self._groups(inputs, attributes)
        y = product_request(inputs[0], weights, biases, "whole=True")
        if attributes.get("deferred"):
            return self._deferred(inputs[0], f"({y})", weights[0], a, b)
        lora = f"{tuple_source(a)}, {tuple_source(b)}"
        return f"K.add_lora(({y}), {inputs[0]}, {weights[0]}, {lora})"

    @staticmethod
    def _deferred(x: str, product: str, weight: str, a: Sequence[str], b: Sequence[str]) -> str:
        # Python evaluates the arguments in order: shrink starts before the base's product.
        begun = f"K.begun_lora({x}, {tuple_source(a)}, {tuple_source(b)})"
        return f"K.with_deferred_lora({begun}, {product}, {weight})"

    def _groups(self, inputs: Sequence[str], attributes: Attributes) -> list[Sequence[str]]:
        count, adapted_count = attributes["count"], len(self.adapted(attributes))
        biases = inputs[1 + count : -2 * adapted_count]
        return [
            inputs[1 : 1 + count],
            biases,
            inputs[-2 * adapted_count : -adapted_count],
            inputs[-adapted_count:],
        ]


class LoraLinearBackward(Product):
    """The gradients of a linear operator with LoRA, without A's; in programs for Triton.

    ds = scale · dz B, dB = scale · dzᵀ s, dx = dz W + ds A; `dz: [T, out]`, `W: [out, in]`, `A: [r,
    in]`, `B: [out, r]`, `s: [T, r]`.
    """

    name = "lora_linear_backward"
    inputs = (5, 5)
    suffixes = ("s", "B", "x")
    computes_in_first = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, weight, a, b, s = types
        (ds,) = ExpandBackward().infer((dz, b), {})
        (db,) = ScaledOuter().infer((dz, s, b), {})
        (dx,) = LinearBackward().infer((dz, weight), {})
        if ds.shape != s.shape or a.shape != (s.shape[-1], weight.shape[1]):
            raise TypeCheckError(f"lora_linear_backward of {dz} with {a}, {b} and {s}")
        return ds, db, dx

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        name = weight_name(inputs[1])
        return f'yield from K.lora_linear_backward(batch, "{name}", {", ".join(inputs)})'

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * outputs[2].elements * inputs[0].shape[-1]


# ----------------------------------------------------------------------------------------- deferred


class AddDeferred(Operator):
    """z = y + d, for y [T, n] and LoRA's summand d of it."""

    name = "add_deferred"
    linear_in = ((0, 1),)
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, deferred = types
        same = (y.dtype, y.shape) == (deferred.dtype, deferred.shape)
        if not same or len(y.dims) != 2:
            raise TypeCheckError(f"add_deferred of {deferred} to {y}; expected two of [T, n]")
        return (y,)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0], 2)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return f"{tile.read(0)} + {tile.read(1)}"


class NothingDeferred(Operator):
    """The summand d = 0 of a value [T, n], for the first layer."""

    name = "nothing_deferred"
    template = "K.{name}()"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.{self.name}()"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])


# -------------------------------------------------------------------------------------- lora groups


Item = TypeVar("Item")

MOST_SITES = 3
"""Maximum number of sites of an operator, and of tensors of a kind in its kernels: q, k and v."""


class ShrinkGroup(Product):
    """s_i = x A_iᵀ, down to each rank: `x: [T, in]`, `A_i: [r, in]` give `[T, r]` each."""

    name = "shrink_group"
    inputs = (3, 1 + MOST_SITES)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, *every = types
        return tuple(Shrink().infer((x, a), {})[0] for a in every)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.{self.name}({inputs[0]}, {tuple_source(inputs[1:])})"


class ExpandAddGroup(Product):
    """z_i = y_i + scale · s_i B_iᵀ, in y's dtype; inputs are all y, all s and all B."""

    name = "expand_add_group"
    inputs = (6, 3 * MOST_SITES)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return tuple(
            ExpandAdd().infer(site_types, {})[0]
            for site_types in zip(*by_kind(types, 3), strict=True)
        )

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.{self.name}({', '.join(map(tuple_source, by_kind(inputs, 3)))})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        each = zip(*by_kind(inputs, 3), strict=True)
        return sum(
            (ExpandAdd().flops(site_types, site_types[:1], {}) for site_types in each),
            sympy.Integer(0),
        )


class LoraGroupBackward(Product):
    """The gradients of linear operators of the same input with LoRA, without A's.

    Inputs are all dz, all W, all A, all B and all s; outputs all ds, all dB, and the sum dx. The
    last `plain` operators have no LoRA, and thus no A, B and s.
    """

    name = "lora_group_backward"
    attributes = declared(plain=NATURAL)
    inputs = (10, 5 * MOST_SITES)
    computes_in_first = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, weights, *rest = by_site(types, int(attributes["plain"]))
        adapted = zip(dz, weights, *rest, strict=False)
        ds, db, _ = zip(
            *(LoraLinearBackward().infer(site_types, {}) for site_types in adapted), strict=True
        )
        dx = [
            LinearBackward().infer(site_types, {})[0]
            for site_types in zip(dz, weights, strict=True)
        ]
        if len(set(dx)) > 1:
            raise TypeCheckError(f"{self.name} sums gradients {dx} of different types")
        return (*ds, *db, dx[0])

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        groups = by_site(inputs, int(attributes["plain"]))
        names = tuple_source([f'"{weight_name(weight)}"' for weight in groups[1]])
        rest = ", ".join(map(tuple_source, groups))
        return f"yield from K.{self.name}(batch, {names}, {rest})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        width = sum(dz.shape[-1] for dz in by_site(inputs, int(attributes["plain"]))[0])
        return 2 * outputs[-1].elements * width


class OuterRequestGroup(Product):
    """dA_i = ds_iᵀ x of the same x, requested from the caller for the value that `of` names first.

    Inputs are all ds, and x.
    """

    name = "asked_outer_group"
    attributes = declared(of=TEXT)
    inputs = (3, MOST_SITES + 1)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        *every, x = types
        return tuple(Outer().infer((ds, x), {})[0] for ds in every)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        *every, x = inputs
        return f"yield from K.{self.name}(batch, {attributes['of']!r}, {tuple_source(every)}, {x})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        *every, x = inputs
        return 2 * sum(ds.elements for ds in every) * x.shape[-1]


def by_kind(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Split items into `count` kinds of equal size; TypeCheckError if the sizes differ."""
    if len(items) % count:
        raise TypeCheckError(f"{len(items)} inputs are not as many of each of {count} kinds")
    size = len(items) // count
    return [items[kind * size : (kind + 1) * size] for kind in range(count)]


def by_site(items: Sequence[Item], plain: int) -> list[Sequence[Item]]:
    """Split all dz, W, A, B and s of `lora_group_backward`; the last `plain` have only dz and W."""
    first = len(items) - 2 * plain
    adapted, rest = divmod(first, 5)
    if rest or adapted < 1:
        raise TypeCheckError(f"{len(items)} inputs are not 5 a site, and 2 of each of {plain}")
    starts = [0, adapted + plain, *(2 * (adapted + plain) + kind * adapted for kind in range(3))]
    return [items[start:end] for start, end in zip(starts, [*starts[1:], len(items)], strict=True)]
