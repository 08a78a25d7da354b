"""Attention of all sequences of a batch by PyTorch's flash kernels for CUDA, without scores.

The kernels are FlashAttention-2's, of 16 bits, as `torch.nn.attention.varlen` has them. Queries and
keys of sequences lie one after the other, and `Ends` says where each ends; the last query of a
sequence sees its last key.

    lse' = ln(exp lse + exp sink);  out' = exp(lse - lse') out

adds a sink to what they return, and backward is theirs: it reads out' and lse' alone.

Shapes: T tokens, M keys, H heads, K KV heads, D head size, n sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch, Span
from pcg.kernels.torch.attention_math import Scoring
from pcg.kernels.uploads import uploaded_list

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_LARGEST_TRAINED_HEAD = 192
"""The largest heads whose backward fits the shared memory of capabilities 8.6, 8.9 and 12."""
_LARGE_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Capabilities with more shared memory."""


class Ends(NamedTuple):
    """The sequences of some queries and keys: `[n + 1]` sums of lengths, int32, and the longest."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def is_flash(q: Tensor, v: Tensor, scoring: Scoring, *, trains: bool) -> bool:
    """Return whether the kernels take attention of q [T, H, D] and values v [M, K, Dv]."""
    size = q.shape[-1]
    if not has_flash(q) or q.dtype not in _DTYPES or scoring.alibi is not None:
        return False
    if scoring.softcap or size != v.shape[-1] or size % 8 or size > _LARGEST_HEAD:
        return False
    return not trains or size <= _LARGEST_TRAINED_HEAD or _capability(q) in _LARGE_MEMORY


def has_flash(q: Tensor) -> bool:
    """Return whether the kernels run on q's device."""
    return (
        q.is_cuda
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and _capability(q) >= (8, 0)
    )


def _capability(q: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(q.device)


def ends_of(batch: ProgramBatch, spans: Sequence[Span], *, cached: bool) -> Ends:
    """Return the ends of spans, uploaded once for all layers.

    Args:
        cached: True if keys are those of a sequence from its start on, not the span's own.
    """
    key = ("ends", tuple((span.start, span.length) for span in spans), cached)
    if key not in batch.known:
        lengths = [span.length for span in spans]
        keys = [span.context + span.length if cached else span.length for span in spans]
        device = batch.input_ids.device
        sums = [uploaded_list(_sums(each), torch.int32, device) for each in (lengths, keys)]
        batch.known[key] = Ends(sums[0], sums[1], max(lengths), max(keys))
    found: Ends = batch.known[key]
    return found


def _sums(lengths: Sequence[int]) -> list[int]:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def attend_flash(
    q: Tensor, k: Tensor, v: Tensor, ends: Ends, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [T, H] of q [T, H, D], k [M, K, D] and v [M, K, D]."""
    out, sums, *_ = _forward(
        q, k, v, *ends, 0.0, True, False, scale=scoring.scale, **_window(scoring)
    )
    lse = sums.transpose(0, 1)
    if scoring.sinks is None:
        return out, lse
    total = torch.logaddexp(lse, scoring.sinks.to(lse.dtype))
    return out * torch.exp(lse - total).unsqueeze(-1).to(out.dtype), total


def attend_flash_backward(
    *saved: Tensor, ends: Ends, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attend_flash`, from dout, out, lse, q, k and v."""
    dout, out, lse, q, k, v = saved
    # Nothing is dropped out, so the state of random numbers is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = q.new_empty(0)
    dq, dk, dv = _backward(
        dout, q, k, v, out, lse.transpose(0, 1).contiguous(), *ends, 0.0, True, state, unused,
        scale=scoring.scale, **_window(scoring),
    )  # fmt: skip
    return dq, dk, dv


def _window(scoring: Scoring) -> dict[str, int]:
    """The keys before and after a token's own that it sees; -1 for all, as the kernels have it."""
    return {
        "window_size_left": scoring.window - 1 if scoring.window else -1,
        "window_size_right": 0 if scoring.window else -1,
    }
