"""What programs launch at the sizes of Llama-3.1-8B, as Triton specialises it, for real GPUs."""

from __future__ import annotations

import pytest

from tests.interpreter.launched import launched

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that a program may have, of an A100 and an H200."""
OF_OTHER_METHODS = ("vector_kernel", "inner_kernel", "activate_kernel", "sum_kernel")


@pytest.mark.parametrize(
    ("steps", "architecture", "expected"),
    [
        ("of_lora", 90, ()),
        pytest.param("of_lora", 80, (), marks=pytest.mark.slow),
        pytest.param("of_every_method", 90, OF_OTHER_METHODS, marks=pytest.mark.slow),
        pytest.param("of_every_method", 80, OF_OTHER_METHODS, marks=pytest.mark.slow),
    ],
)
def test_every_launch_compiles_and_stays_in_registers(
    steps: str, architecture: int, expected: tuple[str, ...]
) -> None:
    found = launched(f"tests.codegen.llama_steps:{steps}", architecture)
    for code in found:
        code.check_in_registers()
        assert code.shared_bytes <= SHARED[architecture], code.kernel
    names = {code.kernel for code in found}
    assert names >= {*expected, "block_0_rope_append", "block_0_silu_mul", "greedy_rows"}
    for name in ("attend_splits", "attend_tiles", "query_gradients", "key_gradients"):
        assert name in names
    for name in ("shrink_kernel", "expand_kernel", "outer_kernel", "loss_rows"):
        assert name in names
    with_products = ("attend_tiles", "query_gradients", "key_gradients", "outer_kernel")
    for code in found:
        if code.kernel in with_products:
            assert code.count("HGMMA" if architecture == 90 else "HMMA"), code.kernel


def test_a_launch_that_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_steps"):
        launched("tests.codegen.llama_steps:no_such_steps")
