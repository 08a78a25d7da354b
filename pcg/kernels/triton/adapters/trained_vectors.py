"""Gradients of vectors in training, by the segmented kernels: one job's, or several jobs' at once.

    Σ dz ⊙ (y - b)        of what scales y: (IA)³, DoRA
    scale · Σ dz          of what is added: biases

over the tokens of each job, in fp32. They are read as they are; those of several jobs are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pcg.kernels.batch import ProgramBatch
from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.torch.lora import as_weight
from pcg.kernels.torch.products import Product, ProductRequest, fulfilled, joined_tokens
from pcg.kernels.triton.adapters.segmented_vectors import segment_inner
from pcg.kernels.triton.adapters.trained_rows import (
    are_few,
    is_tokens,
    rows_of,
    scales_of,
    segments_of,
)


def inner(dz: Tensor, y: Tensor, base: Tensor | None = None) -> Tensor:
    """The sum over tokens of dz ⊙ (y - base), [n], in fp32 at least."""
    if not (is_tokens(dz) and is_tokens(y)):
        return torch_ops.inner(dz, y, base)
    return _sums([len(dz)], dz, y, base, None)[0]


def sum_tokens(dz: Tensor, bias: Any = None) -> Tensor:
    """The sum over tokens, in fp32 at least; scaled as a bias is."""
    if not is_tokens(dz):
        return torch_ops.sum_tokens(dz, bias)
    scales = None if bias is None else scales_of([[as_weight(bias)]], dz.device)
    return _sums([len(dz)], dz, None, None, scales)[0]


def asked_inner(
    batch: ProgramBatch, name: str, dz: Tensor, y: Tensor, base: Tensor | None = None
) -> ProductRequest[Any]:
    """Request `inner` of dz, y [T, n] and base [n]; `name` is the gradient's in its layer."""
    if not (is_tokens(dz) and is_tokens(y)):
        return fulfilled(torch_ops.inner(dz, y, base))
    return VectorGradient((batch.layer, name), dz, y, base, None).requested()


def asked_sum_tokens(
    batch: ProgramBatch, name: str, dz: Tensor, bias: Any = None
) -> ProductRequest[Any]:
    """Request `sum_tokens` of dz [T, n]; `name` is the gradient's in its layer."""
    if not is_tokens(dz):
        return fulfilled(torch_ops.sum_tokens(dz, bias))
    return VectorGradient((batch.layer, name), dz, None, None, bias).requested()


@dataclass(slots=True, eq=False)
class VectorGradient(Product):
    """The gradient of one job's vector; those of one key all have y and a bias, or none."""

    _y: Tensor | None
    _base: Tensor | None
    _bias: Any
    is_own: ClassVar[bool] = True

    def run(self) -> None:
        (self._outputs,) = self._made((self,))

    def run_with(self, others: Sequence[VectorGradient]) -> None:
        """Run it and others as one launch, where they are small; else one after the other."""
        every = (self, *others)
        tensors = 1 if self._y is None else 2
        of_one_base = all(one._base is self._base for one in others)
        counts = [tensors * len(one._x) for one in every if one._x is not None]
        if of_one_base and are_few(counts):
            for one, gradient in zip(every, self._made(every), strict=True):
                one._outputs = gradient.clone()
        else:
            for one in every:
                one.run()

    def _made(self, every: Sequence[VectorGradient]) -> Sequence[Tensor]:
        dz, counts = joined_tokens(every)
        y = self._y
        if y is not None and len(every) > 1:
            y = torch.cat([one._y for one in every if one._y is not None])
        for one in every:
            one._y = None
        scales = None
        if self._bias is not None:
            scales = scales_of([[as_weight(one._bias) for one in every]], dz.device)
        return _sums(counts, dz, y, self._base, scales)


def _sums(
    counts: Sequence[int], dz: Tensor, y: Tensor | None, base: Tensor | None, scales: Tensor | None
) -> Sequence[Tensor]:
    """The sum over the tokens of each job, [n] each, in fp32."""
    sums = torch.zeros((len(counts), dz.shape[1]), dtype=torch.float32, device=dz.device)
    rows = rows_of(sums.split(1), sums)
    segment_inner(dz, y, rows, segments_of(counts, [1] * len(counts), dz.device), base, scales)
    return [*sums]
