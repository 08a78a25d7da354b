"""The dtype of the copies that LoRA is served from.

A step reads the weights of every adapter that runs, so 16 bits are half of its bytes. Training, and
what is saved, keep the adapters' own dtype.
"""

from __future__ import annotations

import torch

from pcg.errors import UnsupportedError
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.sgmv import check_native, is_native
from pcg.kernels.torch.products import has_onednn
from pcg.options import CompileOptions


def served_dtype(
    options: CompileOptions, base: ModelGraph, device: torch.device
) -> torch.dtype | None:
    """Return the dtype of the copies; None for the adapters' own dtype.

    By default it is the base's, where the kernels that serve read 16 bits: those for Triton, and
    the native one on CPUs with native bfloat16.

    Raises:
        UnsupportedError: the `adapter_copies` that were asked for cannot be had.
    """
    given, is_triton = options.adapter_copies, options.backend == "triton"
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[base.dtype])
    if given is not None and base.adapter_dtype != "f32":
        raise UnsupportedError(
            f"adapter_copies={given!r} is for adapters in float32, and those over a base in "
            "float64 are float64; leave it out"
        )
    if given == "float32":
        return None
    if given is None:
        is_read = is_triton or (
            options.tp == 1
            and dtype is torch.bfloat16
            and device.type == "cpu"
            and has_onednn(dtype)
            and is_native(device, dtype)
        )
        return dtype if is_read and dtype.itemsize == 2 else None
    if not is_triton:
        check_native(device, torch.bfloat16, f"adapter_copies={given!r}")
    elif dtype is not torch.bfloat16:
        raise UnsupportedError(
            f"adapter_copies={given!r} would round activations in {dtype}, as tensor cores multiply"
            " by one dtype; leave it out, or compile for dtype='bfloat16'"
        )
    return torch.bfloat16
