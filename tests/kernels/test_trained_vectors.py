"""Gradients of vectors in training, in the interpreter: sums in fp64 are the truth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.torch import ops as torch_ops
from pcg.kernels.triton.adapters import trained_adapters
from pcg.peft.weights import AdapterWeight
from pcg.runtime.model.merged_execution import run_merged
from tests.support.interpreter import bf16
from tests.support.interpreter.sanitizer import sanitized
from tests.support.segmented_batches import DTYPES

bf16.install()
ROUNDING = 1e-5
"""Of sums of at most 100 products in fp32, relative to the sum of their magnitudes."""


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.sampled_from((8, 72, 200)),
    st.sampled_from(DTYPES),
    st.sampled_from(("inner", "inner of a base", "sum", "sum of a bias")),
    st.booleans(),
)
def test_of_one_and_of_several_jobs(
    counts: list[int], size: int, dtype: torch.dtype, kind: str, are_small: bool
) -> None:
    """One launch where the jobs' tokens are few; else one after the other."""
    generator = torch.Generator().manual_seed(sum(counts))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    base = drawn(size).to(dtype) if kind == "inner of a base" else None
    batch: Any = SimpleNamespace(layer=3)
    asking, expected, magnitudes = [], [], []
    for job, count in enumerate(counts):
        dz, y = drawn(2, count, size).to(dtype)
        bias = AdapterWeight(drawn(size), 0.5 + job) if kind == "sum of a bias" else None
        if kind.startswith("inner"):
            wide = None if base is None else base.double()
            asking.append(trained_adapters.asked_inner(batch, "dv", dz, y, base))
            expected.append(torch_ops.inner(dz.double(), y.double(), wide))
            each = y.double() if wide is None else y.double() - wide
            magnitudes.append((dz.double() * each).abs().sum(0))
            one = trained_adapters.inner(dz, y, base)
        else:
            asking.append(trained_adapters.asked_sum_tokens(batch, "dv", dz, bias))
            expected.append(torch_ops.sum_tokens(dz.double(), bias))
            magnitudes.append((0.5 + job) * dz.double().abs().sum(0))
            one = trained_adapters.sum_tokens(dz, bias)
        assert ((one - expected[-1]).abs() <= ROUNDING * magnitudes[-1] + 1e-12).all()
    launches = []
    run = trained_adapters.segment_inner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trained_adapters, "segment_inner", lambda *given: (launches.append(given), run(*given))
        )
        if not are_small:
            patch.setattr(trained_adapters, "_MOST_JOINED", 0)
        with sanitized():
            results = run_merged(asking)
    assert len(launches) == (1 if are_small else len(counts))
    for found, truth, magnitude in zip(results, expected, magnitudes, strict=True):
        assert found.shape == truth.shape
        assert ((found - truth).abs() <= ROUNDING * magnitude + 1e-12).all()


def test_vectors_of_other_bases_are_not_joined() -> None:
    batch: Any = SimpleNamespace(layer=0)
    dz, y, bases = torch.ones(3, 8), torch.ones(3, 8), torch.tensor([[2.0], [3.0]]).expand(2, 8)
    asking = [trained_adapters.asked_inner(batch, "dv", dz, y, base.contiguous()) for base in bases]
    first, second = run_merged(asking)
    assert first.tolist() == [-3.0] * 8
    assert second.tolist() == [-6.0] * 8


def test_what_the_kernels_do_not_read() -> None:
    """Nothing is asked for then."""
    batch: Any = SimpleNamespace(layer=0)
    dz = torch.ones(3, 5, dtype=torch.float64)
    asking = [
        trained_adapters.asked_inner(batch, "dv", dz, 2 * dz),
        trained_adapters.asked_sum_tokens(batch, "db", dz),
    ]
    first, second = run_merged(asking)
    assert first.tolist() == [6.0] * 5
    assert second.tolist() == [3.0] * 5
