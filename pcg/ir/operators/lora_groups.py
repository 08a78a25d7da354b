"""LoRA of several sites in one operator each; in programs for Triton that train.

    s_i = shrink(x, A_i)                         shrink_group(x, A…)
    z_i = expand_add(y_i, s_i, B_i)              expand_add_group(y…, s…, B…)
    dx = Σ_i dz_i W_i + ds_i A_i                 lora_group_backward(dz…, W…, A…, B…, s…)
    dA_i = outer(ds_i, x)                        asked_outer_group(ds…, x)

Each runs as many launches as one site's does, and sums are the operators' that they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import NATURAL, TEXT, Attributes, Types, declared
from pcg.ir.operators.linear import LinearBackward, Product, tuple_source, weight_name
from pcg.ir.operators.lora import ExpandAdd, LoraLinearBackward, Outer, Shrink

Item = TypeVar("Item")

MOST_SITES = 3
"""Sites of one operator, at most: q, k and v; the kernels take so many tensors of each kind."""


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
        return tuple(ExpandAdd().infer(own, {})[0] for own in zip(*by_kind(types, 3), strict=True))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.{self.name}({', '.join(map(tuple_source, by_kind(inputs, 3)))})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        each = zip(*by_kind(inputs, 3), strict=True)
        return sum((ExpandAdd().flops(own, own[:1], {}) for own in each), sympy.Integer(0))


class LoraGroupBackward(Product):
    """The gradients of linear operators of one input with LoRA, without A's.

    Inputs are all dz, all W, all A, all B and all s; outputs all ds, all dB, and the sum dx. The
    last `plain` operators have no LoRA, and so neither A, B nor s.
    """

    name = "lora_group_backward"
    attributes = declared(plain=NATURAL)
    inputs = (10, 5 * MOST_SITES)
    computes_in_first = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dz, weights, *rest = by_site(types, int(attributes["plain"]))
        adapted = zip(dz, weights, *rest, strict=False)
        ds, db, _ = zip(*(LoraLinearBackward().infer(own, {}) for own in adapted), strict=True)
        dx = [LinearBackward().infer(own, {})[0] for own in zip(dz, weights, strict=True)]
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
    """Items of as many kinds as `count`, by kind. TypeCheckError: some kind has more of them."""
    if len(items) % count:
        raise TypeCheckError(f"{len(items)} inputs are not as many of each of {count} kinds")
    size = len(items) // count
    return [items[kind * size : (kind + 1) * size] for kind in range(count)]


def by_site(items: Sequence[Item], plain: int) -> list[Sequence[Item]]:
    """All dz, W, A, B and s of `lora_group_backward`; the last `plain` have only dz and W."""
    first = len(items) - 2 * plain
    adapted, rest = divmod(first, 5)
    if rest or adapted < 1:
        raise TypeCheckError(f"{len(items)} inputs are not 5 a site, and 2 of each of {plain}")
    starts = [0, adapted + plain, *(2 * (adapted + plain) + kind * adapted for kind in range(3))]
    return [items[start:end] for start, end in zip(starts, [*starts[1:], len(items)], strict=True)]
