"""What programs launch at real models' sizes, as Triton specialises it there, for real GPUs."""

from __future__ import annotations

import pytest

from tests.support.interpreter.gpu_code import Code
from tests.support.interpreter.launched import launched

pytestmark = pytest.mark.timeout(1800)  # minutes each: kernels of real sizes are compiled
LLAMA = "meta-llama/Llama-3.1-8B"
OTHERS = (
    "Qwen/Qwen3-8B",
    "facebook/opt-6.7b",
    "google/gemma-2-27b",
    "meta-llama/Llama-3.2-1B",
    "mosaicml/mpt-7b",
    "openai-community/gpt2-xl",
)
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Bytes that a program may have: of an A100, RTX 3090 and A10, RTX 4090 and L4, H200, RTX 5090."""
OF_LORA = {"shrink_kernel", "expand_kernel", "outer_kernel", "loss_rows", "greedy_rows"}
OF_OTHER_METHODS = {"vector_kernel", "inner_kernel", "activate_kernel", "sum_kernel"}
ATTENTION = {"attend_splits", "attend_tiles", "query_gradients", "key_gradients"}


def checked(steps: str, architecture: int, model: str) -> list[Code]:
    """The code of what is launched: nothing spills, and what should is done by tensor cores."""
    found = launched(f"tests.support.model_steps:{steps}", architecture, model)
    for code in found:
        code.check_in_registers()
        assert code.shared_bytes <= SHARED[architecture], code.kernel
        if code.kernel in ("attend_tiles", "query_gradients", "outer_kernel"):
            assert code.count("HGMMA" if architecture == 90 else "HMMA"), code.kernel
    assert {code.kernel for code in found} >= OF_LORA | ATTENTION
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [90, pytest.param(80, marks=pytest.mark.slow)], ids=lambda n: f"sm_{n}"
)
def test_lora_of_llama(architecture: int) -> None:
    names = {code.kernel for code in checked("of_lora", architecture, LLAMA)}
    assert {"block_0_rope_append", "block_0_silu_mul"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED, ids=lambda n: f"sm_{n}")
def test_every_method_of_llama(architecture: int) -> None:
    names = {code.kernel for code in checked("of_every_method", architecture, LLAMA)}
    assert names >= OF_OTHER_METHODS


@pytest.mark.slow
@pytest.mark.parametrize("model", OTHERS)
def test_lora_of_other_models(model: str) -> None:
    checked("of_lora", 90, model)


def test_steps_that_fail_say_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_steps"):
        launched("tests.support.model_steps:no_such_steps")
