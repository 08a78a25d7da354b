"""Collectives of several tensors in one message, made by `coalesce_collectives`.

    all_reduces   y_i = Σ_ranks x_i            one all-reduce of all x_i, one behind the other
    all_gathers   y_i = the ranks' x_i joined  one all-gather of the same

A message waits for a link once for each step of its ring, whatever it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.collective import FLOPS_PER_BYTE, AllGather, AllReduce, Collective
from pcg.ir.operators.operator import Attributes, Gradient, Operator, Types

MOST = 4096
"""Tensors of a message: more than a layer has."""


class _Joined(Collective):
    """One message of several tensors of one dtype."""

    inputs = (2, MOST)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return FLOPS_PER_BYTE * self.rounds * _bytes(outputs)

    def output_suffixes(self, count: int) -> tuple[str, ...]:
        return ("", *map(str, range(1, count)))

    def _check(self, types: Types) -> None:
        dtypes = {type_.dtype for type_ in types}
        if len(dtypes) > 1:
            raise TypeCheckError(f"{self.name} of {', '.join(sorted(dtypes))}; use one dtype")


class AllReduces(_Joined):
    """The sums of the ranks' tensors, on each."""

    name = "all_reduces"
    rounds = AllReduce.rounds
    holds_inputs = False

    def infer(self, types: Types, attributes: Attributes) -> Types:
        self._check(types)
        return types

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.all_reduces([{', '.join(inputs)}], batch)"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * _bytes(inputs)  # what is sent, and what came

    def gradient(self, context: Gradient) -> list[str | None]:
        return list(context.upstream)


class AllGathers(_Joined):
    """The parts of `degree` ranks, each tensor's joined along its own of `dims`."""

    name = "all_gathers"
    rounds = AllGather.rounds

    def infer(self, types: Types, attributes: Attributes) -> Types:
        self._check(types)
        dims, degree = cast("tuple[int, ...]", attributes["dims"]), attributes["degree"]
        if len(dims) != len(types):
            raise TypeCheckError(f"all_gathers of {len(types)} tensors along {len(dims)} dims")
        pairs = zip(types, dims, strict=True)
        return tuple(AllGather().infer((t,), {"dim": d, "degree": degree})[0] for t, d in pairs)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.all_gathers([{', '.join(inputs)}], {attributes['dims']}, batch)"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _bytes(inputs) + _bytes(outputs)  # what is sent, and what came

    def gradient(self, context: Gradient) -> list[str | None]:
        dims, degree = (
            cast("tuple[int, ...]", context.attributes["dims"]),
            context.attributes["degree"],
        )
        return [
            None if d is None else context.add("own_part", d, dim=dim, degree=degree)
            for d, dim in zip(context.upstream, dims, strict=True)
        ]


def _bytes(types: Types) -> sympy.Expr:
    return sympy.Add(*(type_.size_bytes for type_ in types))


OPERATORS: tuple[Operator, ...] = (AllGathers(), AllReduces())
