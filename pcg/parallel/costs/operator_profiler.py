"""Measurement of operators on the present device, each in the operator table's PyTorch form.

A case, over tokens, widths and ranks, has types in `T`. Elementwise operators are measured by
class, with a case each; products have the shapes of a block: square, up and down by four.
`embedding` and its successors have the vocabulary's size. ELU and the maximum represent all carried
operators (`pointwise`, `rowwise`).

An operator is called in a row for the grid's time, three times, and the fastest row counts; of a
slower operator, the fastest of three calls. Its inputs are the same in each call, so that small
inputs are cached. Attention sees a single sequence.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.errors import CostModelError
from pcg.ir.graph import Attribute
from pcg.ir.operators import OPERATORS, operator
from pcg.ir.operators.base import Attributes, Types
from pcg.ir.types import CONTEXT, TOKENS, TORCH_NAMES, TensorType, tensor
from pcg.kernels.batch import DroppedPart, DroppedTokens, Span
from pcg.kernels.torch import ops as torch_ops
from pcg.parallel.costs.device_profile import OperatorTime
from pcg.parallel.costs.work import work_of
from pcg.peft.weights import AdapterWeight
from pcg.ranks.group import Ranks

# ------------------------------------------------------------------------------------ profile cases


HEAD_SIZE = 64
CARRIED: Mapping[str, Attribute] = {"target": "aten.elu.default", "arguments": "{0}, 2.0"}


@dataclass(frozen=True)
class Grid:
    """The measured sizes, `budget_s` long each; widths of layers are multiples of 64."""

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
    """An operator to measure; `adapters` are the indices of inputs that are adapters' weights."""

    op: str
    inputs: Types
    attributes: Attributes
    adapters: tuple[int, ...] = ()


def cases(grid: Grid, dtype: str, adapter_dtype: str) -> Iterator[Case]:
    """Yield all cases of a dtype, with adapters of the same or another dtype."""
    for width in grid.widths:
        for shape in (_elementwise, _shapes, _norms, _heads, _recurrent, _base_products):
            yield from shape(width, dtype)
        yield from _vocabulary(width, grid.vocabulary, dtype)
        yield from _own_vocabulary(width, grid.vocabulary, dtype, adapter_dtype)
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
    yield Case("take_along", (_flat(dtype, 8), indices), {})
    yield Case("take_along_backward", (_flat(dtype, 2), indices), {"size": 8})
    weight, outputs = tensor(dtype, 8, 2 * width, width), tensor(dtype, TOKENS, 2, 2 * width)
    yield Case("expert_linear", (x, indices, weight), {})
    yield Case("expert_linear", (outputs, indices, tensor(dtype, 8, width, 2 * width)), {})
    yield Case("expert_linear_backward", (outputs, indices, weight), {})
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


def _recurrent(width: int, dtype: str) -> Iterator[Case]:
    x, taps, state = _flat(dtype, width), tensor(dtype, width, 4), {"state": 0}
    yield Case("short_convolution", (x, taps), state)
    yield Case("short_convolution_backward", (x, taps), state)
    heads = width // HEAD_SIZE
    q, of_heads = tensor(dtype, TOKENS, heads, HEAD_SIZE), _flat(dtype, heads)
    of_channels = tensor(dtype, TOKENS, heads, HEAD_SIZE)
    for rest in ((of_heads,), (of_heads, of_heads), (of_channels, of_heads)):
        yield Case("recurrence", (q, q, q, *rest), state)
        yield Case("recurrence_backward", (q, q, q, q, *rest), state)


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


def _own_vocabulary(width: int, size: int, dtype: str, adapter_dtype: str) -> Iterator[Case]:
    x, ids, table = _flat(dtype, width), tensor("i64", TOKENS), tensor(adapter_dtype, size, width)
    down, s = tensor(adapter_dtype, 16, size), _flat(adapter_dtype, 16)
    by_row: Attributes = {"by_row": True}
    rows = _flat(adapter_dtype, width)
    for row, weight, attributes in ((s, down, {}), (rows, table, by_row)):
        yield Case("embedding_shrink", (ids, weight), attributes, (1,))
        yield Case("embedding_outer", (row, ids, weight), attributes, (2,))
    vector = tensor(adapter_dtype, width)
    for function, operands in (
        ("linear", (_flat(dtype, size), x, table)),
        ("embedding", (x, ids, table)),
        ("scale", (x, x, vector)),
    ):
        yield Case("replaced", operands, {"function": function, "offset": False}, (2,))


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


def _lora_of_experts(x: TensorType, rank: int, dtype: str) -> Iterator[Case]:
    size, (experts, indices) = x.shape[-1], (8, tensor("i64", TOKENS, 2))
    y, s = tensor(x.dtype, TOKENS, 2, size), tensor(dtype, TOKENS, 2, rank)
    down, up = tensor(dtype, experts * rank, size), tensor(dtype, size, rank * experts)
    number: Attributes = {"experts": experts}
    yield Case("expert_shrink", (x, indices, down), number, (2,))
    yield Case("expert_shrink_backward", (s, indices, down), number, (2,))
    yield Case("expert_outer", (s, indices, x), number)
    yield Case("expert_expand_add", (y, s, indices, up), number, (3,))
    yield Case("expert_expand_backward", (y, indices, up), number, (2,))
    yield Case("expert_scaled_outer", (y, indices, s, up), number, (3,))


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
        yield from _lora_of_experts(x, rank, adapter_dtype)
        a, b = tensor(adapter_dtype, rank, size), tensor(adapter_dtype, width, rank)
        yield Case("column_norm", (tensor(dtype, width, size), a, b), {}, (1, 2))
    for function in ("gelu", "gelu_new", "relu", "silu", "tanh"):
        bias = tensor(adapter_dtype, rank)
        yield Case("activate", (s, bias), {"function": function}, (1,))


