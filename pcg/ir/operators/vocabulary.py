"""Operators over the vocabulary: the embedding and the loss, and a rank's parts of them.

A rank's part has a range of the vocabulary's rows (Megatron-LM, Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import PRE_REDUCE, REPLICATED, WHOLE, Sharding, partitioned
from pcg.ir.operators.base import (
    DTYPE,
    FLAG,
    FLOAT,
    NATURAL,
    PRESENT,
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    cast_bytes,
    check_gradient,
    declared,
    optional,
    widened,
)
from pcg.ir.operators.linear import Linear
from pcg.ir.types import Size, tensor


class _Padded(Operator):
    """An operator of ids, with `padding`, the id without a gradient."""

    attributes = declared(padding=optional(NATURAL))
    inputs = (2, 2)
    has_all_rows = True

    def _check_padding(self, vocabulary: Size, attributes: Attributes) -> None:
        padding = attributes.get("padding", -1)
        if self.has_all_rows and isinstance(vocabulary, int) and padding >= vocabulary:
            raise TypeCheckError(f"padding={padding} is no id of a vocabulary of {vocabulary}")


class Embedding(_Padded):
    """Rows of a table by index: `table: [V, h]`, `ids: [T, …]` give `[T, …, h]`.

    `dtype` is that of the rows of a quantized table.
    """

    name = "embedding"
    attributes = declared(**_Padded.attributes, dtype=optional(DTYPE))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        function = "K.embedding" if "dtype" in attributes else "F.embedding"
        return f"{function}({inputs[1]}, {inputs[0]})"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        table, ids = types
        if ids.is_float or len(table.dims) != 2 or not ids.is_token_wise:
            raise TypeCheckError(f"embedding takes a [V, h] table and ids of T, not {table}, {ids}")
        self._check_padding(table.shape[0], attributes)
        rows = table.with_dtype(attributes.get("dtype", table.dtype))
        return (rows.with_shape((*ids.shape, table.shape[1])),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-1, 0), (-1,)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield Sharding((partitioned(-2), REPLICATED), (PRE_REDUCE,), "embedding_part")

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return inputs[1].size_bytes + 2 * outputs[0].size_bytes  # only the chosen rows of the table


class EmbeddingPart(Embedding):
    """Rows of the rank's part of a table, 0 for ids of other ranks: a summand of the embedding."""

    name = "embedding_part"
    has_all_rows = False

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.embedding_part({inputs[1]}, {inputs[0]}, batch)"


class EmbeddingShrink(_Padded):
    """s = A[:, ids]ᵀ: `ids: [T]`, an adapter's `A: [r, V]` give `[T, r]`; LoRA on an embedding.

    With `by_row` the adapter's table is `[V, r]`: an embedding of its own.
    """

    name = "embedding_shrink"
    attributes = declared(**_Padded.attributes, by_row=PRESENT)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.{self.name}({', '.join(inputs)}{', by_row=True' * ('by_row' in attributes)})"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        ids, weight = types
        if ids.is_float or ids.features or not ids.is_token_wise or len(weight.dims) != 2:
            raise TypeCheckError(f"{self.name} of {ids} by {weight}; expected ids and [r, V]")
        size, vocabulary = weight.shape[:: -1 if attributes.get("by_row") else 1]
        self._check_padding(vocabulary, attributes)
        return (weight.with_shape((*ids.shape, size)),)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (0, -1 if attributes.get("by_row") else -2), (-1,)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return inputs[0].size_bytes + 2 * outputs[0].size_bytes

    def gradient(self, context: Gradient) -> list[str | None]:
        read = context.incoming, *context.inputs
        return [None, context.add("embedding_outer", *read, **context.attributes)]


class EmbeddingOuter(_Padded):
    """dA[:, ids] += dsᵀ: `ds: [T, r]`, `ids: [T]`, `A: [r, V]` give `[r, V]`, 0 for the padding."""

    name = "embedding_outer"
    attributes = EmbeddingShrink.attributes
    inputs = (3, 3)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        by_row = ", by_row=True" * ("by_row" in attributes)
        return f"K.{self.name}({', '.join(inputs)}, {attributes.get('padding', -1)}{by_row})"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        check_gradient(types[0], EmbeddingShrink().infer(types[1:], attributes)[0])
        return (types[2],)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        dim = -1 if attributes.get("by_row") else -2
        yield (-1, 0, dim), (dim,)


