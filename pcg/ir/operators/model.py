"""The operators that make a transformer: norms, rotary embedding, attention, experts, and the loss.

The tracer raises a model's elementary arithmetic to these.

The file is long because it is a part of the operator table: one entry after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError
from pcg.ir.layouts import WHOLE, Sharding, partitioned
from pcg.ir.operators.operator import (
    Aligned,
    Attributes,
    Gradient,
    Operator,
    Types,
    cast_bytes,
    same_dims,
    widened,
)
from pcg.ir.operators.tile import Tile
from pcg.ir.types import DTYPE_BYTES, TensorType, promote, tensor

CONTEXT = sympy.Symbol("S", integer=True, positive=True)
"""Tokens that a token attends to at most: the length of its sequence."""


class RmsNorm(Operator):
    """y = x / sqrt(mean(x²) + eps) · (offset + w), in fp32, over the last dim.

    With `round_first` the normalised x is rounded to x's dtype before the weight (Llama); else
    after it (Gemma, OLMo-2). Without a weight the scale is 1.
    """

    name = "rms_norm"
    inputs = (1, 2)
    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[0],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        weight = inputs[1] if len(inputs) == 2 else "None"
        return f"K.rms_norm({inputs[0]}, {weight}, {_norm_arguments(attributes)})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        y = f"{tile.read(0)} * {_rstd(tile, 0, attributes['eps'])}"
        if tile.inputs == 1:
            return y
        if attributes["round_first"]:
            y = tile.let("normed", tile.rounded(y, tile.dtype(0)))
        return f"{y} * {_norm_scale(tile, 1, attributes['offset'])}"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return _but_the_last(types)

    def gradient(self, context: Gradient) -> list[str | None]:
        weight = [context.input(1)] if len(context.node.inputs) == 2 else []
        attributes = {k: v for k, v in context.attributes.items() if k != "round_first"}
        dx = context.add(
            "rms_norm_backward", context.incoming, context.input(0), *weight, **attributes
        )
        return [dx, None][: len(context.node.inputs)]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Where the norm is summed up: the copy in fp32 and its square, before there is an output.
        wide = widened(inputs[0])
        return cast_bytes(inputs[0], wide.dtype) + wide.size_bytes - outputs[0].size_bytes


def _rstd(tile: Tile, x: int, eps: object) -> str:
    """1 / sqrt(mean(x²) + eps) of each row."""
    squares = tile.row_sum("squares", lambda row: f"{row.read(x)} * {row.read(x)}")
    return tile.let("rstd", f"tl.rsqrt({squares} / {tile.size(x)} + {eps!r})")


def _norm_scale(tile: Tile, weight: int, offset: object = 0.0) -> str:
    found = tile.read(weight)
    return f"({found} + {offset!r})" if offset else found


class RmsNormBackward(Operator):
    """dx = rstd (g - x rstd² mean(g x)) of rms_norm, with g = dy (offset + w)."""

    name = "rms_norm_backward"
    inputs = (2, 3)
    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[1],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        weight = inputs[2] if len(inputs) == 3 else "None"
        arguments = _norm_arguments(attributes)
        return f"K.rms_norm_backward({inputs[0]}, {inputs[1]}, {weight}, {arguments})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        def g(at: Tile) -> str:
            if at.inputs == 2:
                return at.read(0)
            return f"{at.read(0)} * {_norm_scale(at, 2, attributes['offset'])}"

        rstd = _rstd(tile, 1, attributes["eps"])
        product = tile.row_sum("product", lambda row: f"{g(row)} * {row.read(1)}")
        mean = f"{product} / {tile.size(1)}"
        return f"{rstd} * ({g(tile)} - {tile.read(1)} * ({rstd} * {rstd} * ({mean})))"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Where g is multiplied by x: both in fp32 and their product, before there is an output.
        wide = widened(inputs[1])
        copies = cast_bytes(inputs[1], wide.dtype)
        if len(inputs) == 3 or inputs[0].dtype != wide.dtype:
            copies += wide.size_bytes
        return copies + wide.size_bytes - outputs[0].size_bytes


def _but_the_last(types: Types) -> Iterator[Aligned]:
    """Feature dims before the normalised one; a weight or bias may have them, too."""
    for dim in range(-len(types[0].features), -1):
        has = [dim if len(other.dims) >= -dim else 0 for other in types[1:]]
        yield (dim, *has), (dim,)


class LayerNorm(Operator):
    """y = (x - mean) / sqrt(var + eps) · w + b over the last dim, in fp32.

    Inputs: x, then w where `weight`, then b where `bias`.
    """

    name = "layer_norm"
    inputs = (1, 3)
    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if len(types) != 1 + bool(attributes["weight"]) + bool(attributes["bias"]):
            raise TypeCheckError(f"layer_norm has {len(types)} inputs and {dict(attributes)}")
        return (types[0],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        rest = list(inputs[1:])
        weight = rest.pop(0) if attributes["weight"] else "None"
        bias = rest.pop(0) if attributes["bias"] else "None"
        return f"K.layer_norm({inputs[0]}, {weight}, {bias}, eps={attributes['eps']!r})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        y, _ = _standardized(tile, 0, attributes["eps"])
        if attributes["weight"]:
            y = f"{y} * {tile.read(1)}"
        return f"{y} + {tile.read(tile.inputs - 1)}" if attributes["bias"] else y

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return _but_the_last(types)

    def gradient(self, context: Gradient) -> list[str | None]:
        weight = [context.input(1)] if context.attributes["weight"] else []
        eps = context.attributes["eps"]
        dx = context.add(
            "layer_norm_backward", context.incoming, context.input(0), *weight, eps=eps
        )
        return [dx, None, None][: len(context.node.inputs)]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        if not attributes["weight"] or len(inputs[1].dims) == 1:
            return sympy.Integer(0)
        wide = widened(inputs[0])  # a weight for each head is multiplied by in fp32
        return cast_bytes(inputs[0], wide.dtype) + wide.size_bytes - outputs[0].size_bytes

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        return (0,)


def _standardized(tile: Tile, x: int, eps: object) -> tuple[str, str]:
    """(x - mean) / sqrt(var + eps), and 1 / sqrt(var + eps) of each row."""
    total = tile.row_sum("total", lambda row: row.read(x))
    mean = tile.let("mean", f"{total} / {tile.size(x)}")
    squares = tile.row_sum(
        "squares", lambda row: f"({row.read(x)} - {mean}) * ({row.read(x)} - {mean})"
    )
    rstd = tile.let("rstd", f"tl.rsqrt({squares} / {tile.size(x)} + {eps!r})")
    return f"(({tile.read(x)} - {mean}) * {rstd})", rstd


class LayerNormBackward(Operator):
    """dx = rstd (g - mean(g) - xhat mean(g xhat)) of layer_norm, with g = dy w."""

    name = "layer_norm_backward"
    inputs = (2, 3)
    sums_rows = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[1],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        weight = inputs[2] if len(inputs) == 3 else "None"
        return (
            f"K.layer_norm_backward({inputs[0]}, {inputs[1]}, {weight}, eps={attributes['eps']!r})"
        )

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        def g(at: Tile) -> str:
            return at.read(0) if at.inputs == 2 else f"({at.read(0)} * {at.read(2)})"

        eps, n = attributes["eps"], tile.size(1)
        standardized, rstd = _standardized(tile, 1, eps)
        total = tile.row_sum("gradients", g)
        product = tile.row_sum("product", lambda row: f"{g(row)} * {_standardized(row, 1, eps)[0]}")
        return f"{rstd} * ({g(tile)} - {total} / {n} - {standardized} * ({product} / {n}))"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # g and x in fp32, the normalised x that native_layer_norm gives along, and dx in fp32.
        wide = widened(inputs[1])
        copies = cast_bytes(inputs[1], wide.dtype)
        if len(inputs) == 3 or inputs[0].dtype != wide.dtype:
            copies += wide.size_bytes
        return copies + 2 * wide.size_bytes - outputs[0].size_bytes


class Rope(Operator):
    """Rotary embedding: y = x · cos + rotate(x) · sin on the first `rotary_dim` of each head.

    `x: [T, heads, d]`, `cos, sin: [T, rotary_dim]`. `style` says how rotate pairs up the dims:
    `half` (i with i + rotary_dim/2: Llama, GPT-NeoX) or `interleaved` (2i with 2i + 1: GPT-J,
    Cohere).
    """

    name = "rope"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, cos, sin = types
        expected = (x.shape[0], attributes["rotary_dim"])
        if len(x.dims) != 3 or cos.shape != expected or sin.shape != expected:
            raise TypeCheckError(
                f"rope of {x} takes cos and sin {list(expected)}, not {cos}, {sin}"
            )
        return (x,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.rope_{attributes['style']}({', '.join(inputs)})"

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        column, x = tile.column, tile.read(0)
        other, is_first = self._partner(tile, attributes)
        cos, sin = (tile.read(index, self._turning(tile, column)) for index in (1, 2))
        partner = tile.read(0, other)
        y = f"{x} * {cos} + tl.where({is_first}, -{partner}, {partner}) * {sin}"
        turned = int(attributes["rotary_dim"])  # type: ignore[arg-type]
        return y if turned == tile.size(0) else f"tl.where({column} < {turned}, {y}, {x})"

    @staticmethod
    def _partner(tile: Tile, attributes: Attributes) -> tuple[str, str]:
        """The column that each is paired with, and whether it is the first of its pair."""
        column, turned = tile.column, int(attributes["rotary_dim"])  # type: ignore[arg-type]
        if attributes["style"] == "interleaved":
            first, other = f"{column} % 2 == 0", f"{column} ^ 1"
        else:
            half = turned // 2
            first = f"{column} < {half}"
            other = f"tl.where({first}, {column} + {half}, {column} - {half})"
        if turned < tile.size(0):
            other = f"tl.where({column} < {turned}, {other}, {column})"
        return tile.let("other", other), first

    @staticmethod
    def _turning(tile: Tile, column: str) -> str:
        """A column of cos and sin, which have those alone that turn."""
        turned = tile.size(1)
        return column if turned == tile.size(0) else f"tl.minimum({column}, {turned - 1})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        yield (-2, 0, 0), (-2,)

    def gradient(self, context: Gradient) -> list[str | None]:
        cos, sin = context.input(1), context.input(2)
        dx = context.add("rope_backward", context.incoming, cos, sin, **context.attributes)
        return [dx, None, None]

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 3 * outputs[0].elements

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        x, cos, _ = inputs
        turned = x.with_features(*x.features[:-1], int(cos.shape[-1]))
        wide = turned.with_dtype(promote(x.dtype, cos.dtype))
        if attributes["style"] == "interleaved":
            return 3 * wide.size_bytes / 2  # two products and their sum, of half the dims each
        partial = sympy.Integer(0) if turned == x else turned.size_bytes
        if wide.dtype == x.dtype:
            return partial
        return partial + 2 * wide.size_bytes - outputs[0].size_bytes


class RopeBackward(Rope):
    """dx = dy · cos + rotateᵀ(dy · sin)."""

    name = "rope_backward"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().temporaries(inputs, outputs, attributes) + inputs[2].size_bytes  # -sin

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.rope_{attributes['style']}_backward({', '.join(inputs)})"

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        column, dy = tile.column, tile.read(0)
        other, is_first = self._partner(tile, attributes)
        cos = tile.read(1, self._turning(tile, column))
        sin = tile.read(2, self._turning(tile, other))
        back = f"{tile.read(0, other)} * {sin}"
        y = f"{dy} * {cos} + tl.where({is_first}, {back}, -({back}))"
        turned = int(attributes["rotary_dim"])  # type: ignore[arg-type]
        return y if turned == tile.size(0) else f"tl.where({column} < {turned}, {y}, {dy})"

    def gradient(self, context: Gradient) -> list[str | None]:
        cos, sin = context.input(1), context.input(2)
        return [context.add("rope", context.incoming, cos, sin, **context.attributes), None, None]


class Append(Operator):
    """Keys or values where attention reads them: in the layer's cache, where the batch keeps one.

    Attribute `to`: `keys` or `values`. Programs for Triton alone have it, for what their kernels
    write there beside making it; without it attention writes its own, as PyTorch's always does.
    """

    name = "append"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if attributes["to"] not in ("keys", "values") or len(types[0].dims) != 3:
            raise TypeCheckError(
                f"append takes [T, heads, d] to 'keys' or 'values', not {types[0]} to "
                f"{attributes['to']!r}"
            )
        return (types[0],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return inputs[0]

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])

    def tiles(self, attributes: Attributes) -> bool:
        return True

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return tile.read(0)


class Attention(Operator):
    """Causal attention of each token to its own sequence, past ones in the KV cache included.

    out = softmax(softcap(scale · q kᵀ) + bias) v, per head; a KV head serves heads / kv_heads of
    them. `q: [T, heads, d]`, `k: [T, kv_heads, d]`, `v: [T, kv_heads, d_v]`; outputs
    `out: [T, heads, d_v]` and the log-sum-exp `lse: [T, heads]` in fp32. A further input, where
    `alibi`, is the slope of each head: bias = slope · (key position - query position). A further
    one, where `sinks`, is a logit of each head that takes weight from the softmax.

    Attributes: `scale`; `window`: keys seen, the token's own included, 0 for all; `softcap`: 0 for
    none.
    """

    name = "attention"
    is_product = True
    inputs = (3, 5)
    suffixes = ("lse",)
    sees_sequences = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        q, k, v = types[:3]
        if len(q.dims) != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
            raise TypeCheckError(f"attention of q {q}, k {k}, v {v}")
        if int(q.shape[1]) % int(k.shape[1]):
            raise TypeCheckError(f"{q.shape[1]} heads are no multiple of {k.shape[1]} KV heads")
        out = q.with_shape((*q.shape[:2], v.shape[2]))
        return out, tensor("f32", *q.shape[:2])

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.attention(batch, {_attention_arguments(inputs, 3, attributes)})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        """Heads, of which those that a KV head serves stand together."""
        yield (-2, -2, -2, *(-1,) * (len(types) - 3)), (-2, -1)

    def gradient(self, context: Gradient) -> list[str | None]:
        arguments = [context.input(i) for i in range(len(context.node.inputs))]
        dq, dk, dv = context.add_many(
            "attention_backward",
            context.incoming,
            context.output(0),
            context.output(1),
            *arguments,
            **context.attributes,
        )
        return [dq, dk, dv, None, None][: len(arguments)]

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        return (0, 1, 2, ~0, ~1)

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Scores in fp32, once with a cap and once without, their weights and a copy of one.
        return _score_bytes(inputs[0], attributes, 4 if attributes["softcap"] else 3)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        q, _, v = inputs[:3]
        keys = _mean_keys(attributes)
        return 2 * q.shape[0] * q.shape[1] * keys * (q.shape[2] + v.shape[2])

    def compute_dtype(self, inputs: Types) -> str:
        return inputs[0].dtype

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().moved_bytes(inputs, outputs, attributes) + _cached_bytes(inputs[1:3])


class AttentionBackward(Operator):
    """dq, dk, dv of attention, from dout, out, lse and the forward inputs."""

    name = "attention_backward"
    is_product = True
    inputs = (6, 8)
    suffixes = ("dk", "dv")
    sees_sequences = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return types[3], types[4], types[5]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # As forward, and the scores' gradient with its parts.
        return _score_bytes(inputs[3], attributes, 6 if attributes["softcap"] else 4)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.attention_backward(batch, {_attention_arguments(inputs, 6, attributes)})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        q, _, v = inputs[3:6]
        # Two products of the forward again (scores), and four of the gradients.
        keys = _mean_keys(attributes)
        return q.shape[0] * q.shape[1] * keys * (6 * q.shape[2] + 4 * v.shape[2])

    def compute_dtype(self, inputs: Types) -> str:
        return inputs[0].dtype

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The gradients of cached keys and values are added to: read and written.
        return super().moved_bytes(inputs, outputs, attributes) + 3 * _cached_bytes(inputs[4:6])


class WindowAttentionBackward(AttentionBackward):
    """The same where keys and values are in the KV cache: from dout, out, lse and q.

    dk and dv are final: what later windows have added up is in them.

    Attributes: those of attention; `kv_heads`; `value_size`, d_v.
    """

    name = "window_attention_backward"
    inputs = (4, 6)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        q = types[3]
        heads, size = int(attributes["kv_heads"]), int(attributes["value_size"])  # type: ignore[arg-type]
        if int(q.shape[1]) % heads or types[0].shape[2] != size:
            raise TypeCheckError(
                f"window_attention_backward of dout {types[0]} and q {q} with kv_heads={heads}, "
                f"value_size={size}"
            )
        kv = (q.shape[0], heads)
        return q, q.with_shape((*kv, q.shape[2])), q.with_shape((*kv, size))

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        whole = (*inputs[:4], "None", "None", *inputs[4:])
        return f"K.attention_backward(batch, {_attention_arguments(whole, 6, attributes)})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().flops((*inputs[:4], *outputs[1:]), outputs, attributes)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        own = Operator.moved_bytes(self, inputs, outputs, attributes)
        return own + 3 * _cached_bytes(outputs[1:])


class Experts(Operator):
    """A mixture of gated experts: each token through its `top_k` experts, weighted and summed.

    `x: [T, h]`, `indices: [T, k]`, `weights: [T, k]`, `gate_up: [E, 2f, h]`, `down: [E, h, f]`.
    """

    name = "experts"
    is_product = True
    inputs = (5, 7)
    executable = False

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        gate_up, down = inputs[3], inputs[4]
        rows = inputs[1].elements
        return 2 * rows * (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2])

    def compute_dtype(self, inputs: Types) -> str:
        return inputs[0].dtype

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # At most as many experts as tokens choose are read.
        share = sympy.Min(1, inputs[1].elements / inputs[3].shape[0])
        tokens = sympy.Add(*(type_.size_bytes for type_ in (*inputs[:3], *outputs)))
        return tokens + share * sympy.Add(*(type_.size_bytes for type_ in inputs[3:]))


class TopK(Operator):
    """The k largest of the last dim, and their indices."""

    name = "topk"
    suffixes = ("indices",)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        values = types[0].with_shape((*types[0].shape[:-1], int(attributes["k"])))  # type: ignore[arg-type]
        return values, values.with_dtype("i64")

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"torch.topk({inputs[0]}, {attributes['k']}, dim=-1)"

    def eager_saves(self, requires: Sequence[bool], attributes: Attributes) -> tuple[int, ...]:
        return (~1,)


class CrossEntropy(Operator):
    """loss = -log softmax(logits)[target] of each token, in fp32; 0 where the target is negative.

    `logits: [T, V]`, `targets: [T]` give `[T]`.
    """

    name = "cross_entropy"
    inputs = (2, 2)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (tensor("f32", types[0].shape[0]),)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.cross_entropy({', '.join(inputs)})"

    def shardings(self, types: Types, attributes: Attributes) -> Iterator[Sharding]:
        yield from super().shardings(types, attributes)
        yield Sharding((partitioned(-1), WHOLE), (WHOLE,), "cross_entropy_part")

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        wide = widened(inputs[0])
        return cast_bytes(inputs[0], wide.dtype) + wide.size_bytes  # and their log-probabilities

    def gradient(self, context: Gradient) -> list[str | None]:
        dlogits = context.add(
            "cross_entropy_backward", context.incoming, context.input(0), context.input(1)
        )
        return [dlogits, None]


class CrossEntropyBackward(Operator):
    """dlogits = dloss · (softmax(logits) - onehot(target))."""

    name = "cross_entropy_backward"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        return (types[1],)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.cross_entropy_backward({', '.join(inputs)})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        wide = widened(inputs[1])
        if wide == inputs[1]:
            return sympy.Integer(0)
        return 2 * wide.size_bytes - outputs[0].size_bytes  # the logits and the softmax in fp32


def _mean_keys(attributes: Attributes) -> sympy.Expr:
    """Keys that a token attends to, on average over a sequence: itself, and those before it."""
    window = attributes["window"]
    seen = sympy.Min(CONTEXT, window) if window else CONTEXT
    return seen - seen * (seen - 1) / (2 * CONTEXT)


def _cached_bytes(kv: Types) -> sympy.Expr:
    """Bytes of keys and values that are read beside the tokens' own: the rest of one context.

    As many tokens as a context has, or more, are whole sequences, and bring theirs along.
    """
    a_token = sympy.Add(*(type_.size_bytes / type_.shape[0] for type_ in kv))
    return a_token * sympy.Max(0, CONTEXT - kv[0].shape[0])


def _score_bytes(q: TensorType, attributes: Attributes, copies: int) -> sympy.Expr:
    """Bytes of scores and masks that the PyTorch kernel makes, of one sequence at a time.

    The fused kernel has none but the mask that a window or ALiBi needs, in q's dtype.

    Args:
        q: [T, heads, d].
        attributes: of the node.
        copies: scores [heads, S, S] in fp32 that are alive at once where it is not fused.
    """
    pairs, heads = CONTEXT**2, int(q.shape[1])
    if attributes["softcap"] or attributes.get("sinks"):
        return 4 * copies * heads * pairs
    if attributes.get("alibi"):
        # The product in fp32 and the bias in q's dtype, or the bias and its masked copy.
        return (8 if q.dtype == "f32" else 6) * heads * pairs
    return DTYPE_BYTES[q.dtype] * pairs if attributes["window"] else sympy.Integer(0)


def _norm_arguments(attributes: Attributes) -> str:
    return ", ".join(f"{name}={attributes[name]!r}" for name in sorted(attributes))


def _attention_arguments(inputs: Sequence[str], tensors: int, attributes: Attributes) -> str:
    rest = list(inputs[tensors:])
    arguments = [*inputs[:tensors], f"scale={attributes['scale']!r}"]
    arguments += [
        f"{name}={attributes[name]!r}" for name in ("window", "softcap") if attributes[name]
    ]
    arguments += [f"{name}={rest.pop(0)}" for name in ("alibi", "sinks") if attributes.get(name)]
    return ", ".join(arguments)


class LinearCrossEntropy(Operator):
    """The loss of a frozen head, and where there is `dloss` the gradient of its input.

    Inputs: x, W, b where `bias`, targets, and dloss. Logits are l = scale · (x Wᵀ + b), or with
    `softcap` c · tanh(l / c), and never exist for all tokens.
    """

    name = "linear_cross_entropy"
    inputs = (3, 5)
    is_product = True
    suffixes = ("dx",)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x = types[0]
        loss = tensor("f32", x.shape[0])  # as cross_entropy's
        trains = len(types) == 4 + bool(attributes["bias"])
        return (loss, x) if trains else (loss,)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        given = list(inputs)
        bias = given.pop(2) if attributes["bias"] else "None"
        trains = len(given) == 4
        arguments = [*given, *([] if trains else ["None"]), bias]
        arguments += [f"{name}={attributes[name]!r}" for name in ("scale", "softcap")]
        called = f"K.linear_cross_entropy({', '.join(arguments)})"
        return called if trains else f"{called}[0]"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return 2 * len(outputs) * inputs[0].elements * inputs[1].shape[0]


OPERATORS: tuple[Operator, ...] = (
    Append(),
    Attention(),
    AttentionBackward(),
    CrossEntropy(),
    CrossEntropyBackward(),
    Experts(),
    LayerNorm(),
    LayerNormBackward(),
    LinearCrossEntropy(),
    RmsNorm(),
    RmsNormBackward(),
    Rope(),
    RopeBackward(),
    TopK(),
    WindowAttentionBackward(),
)
