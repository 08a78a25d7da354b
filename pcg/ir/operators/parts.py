"""Operators that a rank runs instead of the whole one, knowing by its number which part is its own.

`embedding` and `cross_entropy` where each rank has a run of the vocabulary's rows (Megatron-LM,
Shoeybi et al. 2019, section 3); `expand_add` onto a summand where each rank has rows of B (S-LoRA
§6, which adds the bypass network's gather into the base's sum).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.operators.linear import ExpandAdd
from pcg.ir.operators.model import CrossEntropy, CrossEntropyBackward
from pcg.ir.operators.operator import Attributes, Gradient, Operator, Types
from pcg.ir.operators.shape import Embedding


class EmbeddingPart(Embedding):
    """Rows of the rank's part of a table, 0 for ids of other ranks: a summand of the embedding."""

    name = "embedding_part"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.embedding_part({inputs[1]}, {inputs[0]}, batch)"


class CrossEntropyPart(CrossEntropy):
    """The loss of each token, from the rank's part of the logits; ranks exchange numbers a token.

    loss = log Σ_ranks Σ_v exp(logit_v) - Σ_ranks logit_target, 0 of a rank without the target.
    """

    name = "cross_entropy_part"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.cross_entropy_part({', '.join(inputs)}, batch)"

    def gradient(self, context: Gradient) -> list[str | None]:
        dlogits = context.add(
            "cross_entropy_part_backward", context.incoming, context.input(0), context.input(1)
        )
        return [dlogits, None]


class CrossEntropyPartBackward(CrossEntropyBackward):
    """dlogits of the rank's part."""

    name = "cross_entropy_part_backward"

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.cross_entropy_part_backward({', '.join(inputs)}, batch)"


class ExpandAddPart(ExpandAdd):
    """z = y + scale · s Bᵀ in the rank's own columns: `y: [T, out]`, `s: [T, r]`, `B: [out/n, r]`.

    y is a summand, and so is z: of the other columns other ranks add what is missing.
    """

    name = "expand_add_part"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        y, s, weight = types
        size = y.features[-1]
        if weight.shape[1:] != s.shape[-1:] or size % weight.features[0]:
            raise TypeCheckError(f"expand_add_part of {s} by {weight} onto {y}")
        return (y,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.expand_add_part({', '.join(inputs)}, batch)"

    def gradient(self, context: Gradient) -> list[str | None]:
        ds = dweight = None
        degree = context.input_type(0).features[-1] // context.input_type(2).features[0]
        own = context.add("taken_part", context.incoming, dim=-1, degree=degree)
        if context.needs[1]:
            ds = context.add("expand_backward", own, context.input(2))
        if context.needs[2]:
            dweight = context.add("scaled_outer", own, context.input(1), context.input(2))
        return [context.incoming if context.needs[0] else None, ds, dweight]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * inputs[1].elements * inputs[2].shape[0]


OPERATORS: tuple[Operator, ...] = (
    CrossEntropyPart(),
    CrossEntropyPartBackward(),
    EmbeddingPart(),
    ExpandAddPart(),
)
