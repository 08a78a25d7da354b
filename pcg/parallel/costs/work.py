"""The work of an operator on a rank in numbers: operations, bytes, and shapes.

The operator table has the formulas (`flops`, `moved_bytes`). They are compiled to functions of the
tokens and the context once per operator and types, so that a search can evaluate them at any sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import sympy
from sympy.printing.pycode import PythonCodePrinter

from pcg.errors import CostModelError, IrError
from pcg.ir.graph import Attribute
from pcg.ir.operators import operator
from pcg.ir.operators.attention import LatentAttention
from pcg.ir.operators.base import Attributes, Operator, Types
from pcg.ir.operators.bypass import Activate
from pcg.ir.operators.collectives import Collective, Transition
from pcg.ir.operators.lora import (
    LoraLinear,
    by_kind,
    by_site,
)
from pcg.ir.types import CONTEXT, TOKENS, Size, TensorType

OPEN_RANK = 16
"""Rank that stands for a symbolic rank, in programs that serve any rank."""
_NAMED = {"activate": "function", "gelu": "approximate", "rope": "style"}
"""Operators with the name of the attribute that chooses their kernel."""
_FLAGS = ("alibi", "sinks", "softcap", "window")
"""Attributes of attention that choose the kernel if they are not 0; a chunk is one of windows."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a call of an operator.

    Attributes:
        kernel: the operator's name, with the attributes that choose its kernel.
        is_product: True for a matrix product or attention.
        dtype: the dtype of its arithmetic.
        shapes: types of inputs and outputs, as text; for attention also the context.
        rows: the leading size of its first output.
        flops: the number of operations.
        moved_bytes: bytes read and written.
    """

    kernel: str
    is_product: bool
    dtype: str
    shapes: str
    rows: float
    flops: float
    moved_bytes: float


def work_of(
    op: str, inputs: Types, outputs: Types, attributes: Attributes, tokens: int, context: int
) -> Work:
    """Return the work of a call; see `CostModel.operator_seconds` for arguments and errors."""
    if tokens < 1 or context < 1:
        raise CostModelError(
            f"{op} of {tokens} tokens in a context of {context} has no cost; use at least 1"
        )
    pairs = tuple(attributes.items())
    numbers = _numbers(op, inputs, outputs, pairs)
    flops, moved_bytes, *sizes = numbers(tokens, context)
    left = map(str, map(int, sizes))
    texts = [f"{t.dtype}[{','.join(islice(left, len(t.dims)))}]" for t in (*inputs, *outputs)]
    entry = operator(op)
    shapes = f"{' '.join(texts[: len(inputs)])} → {' '.join(texts[len(inputs) :])}"
    if entry.sees_sequences:
        shapes += f" of {context}"
    first = sum(len(type_.dims) for type_ in inputs)
    return Work(
        kernel_of(op, attributes),
        entry.is_product,
        entry.compute_dtype(inputs),
        shapes,
        sizes[first] if outputs[0].dims else 1,
        flops,
        moved_bytes,
    )


def works_of(
    op: str, inputs: Types, outputs: Types, attributes: Attributes, tokens: int, context: int
) -> tuple[Work, ...]:
    """Return the work of each operator of a (possibly fused) call; empty for a view."""
    parts = () if is_free(op) else parts_of(op, inputs, outputs, attributes)
    return tuple(work_of(*part, tokens, context) for part in parts)


def kernel_of(op: str, attributes: Attributes) -> str:
    """Return the operator's name, with the attributes that choose another kernel."""
    family = op.removesuffix("_backward")
    if family == "attention":
        flags = {**attributes, "window": attributes.get("window") or attributes.get("chunk")}
        return "+".join([op, *(flag for flag in _FLAGS if flags.get(flag))])
    if family in _NAMED:
        return f"{op}+{attributes[_NAMED[family]]}"
    return op


@lru_cache(maxsize=16384)
def is_free(op: str) -> bool:
    """Return whether an operator is a view, or does no work of its own.

    Raises:
        CostModelError: ranks do not compute the operator.
    """
    entry = _entry(op)
    if entry.is_view:
        return True
    if isinstance(entry, Collective) and entry.rounds:
        raise CostModelError(f"{op} is no work of one rank; ask collective_seconds for its cost")
    if isinstance(entry, Transition):
        raise CostModelError(f"{op} has no cost before the graph is that of one rank: localize it")
    return op in ("base_piece", "own_part", "taken_part", "add_deferred", "nothing_deferred")


