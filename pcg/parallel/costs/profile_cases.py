"""The cases that `pcg profile` measures: each operator, over tokens, widths and ranks.

A case has types in `T`. Elementwise operators go by class, with one case each; products have the
shapes of a block: square, up and down by four. `embedding` and what follows from the vocabulary
have its size. Carried operators (`pointwise`, `rowwise`) are measured by ELU and the maximum, which
stand for all of their kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pcg.ir.graph import Attribute
from pcg.ir.operators import OPERATORS
from pcg.ir.operators.base import Attributes, Types
from pcg.ir.types import TOKENS, TensorType, tensor

HEAD_SIZE = 64
CARRIED: Mapping[str, Attribute] = {"target": "aten.elu.default", "arguments": "{0}, 2.0"}


@dataclass(frozen=True)
class Grid:
    """The sizes that are measured, `budget_s` long each; widths of layers are multiples of 64."""

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    ranks: tuple[int, ...]
    vocabulary: int
    budget_s: float


QUICK = Grid((1, 16, 128), (64,), (8,), 512, 0.001)
CPU_GRID = Grid((1, 16, 128, 1024), (512, 2048), (8, 64), 32_000, 0.01)
GPU_GRID = Grid((1, 16, 128, 1024, 8192), (1024, 4096, 8192), (8, 64), 128_000, 0.01)


@dataclass(frozen=True)
class Case:
    """An operator to measure; `adapters` are the places of inputs that are adapters' parameters."""

    op: str
    inputs: Types
    attributes: Attributes
    adapters: tuple[int, ...] = ()


def cases(grid: Grid, dtype: str, adapter_dtype: str) -> Iterator[Case]:
    """All cases of one dtype, with adapters of another or the same."""
    for width in grid.widths:
        for shape in (_elementwise, _shapes, _norms, _heads, _base_products):
            yield from shape(width, dtype)
        yield from _vocabulary(width, grid.vocabulary, dtype)
        yield from _vectors(width, dtype, adapter_dtype)
        for rank in grid.ranks:
            yield from _low_rank(width, rank, dtype, adapter_dtype)
    yield from _integers()


def _flat(dtype: str, width: int) -> TensorType:
    return tensor(dtype, TOKENS, width)


