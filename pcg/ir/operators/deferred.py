"""LoRA's summand of a product, left to the kernel that reads the sum; in programs for Triton.

    y, d = lora_linear(x, W, A, B) {deferred=True}      z = add_deferred(y, d)

d is scale · (x Aᵀ) Bᵀ, which need not lie in memory: it is held as s = x Aᵀ and where B lies, and a
kernel that makes z computes what it needs of it. Where the runtime added LoRA to y already, as for
the many tokens of prompts and for adapters that are no rows, it is held as nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pcg.errors import TypeCheckError
from pcg.ir.operators.base import Aligned, Attributes, Operator, Tile, Types, same_dims


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
    """The summand d = 0 of something [T, n], for the first layer."""

    name = "nothing_deferred"
    template = "K.{name}()"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.{self.name}()"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])
