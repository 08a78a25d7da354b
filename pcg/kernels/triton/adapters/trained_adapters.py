"""Products by adapters in training, by the segmented kernels: one job's, or several jobs' at once.

    s = x Aᵀ                   z = y + scale · s Bᵀ
    ds = scale · dz B          dB = scale · dzᵀ s          dA = dsᵀ x          dx = dz W + ds A

A bottleneck adapter's products are the same, around σ(s + scale · d).

Adapters are fp32 over activations of 16 bits, which these read as they are, where PyTorch makes
tensors of tokens in fp32; ds A alone is PyTorch's where it is not added to the base's dx at once. A
parameter is its own memory of rows, and B [out, r] of columns, read and its gradient written as
they lie (`RankRows.turned`); those of several jobs are joined, for which B is turned, which is
little beside their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.sizes import ROW_ALIGNMENT
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.lora import as_weight
from pcg.kernels.torch.products import (
    InputGradientTerm,
    Product,
    ProductRequest,
    fulfilled,
    joined_tokens,
    product_backward,
)
from pcg.kernels.triton.adapters import segmented_lora
from pcg.kernels.triton.adapters.segmented_activate import segment_sum, segmented_activate
from pcg.kernels.triton.adapters.token_tiles import TokenTiles
from pcg.kernels.triton.adapters.trained_rows import (
    are_few,
    as_sums,
    by_job,
    is_matrix,
    is_summand,
    is_tokens,
    parts_for,
    rows_of,
    scales_of,
    segments_at,
    segments_of,
    up_rows_of,
    vectors_of,
    whole_sum,
)


def shrink(x: Tensor, a: Any) -> Tensor:
    """s = x Aᵀ, [T, r] in A's dtype."""
    matrix = as_weight(a).weight
    if not (is_tokens(x) and is_matrix(matrix, x.shape[1])):
        return torch_ops.shrink(x, a)  # type: ignore[no-any-return]
    counts, ranks = [len(x)], [len(matrix)]
    tiles = segments_of(counts, ranks, x.device)
    s = segmented_lora.shrink(x, rows_of([matrix]), tiles, parts=parts_for(tiles))
    (own,) = by_job(whole_sum(s), counts, ranks)
    return own.contiguous()  # kept for backward


def expand_add(y: Tensor, s: Tensor, b: Any) -> Tensor:
    """y + scale · s Bᵀ, in y's dtype and memory of its own."""
    b = as_weight(b)
    if not (is_tokens(y) and is_summand(s) and is_matrix(b.weight.t(), y.shape[1])):
        return torch_ops.expand_add(y, s, b)
    up = up_rows_of([b.weight], len(y))
    tiles, scales = segments_of([len(y)], [s.shape[1]], y.device), scales_of([b], y.device)
    return segmented_lora.expand_add(y, as_sums([s]), up, tiles, scales, in_place=False)


def expand_backward(dz: Tensor, b: Any) -> Tensor:
    """ds = scale · dz B, [T, r] in B's dtype."""
    b = as_weight(b)
    if not (is_tokens(dz) and is_matrix(b.weight.t(), dz.shape[1])):
        return torch_ops.expand_backward(dz, b)
    counts, ranks = [len(dz)], [b.weight.shape[1]]
    up, tiles = up_rows_of([b.weight], len(dz)), segments_of(counts, ranks, dz.device)
    ds = segmented_lora.shrink(dz, up, tiles, scales_of([b], dz.device), parts_for(tiles))
    (own,) = by_job(whole_sum(ds), counts, ranks)
    return own


def outer(ds: Tensor, x: Tensor) -> Tensor:
    """dA = dsᵀ x, [r, in] in the dtype of ds."""
    if not (is_tokens(x) and is_summand(ds)):
        return torch_ops.outer(ds, x)
    ranks = [ds.shape[1]]
    tiles = segments_of([len(x)], ranks, x.device)
    (gradient,) = _outers(as_sums([ds]), x, ranks, tiles, None)
    return gradient


