"""The sizes of recorded losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pcg.runtime.training.recorded.loss_graphs import LossGraphs
from pcg.runtime.training.recorded.recorded_program import OwnGradients
from tests.support.interpreter.tape import Tape


@pytest.mark.parametrize(
    ("tokens", "left", "expected"),
    [
        (1000, 700, 700),  # what is left is filled up to 768
        (700, 1000, 512),
        (512, 1000, 512),
        (10, 1000, 10),
        (10, 3, 3),
        (10_000, 9_000, 4_096),
    ],
)
def test_losses_have_a_recorded_size(tokens: int, left: int, expected: int) -> None:
    nothing: Any = None
    graphs = LossGraphs(nothing, OwnGradients(), nothing, Tape())
    assert graphs.fitting(tokens, left) == expected


class Squares:
    """A program whose loss of a token is (x · w - target)², with a weight that is trained."""

    def __init__(self) -> None:
        self.w = torch.tensor([0.5, -1.0, 2.0])

    def _losses(self, part: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        off = (part[0] @ self.w - targets) * (targets >= 0)
        return off, off**2

    def loss_alone(self, batch: Any, part: Any, targets: Tensor) -> Any:
        return self._losses(part, targets)[1]
        yield

    def loss_of(self, batch: Any, part: Any, targets: Tensor, slopes: Tensor) -> Any:
        off, losses = self._losses(part, targets)
        slope = (2 * off * slopes)[:, None]
        self.w.grad.add_((slope * part[0]).sum(0))
        return losses, [slope * self.w]
        yield

    def trained_in_loss(self) -> list[Tensor]:
        return [self.w]


def test_recorded_losses_have_weights_of_their_own_or_none() -> None:
    """Of all tokens one, of each its own, or none: in any order, with parts that are not full."""
    nothing: Any = None
    program, own = Squares(), OwnGradients()
    graphs = LossGraphs(program, own, nothing, Tape())
    generator = torch.Generator().manual_seed(0)
    expected = torch.zeros(3)
    served = 0
    kinds: list[Any] = ["all", "each", None, None, "bad", "all", "each", "each", None]
    for number, kind in enumerate(kinds):
        count = 3 + number
        x = torch.randn(20, 3, generator=generator)
        rows, targets = torch.randperm(20, generator=generator)[:count], torch.arange(count)
        slopes: Any = {"all": 0.25, "each": torch.rand(count, generator=generator)}.get(kind)
        if kind == "bad":
            slopes = torch.full((count,), float("inf"))
        found = graphs.run([x], rows, targets, slopes)
        if found is None:
            continue
        served += 1
        off = x[rows] @ program.w - targets
        torch.testing.assert_close(found.losses, off**2)
        torch.testing.assert_close(found.total, (off**2).double().sum())
        if kind is None:
            assert found.gradients == []
            continue
        slope = (2 * off * slopes)[:, None]
        torch.testing.assert_close(found.gradients[0], slope * program.w)
        if kind == "bad":
            program.w.grad = None  # a step whose gradients are not finite changes nothing
            expected = torch.zeros(3)
            continue
        expected += (slope * x[rows]).sum(0)
        torch.testing.assert_close(program.w.grad, expected)
    assert served == len(kinds) - 2  # the first with gradients, and the first without
