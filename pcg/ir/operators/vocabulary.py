"""Vocabulary-parallel operators: each rank has a run of the vocabulary's rows.

They stand for `embedding` and `cross_entropy` where the ranks have equal parts of the vocabulary;
which ids are its own, a rank knows by its number (Megatron-LM, Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

from pcg.ir.operators.model import CrossEntropy, CrossEntropyBackward
from pcg.ir.operators.operator import Attributes, Gradient, Operator
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


OPERATORS: tuple[Operator, ...] = (
    CrossEntropyPart(),
    CrossEntropyPartBackward(),
    EmbeddingPart(),
)