def parts_of(
    op: str, inputs: Types, outputs: Types, attributes: Attributes
) -> Iterator[tuple[str, Types, Types, Attributes]]:
    """Yield the operator itself, or the operators that a fused or sharded operator replaces."""
    match op:
        case "column_norm_part":
            yield "column_norm", inputs, outputs, {}
        case "expand_add_part":
            whole, s, b = inputs
            part = whole.with_shape((*whole.shape[:-1], b.shape[0]))
            degree = int(whole.shape[-1]) // int(b.shape[0])
            yield "expand_add", (part, s, b), (part,), {}
            yield "placed_part", (part,), (whole,), {"dim": -1, "degree": degree}
        case "pack_rows" | "unpack_rows":
            whole, degree = (inputs if op == "pack_rows" else outputs)[0], attributes["parts"]
            part = whole.with_features(whole.features[0], -(-whole.features[1] // degree))
            yield "placed_part", (part,), (whole,), {"dim": -1, "degree": degree}
        case "window_attention_backward":
            kept = {k: v for k, v in attributes.items() if k not in ("kv_heads", "value_size")}
            yield "attention_backward", (*inputs[:4], *outputs[1:], *inputs[4:]), outputs, kept
        case "latent_window_backward":
            q, weight = inputs[3:5]
            kept = {"scale": attributes["scale"], "softcap": 0.0, "window": 0}
            yield "attention_backward", (*inputs[:4], *outputs[1:]), outputs, kept
            latents = q.with_features(weight.shape[1])
            yield "linear", (latents, weight), (q.with_features(weight.shape[0]),), {}
        case "latent_attention":
            q, latents, _, weight = inputs[:4]
            row = LatentAttention.cached(inputs)
            absorbed = q.with_features(q.shape[1], row.shape[2])
            sums = q.with_features(q.shape[1], latents.shape[1])
            values = latents.with_features(1, latents.shape[1])
            kept = {"scale": attributes["scale"], "softcap": 0.0, "window": 0}
            yield "attention", (absorbed, row, values), (sums, outputs[1]), kept
            expanded = latents.with_features(weight.shape[0])
            yield "linear", (latents, weight), (expanded,), {}
        case "linear_cross_entropy":
            yield from _parts_of_loss(inputs, outputs, attributes)
        case "asked_inner" | "asked_outer" | "asked_sum_tokens":
            kept = {key: value for key, value in attributes.items() if key != "of"}
            yield op.removeprefix("asked_"), inputs, outputs, kept
        case "shrink_group" | "expand_add_group" | "asked_outer_group" | "lora_group_backward":
            yield from _parts_of_group(op, inputs, outputs, attributes)
        case "lora_linear_backward" | "bottleneck_backward":
            yield from _parts_of_gradients(op, inputs, outputs, attributes)
        case "lora_linear":
            count, x = int(attributes["count"]), inputs[0]
            adapted = LoraLinear.adapted(attributes)
            bases = len(inputs) - 2 * len(adapted)
            for i, out in enumerate(outputs[:count]):
                yield "linear", (x, *inputs[1 + i : bases : count]), (out,), {}
            for i, a, b in zip(
                adapted, inputs[bases:], inputs[bases + len(adapted) :], strict=False
            ):
                (s,) = operator("shrink").infer((x, a), {})
                yield "shrink", (x, a), (s,), {}
                yield "expand_add", (outputs[i], s, b), (outputs[i],), {}
        case _:
            yield op, inputs, outputs, attributes


def _parts_of_group(
    op: str, inputs: Types, outputs: Types, attributes: Attributes
) -> Iterator[tuple[str, Types, Types, Attributes]]:
    match op:
        case "shrink_group":
            for a, s in zip(inputs[1:], outputs, strict=True):
                yield "shrink", (inputs[0], a), (s,), {}
        case "asked_outer_group":
            for ds, da in zip(inputs[:-1], outputs, strict=True):
                yield "outer", (ds, inputs[-1]), (da,), {}
        case "expand_add_group":
            for site_types, z in zip(zip(*by_kind(inputs, 3), strict=True), outputs, strict=True):
                yield "expand_add", site_types, (z,), {}
        case _:
            dz, weights, *rest = by_site(inputs, int(attributes["plain"]))
            dx, count = outputs[-1], len(rest[0])
            sites = zip(dz, weights, *rest, *by_kind(outputs[:-1], 2), strict=False)
            for *site, ds, db in sites:
                gradients = ds, db, dx
                yield from _parts_of_gradients(
                    "lora_linear_backward", (*site,), gradients, attributes
                )
            for plain in zip(dz[count:], weights[count:], strict=True):
                yield "linear_backward", plain, (dx,), {}


def _parts_of_loss(
    inputs: Types, outputs: Types, attributes: Attributes
) -> Iterator[tuple[str, Types, Types, Attributes]]:
    x, weight, *rest = inputs
    bias, (targets, *dloss) = (rest[:1], rest[1:]) if attributes["bias"] else ([], rest)
    (logits,) = operator("linear").infer((x, weight, *bias), {})
    yield "linear", (x, weight, *bias), (logits,), {}
    yield "cross_entropy", (logits, targets), outputs[:1], {}
    if dloss:
        yield "cross_entropy_backward", (*dloss, logits, targets), (logits,), {}
        yield "linear_backward", (logits, weight), outputs[1:], {}


def _parts_of_gradients(
    op: str, inputs: Types, outputs: Types, attributes: Attributes
) -> Iterator[tuple[str, Types, Types, Attributes]]:
    if op == "lora_linear_backward":
        dz, weight, a, b, s = inputs
        ds, db, dx = outputs
        yield "linear_backward", (dz, weight), (dx,), {}
        yield "shrink_backward", (ds, a), (dx.with_dtype(ds.dtype),), {}
    else:
        dz, b, s, bias = inputs
        ds, db, dbias = outputs
        slope, slope_attributes = Activate.gradients[str(attributes["function"])]
        yield "activate", (s, bias), (s,), attributes
        yield "bias_add", (s, bias), (s,), {}
        yield slope, (ds, s), (ds,), slope_attributes
        yield "sum_tokens", (ds, bias), (dbias,), {"dtype": dbias.dtype}
    yield "expand_backward", (dz, b), (ds,), {}
    yield "scaled_outer", (dz, s, b), (db,), {}


def _entry(op: str) -> Operator:
    try:
        return operator(op)
    except IrError as error:
        raise CostModelError(f"no cost is known: {error}") from None


@lru_cache(maxsize=65536)
def _numbers(
    op: str, inputs: Types, outputs: Types, pairs: tuple[tuple[str, Attribute], ...]
) -> Callable[[int, int], Sequence[float]]:
    """Return operations, bytes, and the sizes of all dims, as a function of T and S."""
    entry, attributes = _entry(op), dict(pairs)
    types = (*inputs, *outputs)
    for type_ in types:
        if any(dim.degree != 1 for dim in type_.dims):
            raise CostModelError(f"{op} of {type_} has no cost; give what one rank holds of it")
    sizes = [size for type_ in types for size in type_.shape]
    formulas: list[Size] = [
        entry.flops(inputs, outputs, attributes),
        entry.moved_bytes(inputs, outputs, attributes),
        *sizes,
    ]
    unknown = set().union(*(sympy.sympify(f).free_symbols for f in formulas)) - {TOKENS, CONTEXT}
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        raise CostModelError(
            f"{op} of {', '.join(map(str, inputs))} has no cost while {names} is open; put a "
            "number in its place"
        )
    # As `sympy.lambdify`, but twice as fast.
    printer = PythonCodePrinter({"fully_qualified_modules": True})
    texts = (f"{f}" if isinstance(f, int) else printer.doprint(f) for f in formulas)
    source = f"lambda {TOKENS}, {CONTEXT}: ({', '.join(texts)},)"
    function: Callable[[int, int], Sequence[float]] = eval(source, {"math": math})
    return function


@lru_cache(maxsize=16384)
def with_rank(type_: TensorType, rank: int = OPEN_RANK) -> TensorType:
    """Return the type with a number in place of a symbolic rank."""
    sizes: list[Size] = []
    for size in type_.shape:
        if not isinstance(size, int):
            size = size.subs(dict.fromkeys(size.free_symbols - {TOKENS}, rank))
            size = int(size) if size.is_Integer else size
        sizes.append(size)
    return type_.with_shape(tuple(sizes))


@lru_cache(maxsize=65536)
def size_bytes(type_: TensorType, tokens: int, rank: int = OPEN_RANK) -> int:
    """Return the bytes of a tensor of `tokens`, with a number in place of a symbolic rank."""
    size = with_rank(type_, rank).size_bytes
    return int(size if isinstance(size, int) else size.subs({TOKENS: tokens}))
