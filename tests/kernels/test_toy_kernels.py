"""The tools that check kernels without a GPU do find what they are for."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import InterpreterError

from tests.support import toy_kernels as toy
from tests.support.interpreter import bf16
from tests.support.interpreter.sanitizer import sanitized

bf16.install()


def added(
    x: torch.Tensor, y: torch.Tensor, room: int, programs: int, shift: int = 0
) -> torch.Tensor:
    out = torch.zeros(room, dtype=x.dtype)
    toy.add[(programs,)](x, y, out, len(x), shift, BLOCK=8)
    return out


def test_the_sanitizer_finds_accesses_out_of_bounds_and_races() -> None:
    x = torch.randn(20)
    with sanitized():
        assert torch.equal(added(x, x, 20, 3), 2 * x)
        with pytest.raises(InterpreterError, match="a store out of bounds in program"):
            added(x, x, 20, 3, shift=1)
        square = torch.randn(16, 16)
        with pytest.raises(RuntimeError, match="store to one address"):
            toy.product[(2,)](square, square, square.clone(), 16, BLOCK=16, BLOCK_K=16)
        line = torch.randn(32)
        with pytest.raises(RuntimeError, match="loads what another one stores"):
            toy.add[(2,)](line, line, line, 16, 8, BLOCK=8)
    assert torch.equal(added(x, x, 21, 3, shift=1)[1:], 2 * x)
