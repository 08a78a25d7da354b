"""The functions that emitted PyTorch programs call, as `K.name`, on any device.

They are the reference meaning of the operators of `pcg.ir.operators`, in files of the same names.
"""

from __future__ import annotations

from pcg.kernels.torch.attention import attention, attention_backward
from pcg.kernels.torch.base_operators import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_part,
    cross_entropy_part_backward,
    embedding,
    embedding_part,
    layer_norm,
    layer_norm_backward,
    pack_signs,
    relu_backward_packed,
    rms_norm,
    rms_norm_backward,
    rope_half,
    rope_half_backward,
    rope_interleaved,
    rope_interleaved_backward,
    slice_backward,
)
from pcg.kernels.torch.bypass import (
    activate,
    bias_add,
    dropout,
    inner,
    replaced,
    scale,
    sum_tokens,
    virtual_tokens,
    virtual_tokens_backward,
    without_virtual,
)
from pcg.kernels.torch.collectives import (
    all_gather,
    all_gathers,
    all_reduce,
    all_reduces,
    collected,
    dispatched,
    own_part,
    placed_part,
    reduce_scatter,
)
from pcg.kernels.torch.experts import (
    expert_expand_add,
    expert_expand_backward,
    expert_linear,
    expert_linear_backward,
    expert_outer,
    expert_scaled_outer,
    expert_shrink,
    expert_shrink_backward,
    pack_rows,
    part_of_rank,
    routed_topk,
    unpack_rows,
)
from pcg.kernels.torch.input_gradient import product_backward
from pcg.kernels.torch.latent_attention import latent_attention, latent_window_backward
from pcg.kernels.torch.lora import (
    add_lora,
    column_factor,
    column_norm,
    column_norm_part,
    embedding_outer,
    embedding_shrink,
    expand_add,
    expand_add_part,
    expand_backward,
    khatri_rao,
    khatri_rao_backward,
    lora_linear,
    outer,
    scaled_outer,
    shrink,
    shrink_backward,
    singular_down,
    singular_down_backward,
    vera_down,
    vera_up,
    vera_up_backward,
)
from pcg.kernels.torch.lossy import (
    dequantize_fp8,
    dequantize_int8,
    pack_bf16,
    quantize_fp8,
    quantize_int8,
    standardized,
    standardized_backward,
    unpack_bf16,
)
from pcg.kernels.torch.products import (
    base_piece,
    linear,
    linear_backward,
    linear_group,
    product,
    requested_piece,
)
from pcg.kernels.torch.recurrent import (
    recurrence,
    recurrence_backward,
    short_convolution,
    short_convolution_backward,
)
