"""The tools that check kernels without a GPU do find what they are for."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import InterpreterError

from tests.support import toy_kernels as toy
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Kernel, compiled
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


def test_machine_code_says_what_it_uses() -> None:
    kernels = [
        Kernel(
            "tests.support.toy_kernels",
            "add",
            {"x": "*bf16", "y": "*bf16", "out": "*bf16", "count": "i32", "shift": "i32"},
            {"BLOCK": 1024},
        ),
        Kernel(
            "tests.support.toy_kernels",
            "product",
            {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32"},
            {"BLOCK": 64, "BLOCK_K": 64},
        ),
    ]
    add_80, add_90, product_80, product_90 = compiled(kernels)
    assert add_80.architecture == 80
    assert product_90.architecture == 90
    for code in (add_80, add_90):
        code.check_in_registers(64)
        assert code.count("LDG", "128") == 2
        assert not code.shared_bytes
    assert product_80.count("HMMA")
    assert product_90.count("HGMMA")
    assert product_80.shared_bytes
    with pytest.raises(AssertionError, match="registers, 1 allowed"):
        add_90.check_in_registers(1)
    with pytest.raises(RuntimeError, match="CompilationError"):
        compiled([Kernel("tests.support.toy_kernels", "add", {"x": "*bf16"}, {})])
