"""Attention of single new tokens, norms and rotary embedding by the native kernels of this name.

PyTorch's attention needs a mask and equal lengths, and copies scattered rows; the kernel reads each
row of the KV cache once, where it lies. Norms and rotary embedding of few tokens take a quarter of
the time of PyTorch's operators. Each function returns False or None where PyTorch has to run.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.attention_math import Scoring
from pcg.native_library import load_optional

_SOURCE = Path(__file__).parents[1] / "host_kernels.cpp"
_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _library() -> Any:
    """Return the library; None where it cannot be compiled, which is logged once."""
    library = load_optional(_SOURCE, "attention of decode steps, norms and rotary embedding")
    if library is None:
        return None
    address, integer = ctypes.c_void_p, ctypes.c_int64
    number, flag = ctypes.c_float, ctypes.c_int
    library.pcg_decode_attention.argtypes = address, number, number, flag, flag
    library.pcg_rms_norm.argtypes = (
        *(address, integer, address, address, integer, integer, integer),
        *(number, number, flag, flag, flag),
    )
    library.pcg_rope.argtypes = (
        *(address, integer, address, address, address),
        *(integer, integer, integer, integer, flag, flag),
    )
    library.pcg_append.argtypes = (
        *(address, integer, address, integer, integer, address, integer, integer, integer),
    )
    functions = (
        library.pcg_decode_attention, library.pcg_rms_norm, library.pcg_rope, library.pcg_append,
    )  # fmt: skip
    for function in functions:
        function.restype = None
    return functions


def attend_single_tokens(
    batch: ProgramBatch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scoring: Scoring
) -> bool:
    """Write attention of the spans of a single token to `out`; return False if it cannot.

    q is [T, H, D], keys [K, rows, D], values [K, rows, Dv], out [T, H, Dv].
    """
    every = q, keys, values, out
    if not _is_read(q) or any(x.dtype is not q.dtype for x in every):
        return False
    if any(x.stride(2) != 1 for x in every) or q.stride(1) != q.shape[2]:
        return False
    rows = batch.decode_rows(scoring.window)
    of_heads = [
        None if x is None else x.to(torch.float32).contiguous()
        for x in (scoring.alibi, scoring.sinks)
    ]
    numbers = array(
        "q",
        (
            *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0)),
            *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
            *(values.data_ptr(), values.stride(0), values.stride(1)),
            *(q.shape[1], keys.shape[0], q.shape[2], out.shape[2]),
            *(0 if x is None else x.data_ptr() for x in of_heads),
            *(rows.address, rows.count),
        ),
    )
    attend, is_bf16 = _library()[0], q.dtype is torch.bfloat16
    attend(
        numbers.buffer_info()[0], scoring.scale, scoring.softcap, is_bf16, torch.get_num_threads()
    )
    return True


def append(cache: Tensor, x: Tensor, rows: Tensor) -> None:
    """Write x [T, K, D] to rows [T] of a cache [K, rows, D]."""
    layout, shape = _layout(x), cache.shape
    is_written = type(cache) is Tensor and cache.dtype is x.dtype and cache.stride(2) == 1
    if layout is None or layout != (shape[0], shape[2]) or not is_written:
        cache.index_copy_(1, rows, x.transpose(0, 1))
        return
    (heads, size), width = layout, x.itemsize
    _library()[3](
        x.data_ptr(), width * x.stride(0), cache.data_ptr(), width * cache.stride(0),
        width * cache.stride(1), rows.data_ptr(), x.shape[0], heads, width * size,
    )  # fmt: skip


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
    y = torch.empty(x.shape, dtype=x.dtype)
    heads, size = layout
    _library()[1](
        x.data_ptr(), x.stride(0), pointer, y.data_ptr(), x.shape[0], heads, size,
        eps, offset, rounds_first, x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return y


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Return the rotary embedding of x [T, H, D], or None; see `base_operators.rope_half`."""
    layout = _layout(x)
    tables = cos, sin
    if layout is None or any(t.shape[0] != x.shape[0] or t.dtype is not x.dtype for t in tables):
        return None
    if not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    y = torch.empty(x.shape, dtype=x.dtype)
    heads, size = layout
    _library()[2](
        x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), y.data_ptr(),
        x.shape[0], heads, size, cos.shape[1], x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return y


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
    return is_plain and x.dtype in _DTYPES and _library() is not None
