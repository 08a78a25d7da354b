"""The functions that emitted Triton programs call, as `K.name`; PyTorch's where there is no kernel.

Names, shapes and meanings are those of `pcg.kernels.torch.ops`.
"""

from __future__ import annotations

from typing import Any

from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.triton.adapters.deferred_lora import (
    begun_lora,
    deferred_rows,
    nothing_deferred,
    with_deferred_lora,
)
from pcg.kernels.triton.adapters.dispatch import (
    activate,
    add_lora,
    bias_add,
    expand_add,
    lora_linear,
    scale,
    shrink,
)
from pcg.kernels.triton.adapters.trained_adapters import (
    asked_inner,
    asked_outer,
    asked_outer_group,
    asked_sum_tokens,
    bottleneck_backward,
    expand_add_group,
    expand_backward,
    inner,
    lora_group_backward,
    lora_linear_backward,
    outer,
    scaled_outer,
    shrink_group,
    sum_tokens,
)
from pcg.kernels.triton.attention.dispatch import attention, attention_backward
from pcg.kernels.triton.elementwise import dropout, pack_signs, relu_backward_packed
from pcg.kernels.triton.fused import FusedPart, fused, side_by_side
from pcg.kernels.triton.linear_cross_entropy import linear_cross_entropy
from pcg.kernels.triton.sampling import draw, greedy, keep


def __getattr__(name: str) -> Any:
    return getattr(torch_ops, name)
