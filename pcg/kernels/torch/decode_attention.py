"""Attention of a single new token of each sequence, by the native kernel of this name.

PyTorch's attention needs a mask and equal lengths, and copies scattered rows; the kernel reads each
row of the KV cache once, where it lies.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch.attention_math import Scoring
from pcg.native_library import load_optional

_SOURCE = Path(__file__).parents[1] / "decode_attention.cpp"
_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _kernel() -> Any:
    """Return the kernel; None where it cannot be compiled, which is logged once."""
    library = load_optional(_SOURCE, "attention of decode steps")
    if library is None:
        return None
    function, number = library.pcg_decode_attention, ctypes.c_float
    function.argtypes = ctypes.c_void_p, number, number, ctypes.c_int, ctypes.c_int
    function.restype = None
    return function


def attend_single_tokens(
    batch: ProgramBatch, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scoring: Scoring
) -> bool:
    """Write attention of the spans of a single token to `out`; return False if it cannot.

    q is [T, H, D], keys [K, rows, D], values [K, rows, Dv], out [T, H, Dv].
    """
    every = q, keys, values, out
    is_read = q.is_cpu and q.dtype in _DTYPES and all(x.dtype is q.dtype for x in every)
    if not is_read or type(q) is not Tensor or _kernel() is None:
        return False
    if any(x.stride(2) != 1 for x in every) or q.stride(1) != q.shape[2]:
        return False
    rows = batch.decode_rows(scoring.window)
    of_heads = [
        None if x is None else x.to(torch.float32).contiguous()
        for x in (scoring.alibi, scoring.sinks)
    ]
    numbers = np.array(
        [
            *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0)),
            *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
            *(values.data_ptr(), values.stride(0), values.stride(1)),
            *(q.shape[1], keys.shape[0], q.shape[2], out.shape[2]),
            *(0 if x is None else x.data_ptr() for x in of_heads),
            *(rows.numbers.ctypes.data, rows.count),
        ],
        dtype=np.int64,
    )
    is_bf16, threads = q.dtype is torch.bfloat16, torch.get_num_threads()
    _kernel()(numbers.ctypes.data, scoring.scale, scoring.softcap, is_bf16, threads)
    return True
