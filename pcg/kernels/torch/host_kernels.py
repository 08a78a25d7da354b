"""Attention and recurrences of single new tokens, norms and rotary embedding by native kernels.

PyTorch's attention needs a mask and equal lengths, and copies scattered rows; the kernel reads each
row of the KV cache once, where it lies. Recurrent states change in their slots. Norms and rotary
embedding of few tokens take a quarter of the time of PyTorch's operators. Each function returns
False or None where PyTorch has to run.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.attention_math import Scoring
from pcg.native_library import NativeFunction, bits_of, load_optional

_SOURCE = Path(__file__).parents[1] / "host_kernels.cpp"
_FUNCTIONS = (
    "decode_attention", "rms_norm", "rope", "append", "recur", "convolve", "elements", "replay",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values, or cos and sin."""


@functools.cache
def _library() -> Any:
    """Return the library; None where it cannot be compiled, which is logged once."""
    library = load_optional(_SOURCE, "attention of decode steps, norms and rotary embedding")
    if library is None:
        return None
    return {name: NativeFunction(library, f"pcg_{name}") for name in _FUNCTIONS}


def attend_single_tokens(
    batch: ProgramBatch,
    q: Tensor,
    cache: Pair,
    out: Tensor,
    scoring: Scoring,
    new: Pair | None = None,
    tables: Pair | None = None,
) -> bool:
    """Write attention of the spans of a single token to `out`; return False if it cannot.

    q is [T, H, D], the cache's keys [K, rows, D] and values [K, rows, Dv], out [T, H, Dv].

    Args:
        new: keys [T, K, D] and values [T, K, Dv] to append first; None if the cache has them.
        tables: cos and sin [T, n], to turn q and the new keys first; None if they are turned.
    """
    (keys, values), dtype = cache, q.dtype
    if _layout(q) is None or not keys.dtype is values.dtype is dtype:
        return False
    key_strides, value_strides, (tokens, heads, size) = keys.stride(), values.stride(), q.shape
    if key_strides[2] != 1 or value_strides[2] != 1:
        return False
    appended, turning = _NOTHING_NEW, _NOTHING_TURNED
    if new is not None:
        k, v = new
        if not k.dtype is v.dtype is dtype or batch.rows is None:
            return False
        if _layout(k) is None or _layout(v) is None:
            return False
        appended = (
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(batch.rows.data_ptr(), tokens),
        )
    if tables is not None:
        cos, sin = tables
        if not _are_tables(cos, sin, q):
            return False
        turning = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
    slopes, sinks = _of_heads(scoring.alibi), _of_heads(scoring.sinks)
    rows = batch.decode_rows(scoring.reach)
    _library()["decode_attention"](
        q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
        keys.data_ptr(), *key_strides[:2], values.data_ptr(), *value_strides[:2],
        heads, keys.shape[0], size, out.shape[2],
        0 if slopes is None else slopes.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        rows.address, rows.count, *appended, *turning,
        bits_of(scoring.scale), bits_of(scoring.softcap), dtype is torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip
    return True


_NOTHING_NEW, _NOTHING_TURNED = (0,) * 6, (0,) * 3


def _of_heads(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.to(torch.float32).contiguous()


def _are_tables(cos: Tensor, sin: Tensor, x: Tensor) -> bool:
    """Return whether the kernels turn x by cos and sin."""
    is_like = cos.dtype is sin.dtype is x.dtype and cos.shape[0] == sin.shape[0] == x.shape[0]
    return is_like and cos.is_contiguous() and sin.is_contiguous()


def append(cache: Tensor, x: Tensor, rows: Tensor) -> None:
    """Write x [T, K, D] to rows [T] of a cache [K, rows, D]."""
    layout, shape = _layout(x), cache.shape
    is_written = type(cache) is Tensor and cache.dtype is x.dtype and cache.stride(2) == 1
    if layout is None or layout != (shape[0], shape[2]) or not is_written:
        cache.index_copy_(1, rows, x.transpose(0, 1))
        return
    (heads, size), width = layout, x.itemsize
    _library()["append"](
        x.data_ptr(), width * x.stride(0), cache.data_ptr(), width * cache.stride(0),
        width * cache.stride(1), rows.data_ptr(), x.shape[0], heads, width * size,
    )  # fmt: skip


Slots: TypeAlias = tuple[Tensor, Tensor]
"""States [slots, …], and the slot of each sequence."""


def recurred(slots: Slots, inputs: Sequence[Tensor]) -> Tensor | None:
    """Run a token of each sequence, and change its state; None if the kernel does not.

    Inputs are those of `recurrent.recurrence`.
    """
    states, places = slots
    v, decay = inputs[2:4]
    tokens, heads, values = v.shape
    is_read = states.dtype is torch.float32 and states[0].is_contiguous() and values % 16 == 0
    if not is_read or not all(map(_is_read, inputs)):
        return None
    q, k, v, decay, *betas = (x.to(torch.float32).contiguous() for x in inputs)
    decay, out = decay.exp(), torch.empty_like(v)
    _library()["recur"](
        states.data_ptr(), states.stride(0), places.data_ptr(), tokens, heads, *k.shape[1:], values,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), decay[0, 0].numel(),
        betas[0].data_ptr() if betas else 0, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out.to(inputs[2].dtype)


def convolved(slots: Slots, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Convolve a token of each sequence, and shift its inputs; None if the kernel does not.

    Inputs are those of `recurrent.short_convolution`.
    """
    states, places = slots
    size, (tokens, channels) = states.shape[1], x.shape
    if not _is_read(x) or x.stride(1) != 1 or states.dtype is not x.dtype or not size:
        return None
    taps = weight.to(torch.float32).t().contiguous()
    offsets = None if bias is None else bias.to(torch.float32)
    out = x.new_empty(tokens, channels)
    _library()["convolve"](
        states.data_ptr(), states.stride(0), places.data_ptr(), tokens, channels, size,
        x.data_ptr(), x.stride(0), taps.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
        out.data_ptr(), x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def normed(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, rounds_first: bool
) -> Tensor | None:
    """Return the RMS norm of x [T, n] or [T, H, n], or None; see `base_operators.rms_norm`."""
    layout = _layout(x)
    if layout is None:
        return None
    pointer = 0
    if weight is not None:
        is_read = weight.dtype is x.dtype and weight.shape == x.shape[-1:]
        if not is_read or not weight.is_contiguous():
            return None
        pointer = weight.data_ptr()
    y = x.new_empty(x.shape)
    heads, size = layout
    _library()["rms_norm"](
        x.data_ptr(), x.stride(0), pointer, y.data_ptr(), x.shape[0], heads, size,
        bits_of(eps), bits_of(offset), rounds_first, x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Return the rotary embedding of x [T, H, D], or None; see `base_operators.rope_half`."""
    layout = _layout(x)
    if layout is None or not _are_tables(cos, sin, x):
        return None
    y = x.new_empty(x.shape)
    heads, size = layout
    _library()["rope"](
        x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), y.data_ptr(),
        x.shape[0], heads, size, cos.shape[1], x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return y


def is_native(tensors: Sequence[Tensor]) -> bool:
    """Return whether the kernels run on tensors' memory."""
    return bool(tensors) and tensors[0].is_cpu and _library() is not None


def add_or_multiply(a: Tensor, b: Tensor, y: Tensor, is_product: bool) -> None:
    """Write a + b or a · b of contiguous tensors to y, rounded as by PyTorch."""
    _library()["elements"](
        a.data_ptr(), b.data_ptr(), y.data_ptr(), y.numel(), is_product, y.dtype is torch.bfloat16
    )


def replay_calls(pairs: array[int]) -> None:
    """Run native calls: the address of each function, and that of its arguments."""
    address, count = pairs.buffer_info()
    _library()["replay"](address, count // 2)


def _layout(x: Tensor) -> tuple[int, int] | None:
    """Return heads and size of x; None if the kernels do not read it."""
    shape = x.shape
    if not _is_read(x) or len(shape) not in (2, 3) or x.stride(-1) != 1:
        return None
    if len(shape) == 2:
        return 1, shape[1]
    return (shape[1], shape[2]) if x.stride(1) == shape[2] else None


def _is_read(x: Tensor) -> bool:
    is_plain = type(x) is Tensor and x.is_cpu and not x.requires_grad
    return is_plain and x.dtype in DTYPES and _library() is not None
