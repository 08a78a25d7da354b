"""The sizes of recorded losses."""

from __future__ import annotations

from typing import Any

import pytest

from pcg.runtime.training.recorded.loss_graphs import LossGraphs
from pcg.runtime.training.recorded.own_gradients import OwnGradients
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