# -------------------------------------------------------------------------------- operator profiler


HALVES = ("bf16", "f16")


class _OneOfTwo(Ranks):
    """One rank of two without the other, to measure only its own work."""

    size = 2

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x, x]


@dataclass
class _Step:
    """A batch for operators: a sequence that starts with virtual tokens."""

    tokens: int
    device: torch.device
    virtual: int = 8
    keeps: bool = True
    cached: None = None
    states: None = None
    chosen: None = None
    parts: None = None
    ranks: Ranks = field(default_factory=_OneOfTwo)

    def __post_init__(self) -> None:
        self.spans = (Span(0, self.tokens),)
        self.known: dict[object, Any] = {}
        self.input_ids = torch.zeros(self.tokens, dtype=torch.int64, device=self.device)
        self.uniform_length = self.tokens
        rows = torch.arange(min(self.virtual, self.tokens), device=self.device)
        self.virtual_rows, self.virtual_places = rows, rows

    def dropped_parts(self, key: int) -> list[DroppedPart]:
        generator, n = torch.Generator(self.device).manual_seed(key), self.tokens
        return [DroppedPart(0, n, 0, n, generator)]

    def dropped_tokens(self) -> DroppedTokens:
        places = torch.arange(self.tokens, device=self.device)
        key = torch.ones(2, dtype=torch.int64, device=self.device)
        return DroppedTokens(key, places, torch.zeros_like(places))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Keep no cache."""


def measure_operators(
    device: torch.device,
    dtype: str,
    *,
    quick: bool = False,
    on_case: Callable[[str], None] = lambda op: None,
) -> tuple[OperatorTime, ...]:
    """Measure the times of all operators.

    Args:
        dtype: the base model's dtype; if half precision, adapters are measured in it and in f32.
        quick: measure a small grid, in seconds, for trials.
        on_case: called with the name of each operator before it is measured.
    Raises:
        CostModelError: the dtype is no float.
    """
    if dtype not in (*HALVES, "f32", "f64"):
        raise CostModelError(f"a profile is of bf16, f16, f32 or f64, not of {dtype}")
    grid = QUICK if quick else GPU_GRID if device.type == "cuda" else CPU_GRID
    points: dict[tuple[str, str], OperatorTime] = {}
    with torch.no_grad():
        for case in _all_cases(grid, dtype):
            on_case(case.op)
            for point in _points(case, grid, device):
                points.setdefault((point.work.kernel, point.work.shapes), point)
    return tuple(points.values())


def _all_cases(grid: Grid, dtype: str) -> Iterator[Case]:
    yield from cases(grid, dtype, dtype)
    if dtype in HALVES:
        yield from cases(grid, dtype, "f32")
        yield from (c for c in cases(grid, "f32", "f32") if not operator(c.op).is_product)


def _points(case: Case, grid: Grid, device: torch.device) -> Iterator[OperatorTime]:
    entry = operator(case.op)
    outputs = entry.infer(case.inputs, case.attributes)
    has_tokens = any(type_.is_token_wise for type_ in case.inputs)
    for tokens in grid.tokens if has_tokens else grid.tokens[-1:]:
        work = work_of(case.op, case.inputs, outputs, case.attributes, tokens, tokens)
        scratch = entry.temporaries(case.inputs, outputs, case.attributes)
        needed = work.moved_bytes + float(scratch.subs({TOKENS: tokens, CONTEXT: tokens}))
        if needed <= _room_bytes(device):
            seconds = _seconds(_call(case, tokens, device), device, grid.budget_s)
            yield OperatorTime(work, seconds)


def _room_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 4
    return 2.0**31


def _call(case: Case, tokens: int, device: torch.device) -> Callable[[], Any]:
    values: dict[str, Any] = {}
    for i, type_ in enumerate(case.inputs):
        value = _random(type_, tokens, device)
        values[f"x{i}"] = AdapterWeight(value) if i in case.adapters else value
    source = operator(case.op).source(list(values), case.attributes)
    known = {"torch": torch, "F": F, "K": torch_ops, "batch": _Step(tokens, device), **values}
    call: Callable[[], Any] = eval(f"lambda: {source}", known)
    return call


def _random(type_: TensorType, tokens: int, device: torch.device) -> Tensor:
    shape = [tokens] * type_.is_token_wise + list(type_.features)
    dtype = getattr(torch, TORCH_NAMES[type_.dtype])
    if not type_.is_float:
        return torch.randint(0, 8, shape, device=device).to(dtype)
    return torch.rand(shape, device=device).add_(0.1).to(dtype)


def _seconds(call: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    first = _row(call, device, 1)
    once = _row(call, device, 1)
    if once > 3 * budget_s:
        return min(first, once, _row(call, device, 1))
    count = max(1, min(1000, round(budget_s / once)))
    return min(_row(call, device, count) for _ in range(3)) / count


def _row(call: Callable[[], Any], device: torch.device, count: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the device's name by its driver or the machine; a CPU's with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{_processor()}, {count} thread{'s' * (count != 1)}"


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()
