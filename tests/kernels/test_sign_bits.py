"""Packed signs against torch's operators, and their machine code."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcg.kernels.triton import elementwise as template
from pcg.kernels.triton.elementwise import pack_signs, relu_backward_packed
from tests.support.interpreter import bf16
from tests.support.interpreter.gpu_code import Code, Kernel, compiled
from tests.support.interpreter.sanitizer import sanitized

bf16.install()

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@given(
    tokens=st.integers(0, 7),
    features=st.sampled_from([8, 24, 64, 136]),
    dtype=st.sampled_from(DTYPES),
    size_bytes=st.sampled_from([256, 1024, 16384]),
    is_strided=st.booleans(),
)
def test_signs_and_gradient_are_torchs(
    tokens: int, features: int, dtype: torch.dtype, size_bytes: int, is_strided: bool
) -> None:
    torch.manual_seed(tokens)
    y, dy = torch.randn(2, tokens, 2 * features).to(dtype)
    y, dy = (y[:, ::2], dy[:, ::2]) if is_strided else (y[:, :features], dy[:, :features])
    y = y.relu()
    with sanitized(), mock.patch.object(template, "PROGRAM_BYTES", size_bytes):
        signs = pack_signs(y)
        dx = relu_backward_packed(dy, signs)
    packed = np.packbits((y > 0).numpy(), axis=-1, bitorder="little")
    assert torch.equal(signs, torch.from_numpy(packed))
    assert torch.equal(dx, torch.ops.aten.threshold_backward(dy, y, 0))
    assert dx.dtype == dtype


def test_zeros_and_no_numbers_are_not_positive() -> None:
    y = torch.tensor([0.0, -0.0, 1e-30, -1.0, float("nan"), float("inf"), -float("inf"), 1.0])
    dy = torch.full((8,), float("nan"))
    dy[2] = 3.0
    with sanitized():
        signs = pack_signs(y)
        dx = relu_backward_packed(dy, signs)
    assert signs.tolist() == [0b10100100]
    assert dx[[0, 1, 3, 4, 6]].tolist() == [0.0] * 5
    assert dx[2] == 3.0


# ------------------------------------------------------------------------------- machine code


@pytest.fixture(scope="module")
def codes() -> dict[str, list[Code]]:
    kernels = {}
    for dtype, size_bytes in (("bf16", 2), ("fp32", 4)):
        signature = dict.fromkeys(("y", "dy", "dx"), f"*{dtype}") | {"signs": "*u8", "count": "i32"}
        block = {"BLOCK": template.PROGRAM_BYTES // (8 * size_bytes)}
        for name in ("pack", "unpack") if dtype == "bf16" else ("unpack",):
            kernels[f"{name} {dtype}"] = Kernel(template.__name__, name, signature, block)
    made = compiled(list(kernels.values()))
    return {name: made[2 * i : 2 * i + 2] for i, name in enumerate(kernels)}


@pytest.mark.slow
def test_machine_code(codes: dict[str, list[Code]]) -> None:
    for code in codes["pack bf16"]:
        code.check_in_registers(64)
        assert code.count("LDG") == code.count("LDG", "128") == 8
        assert code.count("STG") == 1  # a thread's eight signs
    for code in codes["unpack bf16"] + codes["unpack fp32"]:
        code.check_in_registers(80)
        assert code.count("LDG", "128") == 8
        assert code.count("LDG") == 9
        assert code.count("STG") == code.count("STG", "128") == 8
