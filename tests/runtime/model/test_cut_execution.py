"""Functions that run in parts give what they give as wholes, wherever they are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pcg.kernels.torch.input_gradient import product_backward
from pcg.kernels.torch.products import ProductRequest, product
from pcg.runtime.model.merged_execution import BLOCK, CutExecution

VOCABULARY, HIDDEN = 2500, 5
"""Three blocks of rows, the last one shorter."""
BATCH: Any = SimpleNamespace(layer=2)


def loss_and_gradient(
    x: Tensor, head: Tensor, bias: Tensor, targets: Tensor
) -> ProductRequest[tuple[Tensor, Tensor]]:
    (logits,) = yield from product(BATCH, "head", x, [head], [bias])
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    slope = torch.softmax(logits, -1)
    slope[torch.arange(len(x)), targets] -= 1
    return loss, (yield from product_backward(BATCH, "head", slope, head))


@given(
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None)
def test_losses_in_parts_are_those_of_autograd(
    counts: list[int], sizes: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    head, bias = torch.randn(VOCABULARY, HIDDEN).to(dtype), torch.randn(VOCABULARY).to(dtype)
    xs = [torch.randn(count, HIDDEN).to(dtype) for count in counts]
    targets = [torch.randint(VOCABULARY, (count,)) for count in counts]
    cut = CutExecution(
        [loss_and_gradient(x, head, bias, t) for x, t in zip(xs, targets, strict=True)]
    )
    ran, turn, whole = 0, 0, 2 * sum(counts) * VOCABULARY
    while not cut.is_done:
        size = sizes[turn % len(sizes)]
        part = cut.run(size)
        assert part <= size + BLOCK * sum(counts)
        ran, turn = ran + part, turn + 1
    assert ran == whole
    rel = 0.05 if dtype == torch.bfloat16 else 1e-4
    for x, target, (loss, gradient) in zip(xs, targets, cut.results, strict=True):
        wide = x.float().requires_grad_()
        logits = torch.nn.functional.linear(wide, head.float(), bias.float())
        expected = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        expected.backward()
        assert float(loss) == pytest.approx(expected.item(), rel=rel)
        assert wide.grad is not None
        assert gradient.dtype == dtype
        error = (gradient.float() - wide.grad).norm() / wide.grad.norm()
        assert error < rel


def test_without_functions_it_is_done() -> None:
    cut: CutExecution[None] = CutExecution([])
    assert cut.run(1) == 0
    assert cut.is_done
    assert cut.results == []
