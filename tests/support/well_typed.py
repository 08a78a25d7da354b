"""Hypothesis strategies: random well-typed graphs in which every operator of the table can occur.

A recipe applies one operator to operands of types that it takes. An operand is a value that the
graph has already, a new input, or a new parameter.

Long because it has a recipe for each operator of the table.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Graph, Parameter, Value
from pcg.ir.operators.bypass import Activate
from pcg.ir.types import (
    DTYPE_BYTES,
    TOKENS,
    Dim,
    Size,
    State,
    TensorType,
    part_of_tokens,
    tensor,
)

FLOATS = ("f64", "f32", "bf16", "f16")
NAMES = st.text("abcxyzABC0189_.", min_size=1, max_size=8)
STRINGS = st.text(st.characters(codec=None), max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SMALL = st.integers(1, 6)


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def rebuilt(size: sympy.Expr) -> sympy.Expr:
    """The size, built again from its atoms: sympy does not evaluate ceiling(S + 1/S) at once."""
    return size.func(*map(rebuilt, size.args)) if size.args else size


SYMBOLIC_SIZES: SearchStrategy[sympy.Expr] = st.recursive(
    st.one_of(
        st.sampled_from([symbol("S"), symbol("r"), symbol("tp"), symbol("Min")]),
        st.integers(1, 2**40).map(sympy.Integer),
    ),
    lambda sizes: st.one_of(
        st.tuples(sizes, sizes).map(lambda pair: pair[0] + pair[1]),
        st.tuples(sizes, sizes).map(lambda pair: pair[0] * pair[1]),
        st.tuples(sizes, sizes).map(lambda pair: pair[0] / pair[1]),
        st.tuples(sizes, sizes).map(lambda pair: pair[0] - pair[1]),
        st.tuples(sizes, st.integers(-3, 3)).map(lambda pair: pair[0] ** pair[1]),
        st.lists(sizes, min_size=1, max_size=3).map(lambda sizes: sympy.Min(*sizes)),
        st.lists(sizes, min_size=1, max_size=3).map(lambda sizes: sympy.Max(*sizes)),
        sizes.map(sympy.ceiling),
        sizes.map(sympy.floor),
    ),
    max_leaves=5,
).filter(
    lambda size: (
        bool(size.free_symbols)
        and not size.has(sympy.zoo, sympy.oo, sympy.nan)
        and rebuilt(size) == size
        and all(abs(n.p) < 2**63 and n.q < 2**63 for n in size.atoms(sympy.Rational))
        and all(abs(p.exp) <= 16 for p in size.atoms(sympy.Pow))
    )
)
FEATURES: SearchStrategy[tuple[int, ...]] = st.lists(SMALL, max_size=3).map(tuple)
ATTRIBUTES: SearchStrategy[Attribute] = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    STRINGS,
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(tuple),
)


class Maker:
    """A builder, and the draws that find operands for it."""

    def __init__(self, draw: DrawFn) -> None:
        self.draw = draw
        self.builder = Builder("g")

    def fresh_type(self, *, symbolic: bool = True) -> TensorType:
        """Token-wise floats of any features; sometimes of symbolic ones."""
        sizes: tuple[Size, ...] = self.draw(FEATURES)
        if symbolic and self.draw(st.booleans()):
            sizes = (*sizes, self.draw(SYMBOLIC_SIZES))
        return tensor(self.draw(st.sampled_from(FLOATS)), TOKENS, *sizes)

    def any(self, *, rank: int = 1, symbolic: bool = True) -> str:
        """A float value of at least `rank` dims."""
        known = [
            name
            for name, type_ in self.builder.types.items()
            if type_.is_float
            and len(type_.dims) >= rank
            and (symbolic or all(isinstance(size, int) for size in type_.shape[1:]))
            and (symbolic or isinstance(type_.shape[0], int) or type_.is_token_wise)
        ]
        if known and self.coin():
            return self.draw(st.sampled_from(known))
        type_ = self.fresh_type(symbolic=symbolic)
        missing = max(rank - len(type_.dims), 0)
        return self.new(tensor(type_.dtype, *type_.shape, *self.sizes(missing)))

    def of(self, dtype: str, *sizes: Size) -> str:
        """A value of this type."""
        type_ = tensor(dtype, *sizes)
        known = [name for name, other in self.builder.types.items() if other == type_]
        if known and self.coin():
            return self.draw(st.sampled_from(known))
        return self.new(type_)

    def new(self, type_: TensorType) -> str:
        name = self.builder.fresh(self.draw(NAMES))
        if type_.is_token_wise or self.draw(st.booleans()):
            return self.builder.input(name, type_)
        role = self.draw(st.sampled_from(["frozen", "constant", "adapter"]))
        source = self.draw(STRINGS.filter(bool))
        transposed = len(type_.dims) == 2 and self.draw(st.booleans())
        return self.builder.parameter(Parameter(Value(name, type_), role, source, transposed))

    def coin(self) -> bool:
        return self.draw(st.booleans())

    def type(self, name: str) -> TensorType:
        return self.builder.types[name]

    def like(self, name: str) -> str:
        type_ = self.type(name)
        return self.of(type_.dtype, *type_.shape)

    def sizes(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw(SMALL) for _ in range(count))

    def feature_dim(self, name: str) -> int:
        """A dim counted from the end that is not the token dim."""
        return self.draw(st.integers(1 - len(self.type(name).dims), -1))

    def matrix(self) -> str:
        """A token-wise value of two dims, [T, n]."""
        return self.of(self.draw(st.sampled_from(FLOATS)), TOKENS, *self.sizes(1))

    def add(self, op: str, *inputs: str, **attributes: Attribute) -> tuple[str, ...]:
        return self.builder.add_many(
            op,
            inputs,
            name=self.draw(st.one_of(st.just(""), NAMES)),
            scope=self.draw(st.one_of(NAMES, STRINGS)),
            **attributes,
        )


Recipe = Callable[[Maker, str], Sequence[str]]


def unary(make: Maker, op: str) -> Sequence[str]:
    return make.add(op, make.any())


def gelu(make: Maker, op: str) -> Sequence[str]:
    x = make.any()
    inputs = (make.like(x), x) if op == "gelu_backward" else (x,)
    return make.add(op, *inputs, approximate=make.draw(st.sampled_from(["none", "tanh"])))


def clamp(make: Maker, op: str) -> Sequence[str]:
    x = make.any()
    inputs = (make.like(x), x) if op == "clamp_backward" else (x,)
    bounds = make.draw(st.dictionaries(st.sampled_from(["min", "max"]), FINITE, min_size=1))
    return make.add(op, *inputs, **bounds)


def power(make: Maker, op: str) -> Sequence[str]:
    return make.add(op, make.any(), exponent=make.draw(FINITE))


def cast(make: Maker, op: str) -> Sequence[str]:
    return make.add(op, make.any(), dtype=make.draw(st.sampled_from(list(DTYPE_BYTES))))


def binary(make: Maker, op: str) -> Sequence[str]:
    x = make.any()
    if make.draw(st.booleans()):
        shape = list(make.type(x).shape)
        for dim in range(1, len(shape)):
            shape[dim] = make.draw(st.sampled_from([1, shape[dim]]))
        shape = shape[make.draw(st.integers(0, len(shape) - 1)) :]
        return make.add(op, x, make.of(make.draw(st.sampled_from(FLOATS)), *shape))
    scalar = make.draw(st.one_of(st.integers(-(2**63), 2**63 - 1), FINITE))
    flags: dict[str, Any] = make.draw(st.dictionaries(st.just("reversed"), st.booleans()))
    return make.add(op, x, scalar=scalar, **flags)


def unary_backward(make: Maker, op: str) -> Sequence[str]:
    x = make.any()
    return make.add(op, make.like(x), x)


def packed_signs(make: Maker, op: str) -> Sequence[str]:
    x = make.new(tensor(make.draw(st.sampled_from(FLOATS)), TOKENS, 16))
    signs = make.add("pack_signs", x)
    return signs if op == "pack_signs" else make.add(op, make.like(x), *signs)


ENCODERS = {
    "dequantize_fp8": "quantize_fp8",
    "dequantize_int8": "quantize_int8",
    "unpack_bf16": "pack_bf16",
}


def lossy(make: Maker, op: str) -> Sequence[str]:
    encoder = ENCODERS.get(op, op)
    dtype = "bf16" if encoder == "pack_bf16" else make.draw(st.sampled_from(FLOATS))
    width = 2 * make.draw(SMALL) if encoder == "pack_bf16" else make.draw(SMALL)
    codes = make.add(encoder, make.of(dtype, TOKENS, *make.sizes(make.coin()), width))
    if op == encoder:
        return codes
    return make.add(op, *codes, **({} if op == "unpack_bf16" else {"dtype": dtype}))


def standardized(make: Maker, op: str) -> Sequence[str]:
    centered = make.coin()
    made = make.add("standardized", make.matrix(), eps=make.draw(FINITE), centered=centered)
    if op == "standardized":
        return made
    weight = [make.of("f32", make.type(made[0]).shape[-1])] if make.coin() else []
    given = (make.like(made[0]), *made, *weight)
    return make.add(op, *given, offset=make.draw(FINITE), centered=centered)


def carried(make: Maker, op: str) -> Sequence[str]:
    x = make.any(symbolic=op != "rowwise")
    dtype, shape = make.type(x).dtype, make.type(x).shape
    if op == "rowwise":
        attributes: Any = {"target": "aten.flip.default", "arguments": "{0}, [-1]"}
        features = tuple(map(int, make.type(x).features))
        return make.add(op, x, dtype=dtype, reads=features, features=features, **attributes)
    given = [x, *(make.of(dtype, *shape[1:]) for _ in range(make.draw(st.integers(0, 2))))]
    target = ("aten.elu.default", "aten.maximum.default", "aten.addcmul.default")[len(given) - 1]
    attributes = {
        "target": target,
        "arguments": ("{0}", "{0}, {1}", "{0}, {1}, {2}")[len(given) - 1],
    }
    if op == "pointwise":
        return make.add(op, *given, dtype=dtype, **attributes)
    place = make.draw(st.integers(0, len(given) - 1))
    return make.add(op, make.like(x), *given, place=place, **attributes)


def linear(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2)
    dtype, size, (out,) = make.type(x).dtype, make.type(x).shape[-1], make.sizes(1)
    bias = [make.of(dtype, out)] if make.draw(st.booleans()) else []
    return make.add(op, x, make.of(dtype, out, size), *bias)


def linear_backward(make: Maker, op: str) -> Sequence[str]:
    dy = make.any(rank=2)
    return make.add(op, dy, make.of(make.type(dy).dtype, make.type(dy).shape[-1], *make.sizes(1)))


def base_piece(make: Maker, op: str) -> Sequence[str]:
    """A call of a piece: two values, their sum and its half."""
    x = make.matrix()
    type_ = make.type(x)
    text = (
        f"graph @piece(%v0: {type_}, %v1: {type_}) {{\n  %v2: {type_} = add(%v0, %v1)\n"
        f"  %v3: {type_} = mul(%v2) {{scalar=0.5}}\n  return %v2, %v3\n}}"
    )
    return make.add(op, x, make.like(x), make.of(type_.dtype, *make.sizes(2)), text=text)


def shrink(make: Maker, op: str) -> Sequence[str]:
    x = make.matrix()
    return make.add(op, x, make.of("f32", *make.sizes(1), make.type(x).shape[-1]))


def expand_add(make: Maker, op: str) -> Sequence[str]:
    y, (rank,) = make.matrix(), make.sizes(1)
    s, out = make.of("f32", TOKENS, rank), make.type(y).shape[-1]
    return make.add(op, y, s, make.of("f32", 1 if op == "expand_add_part" else out, rank))


def linear_group(make: Maker, op: str) -> Sequence[str]:
    """`linear_group`, and `lora_linear` with an A and a B for each output, or for some."""
    x = make.matrix()
    dtype, size = make.type(x).dtype, make.type(x).shape[-1]
    count = make.draw(st.integers(1 if op == "lora_linear" else 2, 3))
    bias = make.draw(st.booleans())
    outs = [make.sizes(1)[0] for _ in range(count)]
    inputs = [make.of(dtype, out, size) for out in outs]
    if bias:
        inputs += [make.of(dtype, out) for out in outs]
    attributes: dict[str, Any] = {"bias": bias, "count": count}
    if op == "lora_linear":
        adapted = make.draw(
            st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(sorted)
        )
        if len(adapted) < count or make.coin():
            attributes["adapted"] = tuple(adapted)
        else:
            adapted = [*range(count)]
        ranks = [make.sizes(1)[0] for _ in adapted]
        inputs += [make.of("f32", rank, size) for rank in ranks]
        inputs += [make.of("f32", outs[i], r) for i, r in zip(adapted, ranks, strict=True)]
        if make.coin():
            attributes["deferred"] = True
    return make.add(op, x, *inputs, **attributes)


def add_deferred(make: Maker, op: str) -> Sequence[str]:
    y = make.matrix()
    return make.add(op, y, make.of(make.type(y).dtype, *make.type(y).shape))


def lora_linear_backward(make: Maker, op: str) -> Sequence[str]:
    dz, (size, rank) = make.matrix(), make.sizes(2)
    dtype, out = make.type(dz).dtype, make.type(dz).shape[-1]
    weight, a, b = make.of(dtype, out, size), make.of("f32", rank, size), make.of("f32", out, rank)
    return make.add(op, dz, weight, a, b, make.of("f32", make.type(dz).shape[0], rank))


def lora_group(make: Maker, op: str) -> Sequence[str]:
    """Two or three sites of one input, each as wide and of as great a rank as it likes."""
    x, tokens = make.matrix(), make.type(make.matrix()).shape[0]
    dtype, (size, *outs) = make.type(x).dtype, make.sizes(4)
    sites = outs[: make.draw(st.integers(2, 3))]
    ranks = [make.sizes(1)[0] for _ in sites]
    s = [make.of("f32", tokens, rank) for rank in ranks]
    if op == "asked_outer_group":
        return make.add(op, *s, make.of(dtype, tokens, size), of="d_lora_A")
    y = [make.of(dtype, tokens, out) for out in sites]
    b = [make.of("f32", out, rank) for out, rank in zip(sites, ranks, strict=True)]
    if op == "expand_add_group":
        return make.add(op, *y, *s, *b)
    if op == "shrink_group":
        own = make.type(x).shape[-1]
        return make.add(op, x, *(make.of("f32", rank, own) for rank in ranks))
    weights = [make.of(dtype, out, size) for out in sites]
    a = [make.of("f32", rank, size) for rank in ranks]
    if plain := int(len(sites) == 2 and make.coin()):
        y.append(make.of(dtype, tokens, size))
        weights.append(make.of(dtype, size, size))
    return make.add(op, *y, *weights, *a, *b, *s, plain=plain)


def bottleneck_backward(make: Maker, op: str) -> Sequence[str]:
    dz, (size,) = make.matrix(), make.sizes(1)
    tokens, out = make.type(dz).shape
    function = make.draw(st.sampled_from(sorted(Activate.gradients)))
    given = (make.of("f32", out, size), make.of("f32", tokens, size), make.of("f32", size))
    return make.add(op, dz, *given, function=function)


def outer(make: Maker, op: str) -> Sequence[str]:
    named = {"of": "d_lora_A"} if op == "asked_outer" else {}
    return make.add(op, make.matrix(), make.matrix(), **named)


def scaled_outer(make: Maker, op: str) -> Sequence[str]:
    dz, s = make.matrix(), make.matrix()
    return make.add(op, dz, s, make.of("f32", make.type(dz).shape[-1], make.type(s).shape[-1]))


def bias_add(make: Maker, op: str) -> Sequence[str]:
    y = make.matrix()
    size = make.type(y).shape[-1]
    base = [make.of(make.type(y).dtype, size)] if make.coin() else []
    return make.add(op, y, make.of("f32", size), *base)


def dropout(make: Maker, op: str) -> Sequence[str]:
    p = make.draw(st.floats(0, 1, exclude_min=True))
    key = make.draw(st.integers(0, 2**31))
    dtypes: dict[str, Any] = make.draw(st.dictionaries(st.just("dtype"), st.sampled_from(FLOATS)))
    return make.add(op, make.matrix(), p=p, key=key, **dtypes)


def scale(make: Maker, op: str) -> Sequence[str]:
    y = make.matrix()
    vectors = [make.of("f32", make.type(y).shape[-1]) for _ in range(1 + make.coin())]
    return make.add(op, y, *vectors)


def inner(make: Maker, op: str) -> Sequence[str]:
    y = make.matrix()
    base = [make.of("f32", make.type(y).shape[-1])] if make.coin() else []
    named = {"of": "d_ia3_l"} if op == "asked_inner" else {}
    return make.add(op, y, make.like(y), *base, dtype=make.draw(st.sampled_from(FLOATS)), **named)


def column_norm(make: Maker, op: str) -> Sequence[str]:
    rank, out, in_ = make.sizes(3)
    a, b = make.of("f32", rank, in_), make.of("f32", out, rank)
    return make.add(op, make.of(make.draw(st.sampled_from(FLOATS)), out, in_), a, b)


def column_factor(make: Maker, op: str) -> Sequence[str]:
    (out,) = make.sizes(1)
    return make.add(op, make.of("f32", out), make.of("f32", out))


def vera_down(make: Maker, op: str) -> Sequence[str]:
    rank, in_, more = make.sizes(3)
    return make.add(op, make.of("f32", rank, in_ + more), size=in_)


def vera_up(make: Maker, op: str) -> Sequence[str]:
    rank, out, more = make.sizes(3)
    first = [make.of("f32", out, rank)] if op == "vera_up_backward" else []
    whole = make.of("f32", out + more, rank)
    return make.add(op, *first, whole, make.of("f32", out), make.of("f32", rank))


def singular_down(make: Maker, op: str) -> Sequence[str]:
    rank, in_ = make.sizes(2)
    first = [make.of("f32", rank, in_)] if op == "singular_down_backward" else []
    return make.add(op, *first, make.of("f32", rank, in_), make.of("f32", rank, 1))


def khatri_rao(make: Maker, op: str) -> Sequence[str]:
    rank, size = make.sizes(2)
    dim = make.draw(st.sampled_from((-2, -1)))
    shape, pairs = ((rank, size), (rank**2, size)) if dim == -2 else ((size, rank), (size, rank**2))
    first = [make.of("f32", *pairs)] if op == "khatri_rao_backward" else []
    return make.add(op, *first, make.of("f32", *shape), make.of("f32", *shape), dim=dim)


def virtual_tokens(make: Maker, op: str) -> Sequence[str]:
    x = make.matrix()
    (tokens,) = make.sizes(1)
    return make.add(op, x, make.of("f32", tokens, make.type(x).shape[-1]))


def without_virtual(make: Maker, op: str) -> Sequence[str]:
    return make.add(op, make.matrix())


def activate(make: Maker, op: str) -> Sequence[str]:
    s = make.matrix()
    function = make.draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu", "tanh"]))
    return make.add(op, s, make.of("f32", make.type(s).shape[-1]), function=function)


def sum_tokens(make: Maker, op: str) -> Sequence[str]:
    dz = make.matrix()
    bias = [make.of("f32", make.type(dz).shape[-1])] if make.coin() else []
    named = {"of": "d_bias"} if op == "asked_sum_tokens" else {}
    return make.add(op, dz, *bias, dtype=make.draw(st.sampled_from(FLOATS)), **named)


def rms_norm(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2)
    attributes: dict[str, Attribute] = {
        "eps": 1e-6,
        "offset": make.draw(st.sampled_from([0.0, 1.0])),
    }
    inputs = [x]
    if op == "rms_norm":
        attributes["round_first"] = make.draw(st.booleans())
    else:
        inputs.insert(0, make.like(x))
    if make.draw(st.booleans()):
        inputs.append(make.of("f32", make.type(x).shape[-1]))
    return make.add(op, *inputs, **attributes)


def layer_norm(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2)
    vector = make.of("f32", make.type(x).shape[-1])
    weight, bias = make.draw(st.booleans()), make.draw(st.booleans())
    if op == "layer_norm":
        inputs = [vector] * (weight + bias)
        return make.add(op, x, *inputs, eps=1e-5, weight=weight, bias=bias)
    return make.add(op, make.like(x), x, *[vector] * weight, eps=1e-5)


def append(make: Maker, op: str) -> Sequence[str]:
    x = make.of(make.draw(st.sampled_from(FLOATS)), TOKENS, make.draw(SMALL), make.draw(SMALL))
    return make.add(op, x, to=make.draw(st.sampled_from(("keys", "values"))))


def rope(make: Maker, op: str) -> Sequence[str]:
    heads, half, rest = make.sizes(3)
    angles = [make.of("f32", TOKENS, 2 * half) for _ in range(2)]
    style = make.draw(st.sampled_from(["half", "interleaved"]))
    x = make.of("bf16", TOKENS, heads, 2 * half + rest - 1)
    return make.add(op, x, *angles, rotary_dim=2 * half, style=style)


def attention(make: Maker, op: str) -> Sequence[str]:
    groups, kv_heads, d, d_v = make.sizes(4)
    heads = groups * kv_heads
    q, k = make.of("bf16", TOKENS, heads, d), make.of("bf16", TOKENS, kv_heads, d)
    inputs = [q, k, make.of("bf16", TOKENS, kv_heads, d_v)]
    attributes = {"scale": make.draw(FINITE), "window": make.draw(st.integers(0, 9))}
    if op.endswith("attention_backward"):
        out = [make.of("bf16", TOKENS, heads, d_v) for _ in range(2)]
        inputs = [*out, make.of("f32", TOKENS, heads), *inputs]
    if op == "window_attention_backward":
        inputs, attributes = inputs[:4], {**attributes, "kv_heads": kv_heads, "value_size": d_v}
    flags = make.draw(st.dictionaries(st.sampled_from(["alibi", "sinks"]), st.just(True)))
    inputs += [make.of("f32", heads) for _ in flags]
    return make.add(op, *inputs, softcap=make.draw(FINITE), **attributes, **flags)


def latent_attention(make: Maker, op: str) -> Sequence[str]:
    heads, rest, own, d_v, size, rank = make.sizes(6)
    q = make.of("bf16", TOKENS, heads, own + rest)
    inputs = [q, make.of("bf16", TOKENS, size), make.of("bf16", TOKENS, 1, rest)]
    if op == "latent_window_backward":
        out = [make.of("bf16", TOKENS, heads, d_v) for _ in range(2)]
        inputs = [*out, make.of("f32", TOKENS, heads), q]
    attributes = {"rest": rest} if op == "latent_window_backward" else {"value_size": d_v}
    inputs.append(make.of("bf16", heads * (own + d_v), size))
    if make.draw(st.booleans()):
        inputs += [make.of("f32", rank, size), make.of("f32", heads * (own + d_v), rank)]
    return make.add(op, *inputs, scale=make.draw(FINITE), **attributes)


def short_convolution(make: Maker, op: str) -> Sequence[str]:
    x = make.matrix()
    channels = make.type(x).shape[-1]
    inputs = [x, make.of("f32", channels, make.draw(SMALL))]
    if op == "short_convolution" and make.coin():
        inputs.append(make.of("f32", channels))
    return make.add(op, *inputs, state=make.draw(st.integers(0, 9)))


def recurrence(make: Maker, op: str) -> Sequence[str]:
    groups, shared, key_size, value_size = make.sizes(4)
    heads = groups * shared
    q, v = make.of("f32", TOKENS, groups, key_size), make.of("f32", TOKENS, heads, value_size)
    of_heads = make.of("f32", TOKENS, heads)
    decay = make.of("f32", TOKENS, heads, key_size) if make.coin() else of_heads
    inputs = [q, q, v, decay, *([of_heads] if make.coin() else [])]
    if op == "recurrence_backward":
        inputs.insert(0, make.like(v))
    return make.add(op, *inputs, state=make.draw(st.integers(0, 9)))


def expert_linear(make: Maker, op: str) -> Sequence[str]:
    top_k, count, size_in, out = make.sizes(4)
    is_backward = op.endswith("_backward")
    lead = (top_k,) if is_backward or make.coin() else ()
    x = make.of("bf16", TOKENS, *lead, out if is_backward else size_in)
    bias = [make.of("bf16", count, out, 1)] if not is_backward and make.coin() else []
    indices, weight = make.of("i64", TOKENS, top_k), make.of("bf16", count, out, size_in)
    return make.add(op, x, indices, weight, *bias)


def packed_rows(make: Maker, op: str) -> Sequence[str]:
    top_k, experts, size = make.sizes(3)
    indices, attributes = make.of("i64", TOKENS, top_k), {"experts": experts, "parts": 2}
    rows = min(top_k, experts) if op == "unpack_rows" else top_k
    return make.add(op, make.of("bf16", TOKENS, rows, size), indices, **attributes)


def lora_of_experts(make: Maker, op: str) -> Sequence[str]:
    top_k, experts, size_in, out, rank = make.sizes(5)
    lead = (top_k,) if make.coin() else ()
    x, y, s = (
        make.of(dtype, TOKENS, *shape)
        for dtype, shape in (
            ("bf16", (*lead, size_in)),
            ("bf16", (top_k, out)),
            ("f32", (top_k, rank)),
        )
    )
    indices = make.of("i64", TOKENS, top_k)
    a, b = make.of("f32", experts * rank, size_in), make.of("f32", out, rank * experts)
    inputs = {
        "expert_shrink": (x, indices, a),
        "expert_shrink_backward": (s, indices, a),
        "expert_outer": (s, indices, x),
        "expert_expand_add": (y, s, indices, b),
        "expert_expand_backward": (y, indices, b),
        "expert_scaled_outer": (y, indices, s, b),
    }
    return make.add(op, *inputs[op], experts=experts)


def take_along(make: Maker, op: str) -> Sequence[str]:
    (extra,) = make.sizes(1)
    k = make.draw(st.integers(1, extra))
    return make.add(op, make.of("f32", TOKENS, extra), make.of("i64", TOKENS, k))


def topk(make: Maker, op: str) -> Sequence[str]:
    (extra,) = make.sizes(1)
    k = make.draw(st.integers(1, extra))
    if op.endswith("_backward"):
        values, indices = make.of("f32", TOKENS, k), make.of("i64", TOKENS, k)
        return make.add(op, values, indices, size=extra)
    return make.add(op, make.of("f32", TOKENS, extra), k=k)


def cross_entropy(make: Maker, op: str) -> Sequence[str]:
    logits, targets = make.matrix(), make.of("i64", TOKENS)
    dloss = [make.of("f32", TOKENS)] if op.endswith("_backward") else []
    attributes = {"smoothing": 0.1} if make.coin() else {}
    return make.add(op, *dloss, logits, targets, **attributes)


def linear_cross_entropy(make: Maker, op: str) -> Sequence[str]:
    x, bias = make.matrix(), make.coin()
    dtype, size, (out,) = make.type(x).dtype, make.type(x).shape[-1], make.sizes(1)
    inputs = [x, make.of(dtype, out, size), *([make.of(dtype, out)] if bias else [])]
    inputs.append(make.of("i64", TOKENS))
    if make.coin():
        inputs.append(make.of("f32", TOKENS))
    softcap = make.draw(st.sampled_from([0.0, 30.0]))
    return make.add(op, *inputs, bias=bias, scale=0.5, softcap=softcap)


def embedding(make: Maker, op: str) -> Sequence[str]:
    if op in ("embedding_outer", "embedding_shrink"):
        rank, vocabulary = make.sizes(2)
        options = {"by_row": True} if make.draw(st.booleans()) else {}
        table = make.of("f32", *((vocabulary, rank) if options else (rank, vocabulary)))
        ds = [make.of("f32", TOKENS, rank)] if op == "embedding_outer" else []
        return make.add(op, *ds, make.of("i64", TOKENS), table, padding=0, **options)
    options = {"padding": 0} if make.draw(st.booleans()) else {}
    return make.add(op, make.of("bf16", *make.sizes(2)), make.of("i64", TOKENS), **options)


def replaced(make: Maker, op: str) -> Sequence[str]:
    out, in_ = make.sizes(2)
    function = make.draw(st.sampled_from(["linear", "embedding", "scale"]))
    shapes = {"linear": ((TOKENS, in_), (out, in_)), "scale": ((TOKENS, out), (out,))}
    y = make.of("bf16", TOKENS, out)
    if function == "embedding":
        operands = [make.of("i64", TOKENS), make.of("f32", in_, out)]
    else:
        x, weight = shapes[function]
        operands = [make.of("bf16", *x), make.of("f32", *weight)]
        operands += [make.of("bf16", out)] if make.draw(st.booleans()) else []
    return make.add(op, y, *operands, function=function, offset=function == "scale")


def reshape(make: Maker, op: str) -> Sequence[str]:
    if make.draw(st.booleans()):
        return make.add(op, make.of("f32", 1), shape=())
    x = make.any(symbolic=False)
    type_ = make.type(x)
    tokens = (-1,) * type_.is_token_wise
    ones = (1,) * make.draw(st.integers(0, 2))
    flat = (math.prod(type_.features), *ones) if tokens else (*ones, math.prod(type_.features))
    return make.add(op, x, shape=(*tokens, *flat))


def permute(make: Maker, op: str) -> Sequence[str]:
    x = make.any()
    fixed = int(make.type(x).is_token_wise)
    rest = make.draw(st.permutations(range(fixed, len(make.type(x).dims))))
    return make.add(op, x, dims=(*range(fixed), *rest))


def slice_(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2, symbolic=False)
    dim = make.feature_dim(x)
    size = int(make.type(x).shape[dim])
    start = make.draw(st.integers(0, size - 1))
    stop = make.draw(st.integers(start + 1, size))
    steps = make.draw(st.dictionaries(st.just("step"), SMALL))
    if op == "slice":
        return make.add(op, x, dim=dim, start=start, stop=stop, **steps)
    shape = list(make.type(x).shape)
    shape[dim] = len(range(start, stop, steps.get("step", 1)))
    dy = make.of(make.type(x).dtype, *shape)
    return make.add(op, dy, dim=dim, start=start, stop=stop, size=size, **steps)


def concat(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2, symbolic=False)
    dim = make.feature_dim(x)
    others = []
    for size in make.sizes(make.draw(st.integers(0, 3))):
        shape = list(make.type(x).shape)
        shape[dim] = size
        others.append(make.of(make.draw(st.sampled_from(FLOATS)), *shape))
    return make.add(op, x, *others, dim=dim)


def expand(make: Maker, op: str) -> Sequence[str]:
    wanted = make.sizes(make.draw(st.integers(0, 3)))
    have = [make.draw(st.sampled_from([1, size])) for size in wanted]
    return make.add(op, make.of("f32", TOKENS, *have), shape=(-1, *wanted))


def repeat_interleave(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2)
    return make.add(op, x, dim=make.feature_dim(x), repeats=make.draw(SMALL))


def reduction(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2)
    return make.add(op, x, dim=make.feature_dim(x), keepdim=make.draw(st.booleans()))


def softmax(make: Maker, op: str) -> Sequence[str]:
    x = make.any(rank=2)
    return make.add(op, x, dim=make.feature_dim(x))


def transition(make: Maker, op: str) -> Sequence[str]:
    if op in ("reduce", "replicate", "route", "all_reduce"):
        return make.add(op, make.any())
    if op in ("collect", "dispatch"):
        indices = make.of("i64", TOKENS, 2)
        return make.add(op, make.of("f32", TOKENS, 2, 3), indices, dim=-3, experts=make.draw(SMALL))
    return make.add(op, make.any(rank=2), dim=-2 if op in ("gather", "scatter") else -1)


def collective(make: Maker, op: str) -> Sequence[str]:
    is_parted = op in ("own_part", "reduce_scatter", "taken_part")
    width = 2 * make.draw(SMALL) if is_parted else make.draw(SMALL)
    if op not in ("gathered_copy", "reduce_scatter") and make.draw(st.booleans()):
        kept: dict[str, Attribute] = {}
        if op in ("own_part", "taken_part") and make.draw(st.booleans()):
            kept = {"kept": True}
        return make.add(op, make.of("f32", TOKENS, width), dim=-1, degree=2, **kept)
    degree = make.draw(st.integers(2, 64))
    flag: dict[str, Attribute] = {} if op == "reduce_scatter" else {"tokens": True}
    x = make.of("f32", TOKENS if is_parted else part_of_tokens(degree), width)
    return make.add(op, x, dim=-2, degree=degree, **flag)


def all_to_all(make: Maker, op: str) -> Sequence[str]:
    degree, choices = make.draw(st.integers(2, 64)), make.draw(SMALL)
    rows = TOKENS if op == "collected" else part_of_tokens(degree)
    x = make.of("f32", rows, *make.draw(st.sampled_from([(), (choices,)])), make.draw(SMALL))
    indices = make.of("i64", TOKENS, choices)
    return make.add(op, x, indices, degree=degree, experts=make.draw(SMALL))


def joined(make: Maker, op: str) -> Sequence[str]:
    count = make.draw(st.integers(2, 4))
    operands = [make.of("f32", TOKENS, make.draw(SMALL)) for _ in range(count)]
    if op == "all_reduces":
        return make.add(op, *operands)
    return make.add(op, *operands, dims=(-1,) * count, degree=2)


UNARIES = ("detach", "neg", "exp", "rsqrt", "sqrt", "cos", "sin", "tanh", "sigmoid", "silu", "relu")
RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(UNARIES, unary),
    **dict.fromkeys(("gelu", "gelu_backward"), gelu),
    **dict.fromkeys(("clamp", "clamp_backward"), clamp),
    "add_deferred": add_deferred,
    **dict.fromkeys(("add", "sub", "mul", "div"), binary),
    **dict.fromkeys(
        ("silu_backward", "tanh_backward", "sigmoid_backward", "relu_backward"), unary_backward
    ),
    **dict.fromkeys(("pack_rows", "unpack_rows"), packed_rows),
    **dict.fromkeys(("pack_signs", "relu_backward_packed"), packed_signs),
    **dict.fromkeys((*ENCODERS, *ENCODERS.values()), lossy),
    **dict.fromkeys(("standardized", "standardized_backward"), standardized),
    **dict.fromkeys(("linear_backward", "shrink_backward", "expand_backward"), linear_backward),
    **dict.fromkeys(("rms_norm", "rms_norm_backward"), rms_norm),
    **dict.fromkeys(("layer_norm", "layer_norm_backward"), layer_norm),
    **dict.fromkeys(("rope", "rope_backward"), rope),
    **dict.fromkeys(("attention", "attention_backward", "window_attention_backward"), attention),
    **dict.fromkeys(("latent_attention", "latent_window_backward"), latent_attention),
    **dict.fromkeys(("pointwise", "rowwise", "carried_backward"), carried),
    **dict.fromkeys(("recurrence", "recurrence_backward"), recurrence),
    **dict.fromkeys(("short_convolution", "short_convolution_backward"), short_convolution),
    **dict.fromkeys(
        (
            *("cross_entropy", "cross_entropy_backward"),
            *("cross_entropy_part", "cross_entropy_part_backward"),
        ),
        cross_entropy,
    ),
    **dict.fromkeys(("all_gather", "own_part", "placed_part", "taken_part"), collective),
    **dict.fromkeys(("gathered_copy", "reduce_scatter"), collective),
    **dict.fromkeys(("all_gathers", "all_reduces"), joined),
    **dict.fromkeys(
        ("all_reduce", "combine", "partition", "place", "reduce", "replicate", "take"), transition
    ),
    **dict.fromkeys(("collect", "dispatch", "gather", "route", "scatter"), transition),
    **dict.fromkeys(("collected", "dispatched"), all_to_all),
    **dict.fromkeys(("slice", "slice_backward"), slice_),
    **dict.fromkeys(("mean", "sum"), reduction),
    "activate": activate,
    "append": append,
    "bias_add": bias_add,
    "bottleneck_backward": bottleneck_backward,
    "cast": cast,
    "column_factor": column_factor,
    **dict.fromkeys(("column_norm", "column_norm_part"), column_norm),
    "concat": concat,
    "dropout": dropout,
    "embedding": embedding,
    "embedding_part": embedding,
    "embedding_shrink": embedding,
    "embedding_outer": embedding,
    "replaced": replaced,
    "expand": expand,
    **dict.fromkeys(("expand_add", "expand_add_part"), expand_add),
    "expert_linear": expert_linear,
    "expert_linear_backward": expert_linear,
    **dict.fromkeys(
        (
            *("expert_shrink", "expert_shrink_backward", "expert_outer"),
            *("expert_expand_add", "expert_expand_backward", "expert_scaled_outer"),
        ),
        lora_of_experts,
    ),
    **dict.fromkeys(("asked_inner", "inner"), inner),
    "linear": linear,
    "base_piece": base_piece,
    "linear_group": linear_group,
    "linear_cross_entropy": linear_cross_entropy,
    "lora_linear": linear_group,
    "lora_linear_backward": lora_linear_backward,
    "nothing_deferred": unary,
    **dict.fromkeys(("asked_outer", "outer"), outer),
    **dict.fromkeys(
        ("asked_outer_group", "expand_add_group", "lora_group_backward", "shrink_group"),
        lora_group,
    ),
    **dict.fromkeys(("khatri_rao", "khatri_rao_backward"), khatri_rao),
    "permute": permute,
    "pow": power,
    "repeat_interleave": repeat_interleave,
    "reshape": reshape,
    "scale": scale,
    "scaled_outer": scaled_outer,
    "shrink": shrink,
    "softmax": softmax,
    **dict.fromkeys(("asked_sum_tokens", "sum_tokens"), sum_tokens),
    "topk": topk,
    "take_along": take_along,
    "take_along_backward": topk,
    **dict.fromkeys(("singular_down", "singular_down_backward"), singular_down),
    "vera_down": vera_down,
    **dict.fromkeys(("vera_up", "vera_up_backward"), vera_up),
    **dict.fromkeys(("virtual_tokens", "virtual_tokens_backward"), virtual_tokens),
    "without_virtual": without_virtual,
}

STATES: SearchStrategy[tuple[State, int]] = st.one_of(
    st.just((State.WHOLE, 1)),
    st.tuples(
        st.sampled_from([State.PARTITIONED, State.REPLICATED, State.PRE_REDUCE]),
        st.integers(2, 64),
    ),
)


def with_states(draw: DrawFn, graph: Graph) -> Graph:
    """The graph with a random parallel state on each dim, as a parallel pass might leave it."""

    def value(old: Value) -> Value:
        dims = tuple(Dim(dim.size, *draw(STATES)) for dim in old.type.dims)
        return Value(old.name, TensorType(old.type.dtype, dims))

    return Graph(
        graph.name,
        tuple(map(value, graph.inputs)),
        tuple(dataclasses.replace(p, value=value(p.value)) for p in graph.parameters),
        tuple(
            dataclasses.replace(node, outputs=tuple(map(value, node.outputs)))
            for node in graph.nodes
        ),
        graph.outputs,
    )


@st.composite
def graphs(draw: DrawFn, op: str = "") -> Graph:
    """A well-typed graph; with a node of the operator, where one is named."""
    make = Maker(draw)
    before = draw(st.lists(st.sampled_from(sorted(RECIPES)), max_size=3))
    names: list[str] = []
    for name in [
        *before,
        *([op] if op else []),
        *draw(st.lists(st.sampled_from(UNARIES), max_size=1)),
    ]:
        names += RECIPES[name](make, name)
    others = draw(st.lists(st.sampled_from(list(make.builder.types)), max_size=2)) if names else []
    graph = make.builder.build([*names, *others]).replace(name=draw(NAMES))
    return with_states(draw, graph) if draw(st.booleans()) else graph