def scaled_outer(dz: Tensor, s: Tensor, b: Any) -> Tensor:
    """dB = scale · dzᵀ s, [out, r] in the dtype of s."""
    if not (is_tokens(dz) and is_summand(s)):
        return torch_ops.scaled_outer(dz, s, b)
    ranks, scales = [s.shape[1]], scales_of([as_weight(b)], dz.device)
    tiles = segments_of([len(dz)], ranks, dz.device)
    (gradient,) = _up_outers(as_sums([s]), dz, ranks, tiles, scales)
    return gradient


def lora_linear_backward(
    batch: ProgramBatch, name: str, dz: Tensor, weight: Tensor, a: Any, b: Any, s: Tensor
) -> ProductRequest[Any]:
    """Request the gradients of a linear operator with LoRA: ds [T, r], dB [out, r], dx [T, in].

    `name` is that of the weight [out, in] in its layer; dz is [T, out], A [r, in], B [out, r], and
    s = x Aᵀ [T, r].
    """
    a, b = as_weight(a), as_weight(b)
    known = is_tokens(dz) and is_summand(s) and not weight.shape[1] % ROW_ALIGNMENT
    known = known and is_matrix(b.weight.t(), dz.shape[1])
    if known and is_matrix(a.weight, weight.shape[1]):
        lora = LoraGradients(a, b, s)
        dx = yield from product_backward(batch, name, dz, weight, lora)
        return lora.ds, lora.db, dx
    ds, db = torch_ops.expand_backward(dz, b), torch_ops.scaled_outer(dz, s, b)
    dx = yield from product_backward(batch, name, dz, weight)
    return ds, db, dx.add_(torch_ops.shrink_backward(ds, a))


