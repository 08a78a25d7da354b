"""What programs launch at the sizes of Llama-3.1-8B, as Triton specialises it there, for Hopper."""

from __future__ import annotations

import pytest

from tests.interpreter.launched import launched


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("of_lora", ()),
        pytest.param(
            "of_every_method",
            ("vector_kernel", "inner_kernel", "activate_kernel", "sum_kernel"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_launch_compiles_and_stays_in_registers(
    steps: str, expected: tuple[str, ...]
) -> None:
    found = launched(f"tests.codegen.llama_steps:{steps}")
    for code in found:
        code.check_in_registers()
        assert code.shared_bytes <= 227 * 1024, code.kernel
    names = {code.kernel for code in found}
    assert names >= {*expected, "block_0_rope_append", "block_0_silu_mul", "greedy_rows"}
    for name in ("attend_splits", "attend_tiles", "query_gradients", "key_gradients"):
        assert name in names
    for name in ("shrink_kernel", "expand_kernel", "outer_kernel", "loss_rows"):
        assert name in names
    with_products = ("attend_tiles", "query_gradients", "key_gradients", "outer_kernel")
    for code in found:
        if code.kernel in with_products:
            assert code.count("HGMMA"), code.kernel


def test_a_launch_that_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_steps"):
        launched("tests.codegen.llama_steps:no_such_steps")
