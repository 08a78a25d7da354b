"""Rotary embedding, attention over ragged batches, their gradients, and the cache's operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sympy

from pcg.errors import TypeCheckError, UnsupportedError
from pcg.ir.operators.base import (
    COUNT,
    FLOAT,
    NATURAL,
    PRESENT,
    TEXT,
    Aligned,
    Attributes,
    Bounds,
    Gradient,
    Operator,
    Tile,
    Types,
    cast_bytes,
    declared,
    optional,
    same_dims,
    widened,
    word,
)
from pcg.ir.types import CONTEXT, DTYPE_BYTES, TensorType, promote, tensor


class Append(Operator):
    """Store keys or values (`to`) where attention reads them: in the layer's cache, if any.

    Only programs for Triton have it: the kernels that compute keys and values store them. Elsewhere
    attention appends them.
    """

    name = "append"
    attributes = declared(to=word("keys", "values"))
    template = "{0}"

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if attributes["to"] not in ("keys", "values") or len(types[0].dims) != 3:
            raise TypeCheckError(
                f"append takes [T, heads, d] to 'keys' or 'values', not {types[0]} to "
                f"{attributes['to']!r}"
            )
        return (types[0],)

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        return same_dims(types[0])

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        return tile.read(0)


BLOCK_BYTES = 256 * 2**20
"""The most bytes of scores and masks that the PyTorch kernel has at once, unless a row has more."""
_SCORING = {
    "scale": FLOAT,
    "window": NATURAL,
    "chunk": optional(COUNT),
    "softcap": FLOAT,
    "alibi": PRESENT,
    "sinks": PRESENT,
    "library": optional(TEXT),
}


class Attention(Operator):
    """Causal attention of each token to its own sequence, including earlier tokens in the KV cache.

    out = softmax(softcap(scale · q kᵀ) + bias) v, per head; a KV head serves heads / kv_heads
    heads. `q: [T, heads, d]`, `k: [T, kv_heads, d]`, `v: [T, kv_heads, d_v]`; outputs `out: [T,
    heads, d_v]` and the log-sum-exp `lse: [T, heads]` in fp32. With `alibi`, a further input is the
    slope of each head: bias = slope · (key position - query position). With `sinks`, a further
    input is a logit of each head that takes weight from the softmax. With `rotary`, the last inputs
    are `cos, sin: [T, n]`, by which q and k are turned first, as by `rope` of style `half`.

    Attributes: `scale`; `window`: visible keys, including the token's own, 0 for all; `chunk`: if
    given, a token sees keys from the last multiple of it on alone; `softcap`: 0 for none;
    `library`: the library that computes it, if any: see `pcg.kernels.attention_libraries`.
    """

    name = "attention"
    attributes = declared(**_SCORING, rotary=PRESENT)
    is_product = True
    inputs = (3, 7)
    suffixes = ("", "lse")
    sees_sequences = True
    computes_in_first = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        if attributes.get("rotary"):
            Rope().infer((types[0], *types[-2:]), {"rotary_dim": int(types[-1].shape[-1])})
            types = types[:-2]
        return _attention_outputs(types, attributes)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        tables = ""
        if attributes.get("rotary"):
            *inputs, cos, sin = inputs
            tables = f", cos={cos}, sin={sin}"
        return f"K.attention(batch, {_attention_arguments(inputs, 3, attributes)}{tables})"

    def aligned(self, types: Types, attributes: Attributes) -> Iterator[Aligned]:
        """Yield the head dims; the heads that share a KV head stay together."""
        tables = (0, 0) if attributes.get("rotary") else ()
        yield (-2, -2, -2, *(-1,) * (len(types) - 3 - len(tables)), *tables), (-2, -1)

    def gradient(self, context: Gradient) -> list[str | None]:
        if context.attributes.get("rotary"):
            raise UnsupportedError("attention with rotary embedding has no gradient; it serves")
        # Read the inputs first: the backward graph takes them in this order.
        inputs = context.inputs
        outputs = context.output(0), context.output(1)
        dq, dk, dv = context.add_many(
            "attention_backward", context.incoming, *outputs, *inputs, **context.attributes
        )
        return [dq, dk, dv, None, None][: len(inputs)]

    def context_inputs(self, inputs: Types) -> Types:
        return inputs[1:3]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # Scores in fp32, with and without a cap, their weights and a copy.
        scores = _score_bytes(inputs[0], attributes, 4 if attributes["softcap"] else 3)
        turned = inputs[:2] if attributes.get("rotary") else ()
        return scores + sum(type_.size_bytes for type_ in turned)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        q, _, v = inputs[:3]
        keys = _mean_keys(attributes)
        return 2 * q.shape[0] * q.shape[1] * keys * (q.shape[2] + v.shape[2])

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().moved_bytes(inputs, outputs, attributes) + _cached_bytes(inputs[1:3])


class AttentionBackward(Operator):
    """dq, dk, dv of attention, from dout, out, lse and the forward inputs."""

    name = "attention_backward"
    attributes = declared(**_SCORING)
    row_bounded_in = Bounds({1: "|ds| <= p |dout| e", 5: "|ds| <= p |dout| eᵀ"})
    finely_bounded_in = Bounds(
        {
            3: "|dp| <= p (exp(scale e |k|ᵀ) - 1)",
            4: "|dp| <= p (exp(scale |q| eᵀ) - 1)",
        }
    )
    is_product = True
    inputs = (6, 8)
    suffixes = ("", "dk", "dv")
    sees_sequences = True
    computes_in_first = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        _check_outputs(types, _attention_outputs(types[3:], attributes))
        return types[3], types[4], types[5]

    def context_inputs(self, inputs: Types) -> Types:
        return inputs[4:6]

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # As in the forward; also the scores' gradient with its parts, and dout in their precision.
        scores = _score_bytes(inputs[3], attributes, 6 if attributes["softcap"] else 4)
        is_fused = not attributes["softcap"] and not attributes.get("sinks")
        return scores if is_fused else scores + cast_bytes(inputs[0], widened(inputs[0]).dtype)

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        return f"K.attention_backward(batch, {_attention_arguments(inputs, 6, attributes)})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        q, _, v = inputs[3:6]
        # Recomputed scores and weights, and four products of the gradients.
        keys = _mean_keys(attributes)
        return q.shape[0] * q.shape[1] * keys * (6 * q.shape[2] + 4 * v.shape[2])

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        # The gradients of cached keys and values are accumulated: read and written.
        return super().moved_bytes(inputs, outputs, attributes) + 3 * _cached_bytes(inputs[4:6])


class WindowAttentionBackward(AttentionBackward):
    """dq, dk, dv from dout, out, lse and q, with keys and values in the KV cache.

    dk and dv are final: they include the sums of later windows. `value_size` is d_v.
    """

    name = "window_attention_backward"
    attributes = declared(**_SCORING, kv_heads=COUNT, value_size=COUNT)
    row_bounded_in = Bounds({1: "|ds| <= p |dout| e"})
    finely_bounded_in = Bounds({3: "|dp| <= p (exp(scale e |k|ᵀ) - 1)"})
    inputs = (4, 6)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        q, *of_heads = types[3:]
        kv = (q.shape[0], attributes["kv_heads"])
        k = q.with_shape((*kv, q.shape[2]))
        v = q.with_shape((*kv, attributes["value_size"]))
        return super().infer((*types[:3], q, k, v, *of_heads), attributes)

    def context_inputs(self, inputs: Types) -> Types:
        return ()  # keys and values are in the cache

    def source(self, inputs: Sequence[str], attributes: Attributes) -> str:
        whole = (*inputs[:4], "None", "None", *inputs[4:])
        return f"K.attention_backward(batch, {_attention_arguments(whole, 6, attributes)})"

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().flops((*inputs[:4], *outputs[1:]), outputs, attributes)

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        token_bytes = Operator.moved_bytes(self, inputs, outputs, attributes)
        return token_bytes + 3 * _cached_bytes(outputs[1:])


class LatentAttention(Operator):
    """Attention whose keys and values are products of latents, which the KV cache holds instead.

    [k'; v] = W c + scale · B A c, per head;  k = [k'; r];  out = attention(q, k, v). `q: [T, heads,
    d]`, latents `c: [T, n]`, the keys' common part `r: [T, 1, d_r]`, `W: [heads (d - d_r + d_v),
    n]`, and LoRA of W, if any. Outputs are those of `attention`, with d_v = `value_size`; the cache
    has n + d_r numbers a token.
    """

    name = "latent_attention"
    attributes = declared(scale=FLOAT, value_size=COUNT)
    template = "K.latent_attention(batch, {inputs}, scale={scale!r}, value_size={value_size})"
    is_product = True
    inputs = (4, 6)
    suffixes = ("", "lse")
    sees_sequences = True
    computes_in_first = True
    counts_on_host = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        q, latents, rest, weight = types[:4]
        fits = len(latents.dims) == 2 and len(rest.dims) == 3 and rest.shape[:2] == (q.shape[0], 1)
        if not fits or latents.shape[1] != weight.shape[-1]:
            raise TypeCheckError(f"latent_attention of q {q}, c {latents}, r {rest}, W {weight}")
        _check_expansion(q, int(rest.shape[2]), attributes["value_size"], types[3:])
        return q.with_shape((*q.shape[:2], attributes["value_size"])), tensor("f32", *q.shape[:2])

    @staticmethod
    def cached(types: Types) -> TensorType:
        """Return the type of what the cache holds, a head of latents and the common part."""
        _, latents, rest = types[:3]
        return latents.with_shape((latents.shape[0], 1, latents.shape[1] + rest.shape[2]))

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _expanded_bytes(inputs[0], outputs[0]) + _score_bytes(inputs[0], _SOFT, 3)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        q, weight = inputs[0], inputs[3]
        pairs = 2 * q.shape[0] * q.shape[1] * (CONTEXT + 1) / 2
        return pairs * (q.shape[2] + outputs[0].shape[2]) + 2 * q.shape[0] * weight.elements

    def moved_bytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().moved_bytes(inputs, outputs, attributes) + _cached_bytes(
            (self.cached(inputs),)
        )


class LatentWindowBackward(Operator):
    """dq, dk, dv of `latent_attention` from dout, out, lse, q, W and its LoRA; latents are cached.

    dk and dv are final, as those of `window_attention_backward`; the keys' last `rest` entries are
    their common part.
    """

    name = "latent_window_backward"
    attributes = declared(scale=FLOAT, rest=COUNT)
    template = "K.latent_window_backward(batch, {inputs}, scale={scale!r}, rest={rest})"
    is_product = True
    inputs = (5, 7)
    suffixes = ("", "dk", "dv")
    sees_sequences = True
    computes_in_first = True
    counts_on_host = True

    def infer(self, types: Types, attributes: Attributes) -> Types:
        dout, q = types[0], types[3]
        _check_expansion(q, attributes["rest"], int(dout.shape[-1]), types[4:])
        out = q.with_shape((*q.shape[:2], dout.shape[-1]))
        _check_outputs(types, (out, tensor("f32", *q.shape[:2])))
        return q, q, out

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return _expanded_bytes(inputs[3], inputs[0]) + _score_bytes(inputs[3], _SOFT, 4)

    def flops(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        q, weight = inputs[3:5]
        pairs = q.shape[0] * q.shape[1] * (CONTEXT + 1) / 2
        of_pairs = 6 * q.shape[2] + 4 * inputs[0].shape[2]
        return pairs * of_pairs + 2 * q.shape[0] * weight.elements


_SOFT: Attributes = {"softcap": 0.0, "window": 0, "sinks": True}
"""Attributes of attention whose scores are in memory, as keys and values differ in size."""


def _expanded_bytes(q: TensorType, out: TensorType) -> sympy.Expr:
    """Return the bytes of the keys and values of a context."""
    return DTYPE_BYTES[q.dtype] * q.shape[1] * (q.shape[2] + out.shape[2]) * CONTEXT


def _check_expansion(q: TensorType, rest: int, value_size: int, weights: Types) -> None:
    """Check that a weight, with LoRA if any, gives the keys of q and the values of each head."""
    weight, *lora = weights
    fits = len(q.dims) == 3 and len(weight.dims) == 2
    if not fits or weight.shape[0] != q.shape[1] * (q.shape[2] - rest + value_size):
        raise TypeCheckError(f"{weight} does not give keys and values of size {value_size} for {q}")
    if lora:
        a, b = lora
        rank = a.shape[0]
        if (a.shape, b.shape) != ((rank, weight.shape[1]), (weight.shape[0], rank)):
            raise TypeCheckError(f"LoRA {a}, {b} of a weight {weight}")


def _attention_outputs(types: Sequence[TensorType], attributes: Attributes) -> Types:
    q, k, v, *of_heads = types
    fits = len(q.dims) == len(v.dims) == 3 and k.shape[:2] == v.shape[:2]
    if not fits or k.shape != (q.shape[0], k.shape[1], q.shape[2]):
        raise TypeCheckError(f"attention of q {q}, k {k}, v {v}")
    _check_of_heads(q, of_heads, attributes)
    if attributes["window"] and attributes.get("chunk"):
        raise TypeCheckError("attention has a window or chunks, not both")
    if int(q.shape[1]) % int(k.shape[1]):
        raise TypeCheckError(f"{q.shape[1]} heads are no multiple of {k.shape[1]} KV heads")
    out = q.with_shape((*q.shape[:2], v.shape[2]))
    return out, tensor("f32", *q.shape[:2])


def _check_of_heads(
    q: TensorType, head_types: Sequence[TensorType], attributes: Attributes
) -> None:
    names = [name for name in ("alibi", "sinks") if attributes.get(name)]
    if len(head_types) != len(names) or any(type_.shape != q.shape[1:2] for type_ in head_types):
        wanted = " and ".join(f"{name} [{q.shape[1]}]" for name in names) or "nothing"
        shown = ", ".join(map(str, head_types)) or "nothing"
        raise TypeCheckError(f"attention of q {q} takes {wanted} behind v, not {shown}")


def _check_outputs(types: Types, outputs: Types) -> None:
    dout, out, lse = types[:3]
    if (dout.shape, out.shape) != (outputs[0].shape,) * 2 or lse.shape != outputs[1].shape:
        raise TypeCheckError(
            f"the gradient of attention takes dout and out {outputs[0]} and lse {outputs[1]}, not "
            f"{dout}, {out} and {lse}"
        )


def _mean_keys(attributes: Attributes) -> sympy.Expr:
    """Return the keys that a token attends to, including itself, on average over a sequence."""
    if attributes.get("chunk"):
        return (sympy.Min(CONTEXT, attributes["chunk"]) + 1) / 2
    window = attributes["window"]
    seen = sympy.Min(CONTEXT, window) if window else CONTEXT
    return seen - seen * (seen - 1) / (2 * CONTEXT)


def _cached_bytes(kv: Types) -> sympy.Expr:
    """Return the bytes of the keys and values in the rest of a context."""
    a_token = sympy.Add(*(type_.size_bytes / type_.shape[0] for type_ in kv))
    return a_token * sympy.Max(0, CONTEXT - kv[0].shape[0])


def _score_bytes(q: TensorType, attributes: Attributes, copies: int) -> sympy.Expr:
    """Return the bytes of scores and masks of the PyTorch kernel, without `BLOCK_BYTES`.

    Sequences run one at a time. The fused kernel has only the mask of a window or ALiBi, in q's
    dtype; otherwise `copies` of the scores [heads, S, S] in fp32 are alive at the same time.
    """
    pairs, heads = CONTEXT**2, int(q.shape[1])
    if attributes["softcap"] or attributes.get("sinks"):
        return 4 * copies * heads * pairs
    if attributes.get("alibi"):
        # Distances and their products in fp32, or the products and the bias in q's dtype.
        return (4 * heads + 4 if q.dtype == "f32" else 6 * heads) * pairs
    is_masked = attributes["window"] or attributes.get("chunk")
    return DTYPE_BYTES[q.dtype] * pairs if is_masked else sympy.Integer(0)


def _attention_arguments(inputs: Sequence[str], tensors: int, attributes: Attributes) -> str:
    rest = list(inputs[tensors:])
    arguments = [*inputs[:tensors], f"scale={attributes['scale']!r}"]
    arguments += [
        f"{name}={attributes[name]!r}"
        for name in ("window", "chunk", "softcap")
        if attributes.get(name)
    ]
    arguments += [f"{name}={rest.pop(0)}" for name in ("alibi", "sinks") if attributes.get(name)]
    if attributes.get("library"):
        arguments.append(f"library={attributes['library']!r}")
    return ", ".join(arguments)


# --------------------------------------------------------------------------------------------- rope


class Rope(Operator):
    """Rotary embedding: y = x · cos + rotate(x) · sin on the first `rotary_dim` of each head.

    `x: [T, heads, d]`, `cos, sin: [T, rotary_dim]`. The `style` pairs up dims: `half` (i with i +
    rotary_dim/2: Llama, GPT-NeoX) or `interleaved` (2i with 2i + 1: GPT-J, Cohere).
    """

    name = "rope"
    attributes = declared(rotary_dim=COUNT, style=word("half", "interleaved"))
    template = "K.rope_{style}({inputs})"
    inputs = (3, 3)

    def infer(self, types: Types, attributes: Attributes) -> Types:
        x, cos, sin = types
        turned = attributes["rotary_dim"]
        expected = (x.shape[0], turned)
        fits = len(x.dims) == 3 and turned % 2 == 0 and turned <= int(x.shape[-1])
        if not fits or cos.shape != expected or sin.shape != expected:
            raise TypeCheckError(
                f"rope of {x} takes cos and sin {list(expected)}, not {cos}, {sin}"
            )
        return (x,)

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        column, x = tile.column, tile.read(0)
        other, is_first = self._partner(tile, attributes)
        cos, sin = (tile.read(index, self._turning(tile, column)) for index in (1, 2))
        partner = tile.read(0, other)
        y = f"{x} * {cos} + tl.where({is_first}, -{partner}, {partner}) * {sin}"
        turned = attributes["rotary_dim"]
        return y if turned == tile.size(0) else f"tl.where({column} < {turned}, {y}, {x})"

    @staticmethod
    def _partner(tile: Tile, attributes: Attributes) -> tuple[str, str]:
        """Return each column's paired column, and whether a column is first in its pair."""
        column, turned = tile.column, attributes["rotary_dim"]
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
        """Return a column of cos and sin, which have only the rotated columns."""
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
            return 3 * wide.size_bytes / 2  # two products and their sum, each of half the dims
        partial = sympy.Integer(0) if turned == x else turned.size_bytes
        if wide.dtype == x.dtype:
            return partial
        return partial + 2 * wide.size_bytes - outputs[0].size_bytes


class RopeBackward(Rope):
    """dx = dy · cos + rotateᵀ(dy · sin)."""

    name = "rope_backward"
    template = "K.rope_{style}_backward({inputs})"

    def temporaries(self, inputs: Types, outputs: Types, attributes: Attributes) -> sympy.Expr:
        return super().temporaries(inputs, outputs, attributes) + inputs[2].size_bytes  # -sin

    def tile(self, tile: Tile, attributes: Attributes) -> str:
        column, dy = tile.column, tile.read(0)
        other, is_first = self._partner(tile, attributes)
        cos = tile.read(1, self._turning(tile, column))
        sin = tile.read(2, self._turning(tile, other))
        back = f"{tile.read(0, other)} * {sin}"
        y = f"{dy} * {cos} + tl.where({is_first}, {back}, -({back}))"
        turned = attributes["rotary_dim"]
        return y if turned == tile.size(0) else f"tl.where({column} < {turned}, {y}, {dy})"

    def gradient(self, context: Gradient) -> list[str | None]:
        cos, sin = context.input(1), context.input(2)
        return [context.add("rope", context.incoming, cos, sin, **context.attributes), None, None]