@dataclass(eq=False)
class LoraGradients(InputGradientTerm):
    """ds [T, r] and dB [out, r] of one job's LoRA at a linear operator, once they are made."""

    _a: Any
    _b: Any
    _s: Tensor
    ds: Any = field(default=None, init=False)
    db: Any = field(default=None, init=False)

    def add(
        self,
        dz: Tensor,
        dx: Tensor,
        jobs: Sequence[LoraGradients],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        up = up_rows_of([job._b.weight for job in jobs], sum(count for _, count in spans))
        down = rows_of([job._a.weight for job in jobs])
        ranks = [job._s.shape[1] for job in jobs]
        tiles = segments_at(spans, ranks, dz.device)
        scales = scales_of([job._b for job in jobs], dz.device)
        ds = whole_sum(segmented_lora.shrink(dz, up, tiles, scales, parts_for(tiles)))
        gradients = _up_outers(as_sums([job._s for job in jobs]), dz, ranks, tiles, scales)
        segmented_lora.expand_add(dx, ds, down, tiles)
        of_job = by_job(ds, [count for _, count in spans], ranks)
        for job, own, gradient in zip(jobs, of_job, gradients, strict=True):
            job.ds, job.db = own, gradient


def asked_outer(batch: ProgramBatch, name: str, ds: Tensor, x: Tensor) -> ProductRequest[Any]:
    """Request dA = dsᵀ x, [r, in], of ds [T, r] and x [T, in]; `name` is the gradient's."""
    if not (is_tokens(x) and is_summand(ds)):
        return fulfilled(torch_ops.outer(ds, x))
    return OuterProduct((batch.layer, name), x, ds).requested()


@dataclass(slots=True, eq=False)
class OuterProduct(Product):
    """dsᵀ x of one job."""

    _ds: Tensor
    is_own: ClassVar[bool] = True

    def run(self) -> None:
        self._outputs = outer(self._ds, self._take_x())

    def run_with(self, others: Sequence[OuterProduct]) -> None:
        """Run it and others as one launch, where they are small; else one after the other."""
        every = (self, *others)
        if not are_few([len(one._ds) for one in every]):
            for one in every:
                one.run()
            return
        x, counts = joined_tokens(every)
        widths = [one._ds.shape[1] for one in every]
        tiles = segments_of(counts, widths, x.device)
        gradients = _outers(as_sums([one._ds for one in every]), x, widths, tiles, None)
        for one, gradient in zip(every, gradients, strict=True):
            one._outputs = gradient.clone()


def bottleneck_backward(
    batch: ProgramBatch, name: str, dz: Tensor, up: Any, s: Tensor, bias: Any, function: str
) -> ProductRequest[Any]:
    """Request the gradients of a bottleneck adapter: ds [T, size], dU [out, size], dd [size].

    `name` is that of `up`, the adapter's U [out, size], in its layer; dz is [T, out], s = x Aᵀ
    [T, size], the bias d [size], and `function` names σ.
    """
    up, bias = as_weight(up), as_weight(bias)
    if is_tokens(dz) and is_summand(s) and is_matrix(up.weight.t(), dz.shape[1]):
        return BottleneckGradients((batch.layer, name, function), dz, up, s, bias).requested()
    dh = torch_ops.expand_backward(dz, up)
    with torch.enable_grad():
        before = s.detach().requires_grad_()
        h = torch_ops.activate(before, bias, function)
        (ds,) = torch.autograd.grad(h, before, dh)
    du = torch_ops.scaled_outer(dz, h.detach(), up)
    return fulfilled((ds, du, torch_ops.sum_tokens(ds, bias)))


@dataclass(slots=True, eq=False)
class BottleneckGradients(Product):
    """The gradients of one job's bottleneck adapter; products of one key have the same σ."""

    _up: Any
    _s: Tensor
    _bias: Any
    is_own: ClassVar[bool] = True

    def run(self) -> None:
        self.run_with(())

    def run_with(self, others: Sequence[BottleneckGradients]) -> None:
        every = (self, *others)
        function = str(self.key[-1])
        dz, counts = joined_tokens(every)
        device, widths = dz.device, [one._s.shape[1] for one in every]
        up = up_rows_of([one._up.weight for one in every], sum(counts))
        tiles = segments_of(counts, widths, device)
        of_up = scales_of([one._up for one in every], device)
        of_bias = scales_of([one._bias for one in every], device)
        biases = vectors_of([one._bias.weight for one in every])
        s = as_sums([one._s for one in every])
        dh = segmented_lora.shrink(dz, up, tiles, of_up)
        h = segmented_activate(s, biases, up.ranks, tiles, function, of_bias)
        ds = segmented_activate(s, biases, up.ranks, tiles, function, of_bias, dh)
        sums = replace(biases, memory=torch.empty_like(biases.memory, dtype=torch.float32))
        segment_sum(ds, sums, up.ranks, tiles, of_bias)
        gradients = zip(
            by_job(ds, counts, widths),
            _up_outers(h, dz, widths, tiles, of_up),
            sums.memory.split(widths),
            strict=True,
        )
        for one, (own, of_rows, of_vector) in zip(every, gradients, strict=True):
            one._outputs = own, of_rows, of_vector


def _up_outers(
    s: Tensor, dz: Tensor, ranks: Sequence[int], tiles: TokenTiles, scales: Tensor | None
) -> Sequence[Tensor]:
    """The same as B lies, [out, r] each; those of several jobs are turned."""
    if len(ranks) > 1:
        return [one.t().contiguous() for one in _outers(s, dz, ranks, tiles, scales)]
    memory = torch.empty((dz.shape[1], *ranks), dtype=torch.float32, device=dz.device)
    lying = rows_of([memory.t()], memory)
    gradients = replace(lying, turned=ranks[0], memory=memory)
    segmented_lora.segment_outer(s, dz, gradients, tiles, scales)
    return [memory]


def _outers(
    s: Tensor, x: Tensor, ranks: Sequence[int], tiles: TokenTiles, scales: Tensor | None
) -> Sequence[Tensor]:
    """scale · Σ s ⊗ x of each segment, [r, columns] each; s is [1, 1, sums]."""
    memory = torch.empty((sum(ranks), x.shape[1]), dtype=torch.float32, device=x.device)
    gradients = rows_of(memory.split([*ranks]), memory)
    segmented_lora.segment_outer(s, x, gradients, tiles, scales)
    own: Sequence[Tensor] = memory.split(list(ranks))
    return own
