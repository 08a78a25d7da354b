"""Functions side by side: sums over weights run in parts where others ask for some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pcg.kernels.torch import input_gradient
from pcg.kernels.torch.input_gradient import product_backward
from pcg.kernels.torch.products import ProductRequest
from pcg.runtime.model.merged_execution import CutExecution, run_merged

SIZES = {"q": 24, "k": 8, "v": 16}
COLUMNS = 12
TOKENS = 5


class Batch:
    layer = 2


def gradients_of(groups: Sequence[str], dys: dict[str, torch.Tensor], weights: Any) -> Any:
    """A function that asks for the gradients of some groups of weights, one after the other."""

    def ask() -> ProductRequest[Any]:
        batch: Any = Batch()
        whole = torch.zeros(len(dys["q"]), COLUMNS, dtype=torch.float64)
        for first, *rest in groups:
            others = [(name, dys[name], weights[name]) for name in rest]
            whole += yield from product_backward(
                batch, first, dys[first], weights[first], None, others
            )
        return whole

    return ask()


JOINED = ("qkv",)
APART = ("v", "k", "q")


@pytest.mark.parametrize(
    ("jobs", "calls"),
    [
        ([JOINED], [("qkv", 1)]),
        ([JOINED, JOINED], [("qkv", 2)]),
        ([JOINED, APART], [("v", 2), ("k", 2), ("q", 2)]),
        ([JOINED, APART, ("qvk",), JOINED], [("v", 4), ("k", 4), ("q", 4)]),
        # Whoever shares a weight, its product is one; the others go on.
        ([JOINED, ("qv",)], [("v", 2), ("q", 2), ("k", 1)]),
        ([JOINED, ("k",)], [("k", 2), ("v", 1), ("q", 1)]),
        ([("qk",), ("v",)], [("qk", 1), ("v", 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_each_weight_is_multiplied_once(
    jobs: Any, calls: list[tuple[str, int]], is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = {"dtype": torch.float64, "generator": generator}
    weights = {name: torch.randn(size, COLUMNS, **numbers) for name, size in SIZES.items()}
    # Each job has as many tokens more.
    counts = [TOKENS + number for number in range(len(jobs))]
    dys = [{name: torch.randn(n, size, **numbers) for name, size in SIZES.items()} for n in counts]
    expected = [
        sum(own[name] @ weights[name] for group in job for name in group)
        for job, own in zip(jobs, dys, strict=True)
    ]
    ran: list[tuple[int, int]] = []
    product = input_gradient.linear_backward

    def counted(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ran.append((weight.shape[0], len(dy)))
        return product(dy, weight)

    monkeypatch.setattr(input_gradient, "linear_backward", counted)
    functions = [gradients_of(job, own, weights) for job, own in zip(jobs, dys, strict=True)]
    if is_cut:
        cut: CutExecution[torch.Tensor] = CutExecution(functions)
        while not cut.is_done:
            cut.run(10)
        found = cut.results
    else:
        found = run_merged(functions)
        # Weights behind the first of a sum are added to it where it lies, and not counted.
        every = sum(counts)
        assert [size for size, _ in ran] == [SIZES[names[0]] for names, _ in calls]
        for (_, tokens), (_, sharing) in zip(ran, calls, strict=True):
            assert (tokens == every) is (sharing == len(jobs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
