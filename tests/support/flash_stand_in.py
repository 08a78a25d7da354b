"""PyTorch's flash kernels for CUDA, computed on the CPU by scores, with the operators' schemas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pcg.kernels.torch import attention_math


def bound(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name, as the operator's schema takes them; TypeError if it does not."""
    schema = operator.default._schema
    places = [one.name for one in schema.arguments if not one.kwarg_only]
    named = {one.name for one in schema.arguments if one.kwarg_only}
    if len(args) != len(places) or not kwargs.keys() <= named:
        raise TypeError(f"{schema.name} takes {places} and {named}, not {len(args)} and {kwargs}")
    found = dict(zip(places, args, strict=True)) | kwargs
    for one in schema.arguments:
        value, kind = found.get(one.name), str(one.type)
        is_tensor = kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None)
        if is_tensor != isinstance(value, Tensor):
            raise TypeError(f"{schema.name}: {one.name} is {kind}, not {value!r}")
    return found


def _sequences(given: dict[str, Any]) -> Iterator[tuple[slice, slice, Tensor]]:
    """The queries and the keys of each sequence, and what each query sees."""
    ends = given["cum_seq_q"], given["cum_seq_k"]
    assert all(each.dtype == torch.int32 and each[0] == 0 for each in ends)
    lengths = [each.diff().max().item() for each in ends]
    assert lengths == [given["max_q"], given["max_k"]]
    assert [each[-1] for each in ends] == [len(given["query"]), len(given["key"])]
    assert given["is_causal"]
    assert given["dropout_p"] == 0.0
    left, right = given["window_size_left"], given["window_size_right"]
    assert right in (-1, 0)
    pairs = [list(zip(each[:-1].tolist(), each[1:].tolist(), strict=True)) for each in ends]
    for (q0, q1), (k0, k1) in zip(*pairs, strict=True):
        last = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        key = torch.arange(k1 - k0)
        seen = key <= last
        if left >= 0:
            seen &= key >= last - left
        yield slice(q0, q1), slice(k0, k1), seen


def _scores(given: dict[str, Any], rows: slice, keys: slice, seen: Tensor) -> Tensor:
    q, k = given["query"][rows], given["key"][keys]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = given["scale"] * torch.einsum("nhd,mhd->hnm", q, k)
    return scores.masked_fill(~seen, float("-inf"))


def _forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    given = bound(torch.ops.aten._flash_attention_forward, args, kwargs)
    q, v = given["query"], given["value"]
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for rows, keys, seen in _sequences(given):
        scores = _scores(given, rows, keys, seen)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
        sums[:, rows] = scores.logsumexp(-1)
    return out, sums, q.new_empty(0), q.new_empty(0), q.new_empty(0)


def _backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = bound(torch.ops.aten._flash_attention_backward, args, kwargs)
    q, k, v, out, dout = (given[name] for name in ("query", "key", "value", "out", "grad_out"))
    assert given["logsumexp"].shape == (q.shape[1], q.shape[0])
    assert given["logsumexp"].is_contiguous()
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    for rows, keys, seen in _sequences(given):
        scores = _scores(given, rows, keys, seen)
        weights = (scores - given["logsumexp"][:, rows, None]).exp()
        values, own = (x[keys].repeat_interleave(group, 1) for x in (v, k))
        inner = (dout[rows] * out[rows]).sum(-1).transpose(0, 1)[..., None]
        ds = weights * (torch.einsum("nhd,mhd->hnm", dout[rows], values) - inner)
        ds *= given["scale"]
        dq[rows] = torch.einsum("hnm,mhd->nhd", ds, own)
        dk[keys] = torch.einsum("hnm,nhd->mhd", ds, q[rows]).unflatten(1, (-1, group)).sum(2)
        of_values = torch.einsum("hnm,nhd->mhd", weights, dout[rows])
        dv[keys] = of_values.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@contextmanager
def attention_of_a_gpu(*, has_flash: bool, block_bytes: int) -> Iterator[list[str]]:
    """Have attention take the way of a GPU with tensors of the host; yields the kernels' calls."""
    calls: list[str] = []

    def noted(run: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(run.__name__)
            return run(*args, **kwargs)

        return called

    with (
        patch.object(attention_math, "has_flash", lambda q: has_flash),
        patch.object(attention_math, "_DTYPES", (torch.float64, torch.float32)),
        patch.object(attention_math, "_capability", lambda q: (9, 0)),
        patch.object(attention_math, "_forward", noted(_forward)),
        patch.object(attention_math, "_backward", noted(_backward)),
        patch.object(attention_math, "BLOCK_BYTES", block_bytes),
        patch("pcg.kernels.torch.attention_math.is_host", lambda q: False),
    ):
        yield calls
