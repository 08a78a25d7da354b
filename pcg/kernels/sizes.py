"""Sizes, dtypes and devices of kernels, for the compiler and the runtime, which have no Triton."""

from __future__ import annotations

PAGE_TOKENS = 16
"""Tokens of a page of the KV cache: vLLM's block size."""
HEAD_SIZES = (16, 32, 64, 80, 96, 128, 192, 256)
"""Elements of a head, of queries and keys or of values, in attention's kernels."""
KERNEL_DTYPES = ("f32", "bf16", "f16")
"""Dtypes of activations in kernels, as types of values name them."""
LEAST_CAPABILITY = (8, 0)
"""That of Ampere, the first with bfloat16 in tensor cores and with copies to shared memory."""
ROW_ALIGNMENT = 8
"""Columns of adapters' rows are multiples of it, so that every 16-byte load of bf16 lies in one row
or in none."""
RANK_STEP = 16
"""Ranks in tables of adapters' rows are multiples of it, as kernels take so many at once."""
DEFERRED_POINTERS = ("by_token_ptr", "s_ptr", "memory_ptr", "rows_ptr", "ranks_ptr")
"""What an emitted kernel is given of LoRA that it adds itself, in place of a tensor."""
DEFERRED_NUMBERS = ("matrix", "first_rank", "first_sum", "part_stride", "parts")
"""The numbers that it is given of it; `pcg.kernels.triton.adapters.deferred_lora` says what they
are."""