def _elementwise(width: int, dtype: str) -> Iterator[Case]:
    x = _flat(dtype, width)
    for op in ("cos", "exp", "neg", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh"):
        yield Case(op, (x,), {})
    for op in ("add", "sub", "mul", "div"):
        yield Case(op, (x, x), {})
    for op in ("relu", "sigmoid", "silu", "tanh"):
        yield Case(f"{op}_backward", (x, x), {})
    for approximate in ("none", "tanh"):
        yield Case("gelu", (x,), {"approximate": approximate})
        yield Case("gelu_backward", (x, x), {"approximate": approximate})
    bounds = {"max": 1.0, "min": -1.0}
    yield Case("clamp", (x,), bounds)
    yield Case("clamp_backward", (x, x), bounds)
    yield Case("pow", (x,), {"exponent": 2.0})
    yield Case("cast", (x,), {"dtype": "f32" if dtype != "f32" else "bf16"})
    yield Case("pack_signs", (x,), {})
    yield Case("relu_backward_packed", (x, tensor("u8", TOKENS, width // 8)), {})
    codes, scale = x.with_dtype("u8"), tensor("u8", TOKENS, -(-width // 128))
    yield Case("quantize_fp8", (x,), {})
    yield Case("dequantize_fp8", (codes, scale), {"dtype": dtype})
    yield Case("quantize_int8", (x,), {})
    wide = scale.with_dtype("f64" if dtype == "f64" else "f32")
    yield Case("dequantize_int8", (codes, wide), {"dtype": dtype})
    if dtype == "bf16":
        yield Case("pack_bf16", (x,), {})
        yield Case("unpack_bf16", (tensor("u8", TOKENS, 3 * width // 2), scale), {})
    yield Case("pointwise", (x,), {**CARRIED, "dtype": dtype})
    yield Case("carried_backward", (x, x), {**CARRIED, "place": 0})
    largest: Mapping[str, Attribute] = {"target": "aten.amax.default", "arguments": "{0}, -1, True"}
    yield Case("rowwise", (x,), {**largest, "reads": (width,), "features": (1,), "dtype": dtype})
    yield Case("dropout", (x,), {"key": 0, "p": 0.1})


def _integers() -> Iterator[Case]:
    ids = tensor("i64", TOKENS)
    for op in ("add", "sub", "mul"):
        yield Case(op, (ids,), {"scalar": 2})
    yield Case("clamp", (ids,), {"min": 0})
    yield Case("cast", (tensor("i64", TOKENS, 1),), {"dtype": "f32"})


def _shapes(width: int, dtype: str) -> Iterator[Case]:
    x, half = _flat(dtype, width), tensor(dtype, TOKENS, width // HEAD_SIZE, HEAD_SIZE // 2)
    yield Case("concat", (x, x), {"dim": -1})
    for op in ("mean", "sum"):
        yield Case(op, (x,), {"dim": -1, "keepdim": True})
    yield Case("softmax", (x,), {"dim": -1})
    yield Case("topk", (x,), {"k": 8})
    indices = tensor("i64", TOKENS, 2)
    yield Case("topk_backward", (_flat(dtype, 2), indices), {"size": 8})
    mlps = tensor(dtype, 8, 2, 2 * width, width), tensor(dtype, 8, width, 2 * width)
    yield Case("experts", (x, indices, _flat(dtype, 2), *mlps), {})
    yield Case("experts_backward", (x, x, indices, _flat(dtype, 2), *mlps), {})
    yield Case("repeat_interleave", (half,), {"dim": -2, "repeats": 2})
    yield Case("slice_backward", (half,), {"dim": -1, "size": HEAD_SIZE, "start": 0, "stop": 32})
    yield Case("placed_part", (x,), {"degree": 2, "dim": -1})


def _norms(width: int, dtype: str) -> Iterator[Case]:
    x, vector = _flat(dtype, width), tensor(dtype, width)
    rms: Attributes = {"eps": 1e-6, "offset": 0.0}
    yield Case("rms_norm", (x, vector), {**rms, "round_first": True})
    yield Case("rms_norm_backward", (x, x, vector), rms)
    rstd = tensor("f64" if dtype == "f64" else "f32", TOKENS)
    yield Case("standardized", (x,), {"centered": False, "eps": 1e-6})
    plain: Attributes = {"centered": False, "offset": 0.0}
    yield Case("standardized_backward", (x, x, rstd, vector), plain)
    yield Case("layer_norm", (x, vector, vector), {"bias": True, "eps": 1e-5, "weight": True})
    yield Case("layer_norm_backward", (x, x, vector), {"eps": 1e-5})


def _heads(width: int, dtype: str) -> Iterator[Case]:
    heads = width // HEAD_SIZE
    q = tensor(dtype, TOKENS, heads, HEAD_SIZE)
    k = tensor(dtype, TOKENS, -(-heads // 4), HEAD_SIZE)
    angles, lse, slopes = _flat(dtype, HEAD_SIZE), _flat("f32", heads), tensor(dtype, heads)
    for style in ("half", "interleaved"):
        for op in ("rope", "rope_backward"):
            yield Case(op, (q, angles, angles), {"rotary_dim": HEAD_SIZE, "style": style})
    kinds: list[dict[str, Attribute]] = [
        {"softcap": 0.0, "window": 0},
        {"softcap": 0.0, "window": 64},
        {"softcap": 30.0, "window": 0},
        {"softcap": 30.0, "window": 64},
        {"alibi": True, "softcap": 0.0, "window": 0},
        {"sinks": True, "softcap": 0.0, "window": 0},
        {"sinks": True, "softcap": 0.0, "window": 64},
    ]
    for kind in kinds:
        attributes = {"scale": 0.125, **kind}
        rest = (slopes,) * bool(kind.keys() & {"alibi", "sinks"})
        yield Case("attention", (q, k, k, *rest), attributes)
        yield Case("attention_backward", (q, q, lse, q, k, k, *rest), attributes)


def _base_products(width: int, dtype: str) -> Iterator[Case]:
    for out, in_ in ((width, width), (4 * width, width), (width, 4 * width)):
        x, weight = _flat(dtype, in_), tensor(dtype, out, in_)
        yield Case("linear", (x, weight), {})
        yield Case("linear_backward", (_flat(dtype, out), weight), {})
        yield Case("linear_group", (x, weight, weight), {"bias": False, "count": 2})
        yield Case("outer", (_flat(dtype, out), x), {})


def _vocabulary(width: int, size: int, dtype: str) -> Iterator[Case]:
    table, ids, logits = tensor(dtype, size, width), tensor("i64", TOKENS), _flat(dtype, size)
    loss = tensor("f32", TOKENS)
    yield Case("linear", (_flat(dtype, width), table), {})
    yield Case("linear_backward", (logits, table), {})
    for part in ("", "_part"):
        yield Case(f"embedding{part}", (table, ids), {})
        yield Case(f"cross_entropy{part}", (logits, ids), {})
        yield Case(f"cross_entropy{part}_backward", (loss, logits, ids), {})


def _vectors(width: int, dtype: str, adapter_dtype: str) -> Iterator[Case]:
    x, vector, base = _flat(dtype, width), tensor(adapter_dtype, width), tensor(dtype, width)
    prompt = tensor(adapter_dtype, 8, width)
    yield Case("bias_add", (x, vector), {}, (1,))
    yield Case("bias_add", (x, vector, base), {}, (1,))
    yield Case("sum_tokens", (x,), {"dtype": adapter_dtype})
    yield Case("scale", (x, vector), {}, (1,))
    yield Case("inner", (x, x), {"dtype": adapter_dtype})
    yield Case("column_factor", (vector, vector), {}, (0,))
    yield Case("virtual_tokens", (x, prompt), {}, (1,))
    yield Case("virtual_tokens_backward", (x, prompt), {}, (1,))
    yield Case("without_virtual", (x,), {})


def _low_rank(width: int, rank: int, dtype: str, adapter_dtype: str) -> Iterator[Case]:
    s = _flat(adapter_dtype, rank)
    for size in (width, 4 * width):
        x = _flat(dtype, size)
        down, up = tensor(adapter_dtype, rank, size), tensor(adapter_dtype, size, rank)
        yield Case("shrink", (x, down), {}, (1,))
        yield Case("shrink_backward", (s, down), {}, (1,))
        yield Case("expand_add", (x, s, up), {}, (2,))
        yield Case("expand_backward", (x, up), {}, (1,))
        yield Case("outer", (s, x), {})
        yield Case("scaled_outer", (x, s, up), {}, (2,))
        for op in OPERATORS.values():
            for measured in op.measured(size, rank, adapter_dtype):
                yield Case(op.name, *measured)
        a, b = tensor(adapter_dtype, rank, size), tensor(adapter_dtype, width, rank)
        yield Case("column_norm", (tensor(dtype, width, size), a, b), {}, (1, 2))
    for function in ("gelu", "gelu_new", "relu", "silu", "tanh"):
        bias = tensor(adapter_dtype, rank)
        yield Case("activate", (s, bias), {"function": function}, (1,))