class _SmoothedLoss(Operator):
    """An operator of the loss, with `smoothing`, the share of all words in the target."""

    attributes = declared(smoothing=optional(FLOAT))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        called = super().source(inputs, attributes)
        smoothing = attributes.get("smoothing", 0.0)
        return f"{called[:-1]}, smoothing={smoothing!r})" if smoothing else called


class CrossEntropy(_SmoothedLoss):
    """The loss in fp32; 0 for a negative target.

    With p = softmax(logits [T, V]) and the smoothing ε (Szegedy et al., 2016, section 7):

        loss = -(1 - ε) log p[target] - ε / V · Σ_v log p[v]
    """

    name = "cross_entropy"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        logits, targets = types
        if len(logits.dims) != 2 or targets.shape != logits.shape[:1] or targets.is_float:
            raise TypeCheckError(f"{self.name} of logits {logits} and targets {targets}")
        return (tensor("f32", logits.shape[0]),)

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield Sharding((partitioned(-1), WHOLE), (WHOLE,), "cross_entropy_part")

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        wide = widened(inputs[0])
        return cast_bytes(inputs[0], wide.dtype) + wide.size_bytes  # and their log-probabilities

    def gradient(self, context: Gradient) -> list[str | None]:
        logits, targets = context.input(0), context.input(1)
        operands = context.incoming, logits, targets
        return [context.add(f"{self.name}_backward", *operands, **context.attributes), None]


class CrossEntropyBackward(_SmoothedLoss):
    """dlogits = dloss · (softmax(logits) - (1 - ε) onehot(target) - ε / V)."""

    name = "cross_entropy_backward"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        check_gradient(types[0], CrossEntropy().infer(types[1:], attributes)[0])
        return (types[1],)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        wide = widened(inputs[1])
        if wide == inputs[1]:
            return sympy.Integer(0)
        return 2 * wide.size_bytes - outputs[0].size_bytes  # the logits and the softmax in fp32


class CrossEntropyPart(CrossEntropy):
    """The loss of each token, from the rank's part of the logits; ranks exchange a token's sums.

    loss = log Σ_ranks Σ_v exp(logit_v) - Σ_ranks logit_target, 0 of a rank without the target;
    with smoothing, (1 - ε) logit_target + ε / V · Σ_v logit_v instead of logit_target.
    """

    name = "cross_entropy_part"
    template = "K.{name}({inputs}, batch)"


class CrossEntropyPartBackward(CrossEntropyBackward):
    """dlogits of the rank's part."""

    name = "cross_entropy_part_backward"
    template = "K.{name}({inputs}, batch)"


class LinearCrossEntropy(Operator):
    """The loss of a frozen head, and with `dloss` the gradient of its input.

    Inputs: x, W, b with `bias`, targets, and dloss. Logits are l = scale · (x Wᵀ + b), or with
    `softcap` c · tanh(l / c).
    """

    name = "linear_cross_entropy"
    attributes = declared(bias=FLAG, scale=FLOAT, softcap=FLOAT)
    inputs = (3, 5)
    is_product = True
    suffixes = ("", "dx")

    def infer(self, types: Types, attributes: Attributes) -> Types:
        count = 2 + attributes["bias"]
        if not count < len(types) <= count + 2:
            raise TypeCheckError(
                f"linear_cross_entropy has {len(types)} inputs and bias={attributes['bias']}"
            )
        x, *weights = types[:count]
        targets, *gradient = types[count:]
        (loss,) = CrossEntropy().infer((*Linear().infer((x, *weights), {}), targets), {})
        for dloss in gradient:
            check_gradient(dloss, loss)
        return (loss, x)[: 1 + len(gradient)]

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        operands = list(inputs)
        bias = operands.pop(2) if attributes["bias"] else "None"
        trains = len(operands) == 4
        arguments = [*operands, *([] if trains else ["None"]), bias]
        arguments += [f"{name}={attributes[name]!r}" for name in ("scale", "softcap")]
        called = f"K.linear_cross_entropy({', '.join(arguments)})"
        return called if trains else f"{called}[0]"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * len(outputs) * inputs[0].elements * inputs[1].shape[0]
